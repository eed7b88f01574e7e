"""Run random scripts on one engine, beside plain PyTorch, and say of each where it first differs.

    python script_worker.py native answers     # rank 0 reads programs from standard input, and answers into a file
    python forkrun.py 2 script_worker.py native answers

A line in is a program: {"layout": …, "looks": …, "rules": [["train", 0, 1], …]}; a line out is null, or the failure.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from script_rules import RULES
from script_sides import PlainSide, ShardedSide, active_engine, random_numbers_untouched

import torchacc

# As in casekit.py: two devices sum in another order, and Adam divides by that. Relative to a tensor's largest element,
# as the terms of a sum may nearly cancel each other.
RELATIVE, ABSOLUTE = 1e-5, 5e-6
OURS = (
    torchacc.ConfigError,
    torchacc.DataError,
    torchacc.EngineError,
    torchacc.CheckpointError,
)
LAST = [["look_at_state", 0, 0], ["train", 0, 0], ["look_at_gradients", 0, 0], ["evaluate", 1, 0], ["train", 1, 1]]
"""Whatever a script has done, this has to go on."""
LOOKS = [["look_at_state", 0, 0], ["look_at_gradients", 0, 0], ["list_names", 0, 0]]


class MismatchError(Exception):
    """Both sides have run a rule, and do not agree."""


def check_equal(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, dict):
        if list(found) != list(expected):
            raise MismatchError(f"{what}: {list(found)} in place of {list(expected)}")
        for key in expected:
            check_equal(found[key], expected[key], f"{what} {key}")
    elif isinstance(expected, list | tuple):
        if len(found) != len(expected):
            raise MismatchError(f"{what}: {found} in place of {expected}")
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_equal(one, other, f"{what}[{index}]")
    elif isinstance(expected, torch.Tensor) and found is not None:
        check_tensor(found, expected, what)
    elif isinstance(expected, float) and isinstance(found, float):
        check_tensor(torch.tensor(found), torch.tensor(expected), what)
    elif found is not expected and found != expected:
        raise MismatchError(f"{what}: {found} in place of {expected}")


def check_tensor(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    found = found.detach()
    found = (found.full_tensor() if hasattr(found, "full_tensor") else found).cpu()
    try:
        expected = expected.detach()
        finite = expected[expected.isfinite()].abs()  # a script may diverge: then both have
        size = float(finite.max()) if finite.numel() else 0.0
        torch.testing.assert_close(found, expected, rtol=0, atol=ABSOLUTE + RELATIVE * size, equal_nan=True)
    except AssertionError as error:
        values = f"{found.flatten()[:4].tolist()} in place of {expected.flatten()[:4].tolist()}"
        raise MismatchError(f"{what}: {values}: {error}") from None


class Script:
    """One program, on both sides."""

    def __init__(self, engine: str, layout: str, folder: Path) -> None:
        self.plain = PlainSide(layout, beside=engine)
        self.sharded = ShardedSide(layout, engine, folder)

    def run(self, call: Any) -> str | None:
        """Run a rule on both sides; return how they differ on this rank."""
        name, a, b = call
        try:
            if self._is_refused(name, a, b):
                return self.run(LOOKS[0])
            return None
        except Exception as error:
            if isinstance(error, MismatchError | AssertionError):
                return str(error)
            told = "".join(traceback.format_exception(error)[-6:])
            print(f"{call}: {told}", file=sys.stderr, flush=True)  # in case that the other ranks wait elsewhere
            return told

    def _is_refused(self, name: str, a: int, b: int) -> bool:
        rule = RULES[name]
        pattern = rule.refusal(self.sharded.engine, self.plain, a, b)
        pending = list(self.sharded.pending)
        try:
            with random_numbers_untouched():
                found = rule.run(self.sharded, a, b)
        except OURS as error:
            if pattern is None or not re.search(pattern, str(error)):
                raise
            self.sharded.pending = pending
            return True
        expected = rule.run(self.plain, a, b)
        check_equal(found, expected, name)
        return False


def run_program(engine: str, program: Any, folder: Path) -> str | None:
    """Return how the sides of a program first differ on any rank, and where."""
    script = Script(engine, program["layout"], folder)
    each = LOOKS if program["looks"] else []
    calls = [call for given in program["rules"] for call in [given, *each]]
    for index, call in enumerate([*calls, *LAST, *LOOKS]):
        failures = script.sharded.by_rank(script.run(call))
        if program["syncs"]:
            script.sharded.sync()
        for rank, failure in enumerate(failures):
            if failure is not None:
                at = f"rule {index} of {len(calls)}" if index < len(calls) else "what every program ends with"
                return f"{call} ({at}), rank {rank}: {failure}"
    return None


def main() -> None:
    engine = sys.argv[1].removesuffix("-1").removesuffix("-4")
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    make = Script(engine, "default", Path("/nowhere")).sharded  # starts the runtime
    answers = open(sys.argv[2], "w") if rank == 0 else None  # noqa: SIM115 - until the end
    if answers is not None:
        print("ready", file=answers, flush=True)
    while True:
        line = sys.stdin.readline() if rank == 0 else ""
        line = make.by_rank(line)[0]
        if not line:
            return
        folder = Path(make.by_rank(tempfile.mkdtemp() if rank == 0 else "")[0])
        try:
            failure = run_program(engine, json.loads(line), folder)
        except Exception:
            failure = traceback.format_exc()
        failure = next((each for each in make.by_rank(failure) if each), None)
        if answers is not None:
            shutil.rmtree(folder)
            print(json.dumps(failure), file=answers, flush=True)


if __name__ == "__main__":
    main()
    assert active_engine() is not None
