"""The table of the contract's cases, and what they are made of: tiny models, and comparisons with plain copies of them.

A case is a function in one of the `*_cases.py` that is registered by `@case(...)`. `contract_worker.py` runs those of
an engine in one launch; a test looks at how its case ended, on every rank. Most compare with a plain copy of their
model on the CPU of the same process, which trains on the whole batch: after the runtime has started, as XLA cannot
start later.
"""

import copy
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from launching import FULL_CONTRACT
from torch import nn

import torchacc
from tests import forkrun, gpus
from torchacc.engines import registry
from torchacc.engines.native import replicated_model

RANK = int(os.environ.get("RANK", "0"))
_KIND, _, _NUMBER = sys.argv[1].rpartition("-") if len(sys.argv) > 2 else ("", "", "")
ENGINE = _KIND.removesuffix("-gpu")
NUM_DEVICES = int(_NUMBER) if _NUMBER.isdigit() else 2
NATIVE, MULTIPROCESS, SPMD = "native", "xla-multiprocess", "xla-spmd"
ALL = (NATIVE, MULTIPROCESS, SPMD)
XLA = (MULTIPROCESS, SPMD)
IS_FULL = bool(os.environ.get(FULL_CONTRACT))
FLAT = {"flatten_parameters": True}
"""The option of a layout that one engine has, `MULTIPROCESS`."""
REFERENCE = "reference"
"""In place of an engine: plain PyTorch in a process that never starts XLA."""

# The sums of a gradient run in another order over two devices. Adam divides by a gradient's own size, so that it needs
# an eps above that rounding, as in `training_cases.py`, and is compared less closely.
RELATIVE = 1e-5
ABSOLUTE = 1e-6
ADAM_ABSOLUTE = 5e-6
ADAM = {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1}

Result = TypeVar("Result")
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(7))
"""The global batch: two rows for each device."""


@dataclass(frozen=True)
class Case:
    """A function to run, and the kinds of engines that it is about, with how many devices."""

    run: Callable[[], Any]
    engines: Collection[str]
    num_devices: int = 2
    is_left_out: bool = False
    """Whether it runs with `--full-contract` only."""


CASES: dict[str, Case] = {}


def case(
    engines: Collection[str] = ALL,
    each: Mapping[str, Any] | None = None,
    left_out: Collection[str] = (),
    num_devices: int = 2,
) -> Callable[..., Any]:
    """Register a function as a case, or as one for each entry of a mapping, whose value it is called with.

    Args:
        engines: The kinds of engines that it is about.
        each: The entries.
        left_out: Those of them that run with `--full-contract` only.
        num_devices: On how many devices it runs.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if each is None:
            add_case(function.__name__, Case(function, engines, num_devices))
        for key, value in (each or {}).items():
            add_case(
                f"{function.__name__}-{key}", Case(partial(function, value), engines, num_devices, key in left_out)
            )
        return function

    return register


def case_of_each_layout(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function of options as a case `plain`, and as `flat` for the one engine that flattens."""
    case(each={"plain": {}})(function)
    return case([MULTIPROCESS], each={"flat": FLAT})(function)


def add_case(name: str, case: Case) -> None:
    assert name not in CASES, f"there are two cases {name}"
    CASES[name] = case


def main() -> None:
    """Run the cases that are asked for, in the table's order, once the runtime has started."""
    out, chosen = Path(sys.argv[2]), set(sys.argv[3:])
    assert chosen <= CASES.keys(), f"no such cases: {chosen - CASES.keys()}"
    if ENGINE != _KIND:
        gpus.join()
    forkrun.collect_rarely()  # a rank that torchrun has started is no fork of a process that does
    torch.manual_seed(0)
    replicated_model.make_group = _make_group
    if ENGINE != REFERENCE:
        accelerate(MLP(), size=NUM_DEVICES)
    for name in (name for name in CASES if name in chosen):
        print(f"case {name}", flush=True)
        outcome: dict[str, Any] = {"failed": None, "returned": None}
        try:
            outcome["returned"] = CASES[name].run()
        except (Exception, pytest.fail.Exception):  # the latter where pytest.raises() waits in vain
            outcome["failed"] = traceback.format_exc()
        torch.save(outcome, out / f"{name}.{RANK}.part")
        (out / f"{name}.{RANK}.part").rename(out / f"{name}.{RANK}.pt")
        if ENGINE != REFERENCE:
            torchacc.dist.rendezvous(name)
            leave_groups()


def leave_groups() -> None:
    """Leave the process groups of a case's models: the threads of each wake up all the time, and cases are many."""
    while _groups_of_models:
        dist.destroy_process_group(_groups_of_models.pop())


_groups_of_models: list[dist.ProcessGroup] = []


def _make_group(make: Callable[[], dist.ProcessGroup] = replicated_model.make_group) -> dist.ProcessGroup:
    _groups_of_models.append(make())
    return _groups_of_models[-1]


# What cases are made of


class MLP(nn.Module):
    """Two layers that become units, and a head that belongs to the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_config(
    *, compute: Mapping[str, Any] | None = None, memory: Mapping[str, Any] | None = None, **fsdp: Any
) -> torchacc.Config:
    fsdp = {"size": 2, "use_spmd": ENGINE == SPMD, **fsdp}
    return torchacc.Config.from_dict(
        {
            "backend": ENGINE.partition("-")[0],
            "compute": compute or {},
            "memory": memory or {},
            "dist": {"fsdp": fsdp},
        }
    )


def accelerate(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> nn.Module:
    torchacc.accelerate(model, None, make_config(**options), optimizer)
    return model


def sharded_and_plain(make: Callable[[], nn.Module] = MLP, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    model = make()
    plain = copy.deepcopy(model)
    return accelerate(model, **options), plain


def part(whole: torch.Tensor) -> torch.Tensor:
    """Return this process's rows of a global batch, on its devices."""
    return registry.active_engine().to_device(whole if ENGINE == SPMD else whole.chunk(2)[RANK])


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def by_rank(payload: Any) -> list[Any]:
    return registry.active_engine().group.all_gather_objects(payload)


def plain_value(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()


def whole_gradient(parameter: nn.Parameter, num_rows: int) -> torch.Tensor | None:
    """Return the gradient of the unsharded parameter; None where no rank has any."""
    if ENGINE == MULTIPROCESS:
        assert len(set(by_rank(parameter.grad is None))) == 1, "only some ranks have a gradient"
    return None if parameter.grad is None else plain_value(parameter.grad)


def check_gradients(model: nn.Module, plain: nn.Module) -> None:
    torchacc.sync()  # as one program: each gradient that is read would be one of its own
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        check_equal(whole_gradient(parameter, len(expected[name])), expected[name].grad, f"gradient of {name}")


def on_rank_0(compute: Callable[[], Result]) -> Result:
    """Return what rank 0 computes, and raise what it raises, on all ranks: an unsharded model needs to train once."""
    group = registry.active_engine().group
    return group.broadcast_object(group.call_on_all(lambda: compute() if RANK == 0 else None))


def check_parameters(model: nn.Module, plain: nn.Module | None, absolute: float = ABSOLUTE) -> None:
    """Compare the parameters with those of a plain copy, which rank 0 alone needs to have."""
    found = torchacc.full_state_dict(model, rank0_only=True)

    def compare() -> None:
        expected = plain.state_dict()
        assert list(found) == list(expected)
        for name in expected:
            check_equal(found[name], expected[name], name, absolute)

    on_rank_0(compare)


def check_equal(found: Any, expected: Any, what: str, absolute: float = ABSOLUTE) -> None:
    if found is None or expected is None:
        assert found is expected, f"{what}: {found} in place of {expected}"
        return
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        found, expected = found.cpu(), expected.cpu()
    torch.testing.assert_close(
        found, expected, rtol=RELATIVE, atol=absolute, msg=lambda text: f"rank {RANK}, {what}: {text}"
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAM)


def step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()


def check_training(
    model: nn.Module,
    plain: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    absolute: float = ABSOLUTE,
) -> None:
    """Check the gradients of a step, and the parameters after two."""
    optimizer, plain_optimizer = make_optimizer(model), make_optimizer(plain)
    loss_of(model(part(X))).backward()
    loss_of(plain(X)).backward()
    check_gradients(model, plain)
    for _ in range(2):
        step(model, part(X), optimizer)
        step(plain, X, plain_optimizer)
    check_parameters(model, plain, absolute)


def check_still_trains(model: nn.Module, plain: nn.Module) -> None:
    model.zero_grad()
    plain.zero_grad()
    check_training(model, plain)
