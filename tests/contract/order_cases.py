"""Orders of calls other than step after step: the same script on a sharded model and on a plain one, same numbers.

Each order is such a script. What it notes, and the parameters that it leaves, have to be the same, and where plain
PyTorch raises, so do the engines.
"""

from collections.abc import Callable
from typing import Any

from casekit import (
    ADAM_ABSOLUTE,
    ENGINE,
    MULTIPROCESS,
    NATIVE,
    SPMD,
    X,
    case,
    check_equal,
    check_parameters,
    part,
    sharded_and_plain,
)
from orders import ORDERS, Order, Scored, Script
from torch import nn

STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {"sharding_strategy": "FULL_SHARD"},
    "grad-op": {"sharding_strategy": "SHARD_GRAD_OP"},
    "none": {"sharding_strategy": "NO_SHARD"},
}


def run(script: Callable[[Script], None], make: Callable[[], nn.Module] = Scored, **options: Any) -> None:
    """Run a script on a sharded model and on a plain one, and compare what it has seen and left."""
    model, plain = sharded_and_plain(make, **options)
    sides = Script(model, part(X), is_sharded=True), Script(plain, X, is_sharded=False)
    for side in sides:
        script(side)
    found, expected = sides[0].seen, sides[1].seen
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        check_equal(one.float(), other.float(), f"value {index} that the script has seen")
    check_parameters(model, plain, ADAM_ABSOLUTE)
    if ENGINE == NATIVE and options.get("sharding_strategy") != "NO_SHARD":
        at_rest = [parameter for parameter in model.parameters() if not hasattr(parameter, "to_local")]
        assert not at_rest, f"{len(at_rest)} parameters are not sharded"


BESIDES = ("grad-op", "none")
"""Beside full sharding each order runs with one of these, and its neighbour with the other."""
LEFT_OUT = {f"{name}-{BESIDES[index % 2]}" for index, name in enumerate(ORDERS)}
PAIRS = {f"{name}-{strategy}": (name, strategy) for name in ORDERS for strategy in STRATEGIES}


@case([NATIVE], each=PAIRS, left_out=LEFT_OUT)
def order_of(chosen: tuple[str, str]) -> None:
    name, strategy = chosen
    run(ORDERS[name][0], **STRATEGIES[strategy])


@case([SPMD], each={name: script for name, (script, engines) in ORDERS.items() if SPMD in engines})
def order_under_spmd_of(script: Order) -> None:
    run(script)


@case([MULTIPROCESS], each={name: script for name, (script, engines) in ORDERS.items() if MULTIPROCESS in engines})
def order_between_xla_processes_of(script: Order) -> None:
    run(script)
