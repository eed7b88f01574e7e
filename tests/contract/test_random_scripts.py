"""Random scripts, on each engine beside plain PyTorch: the same numbers after each line, or a documented refusal.

What scripts do is in `script_rules.py`. Programs of it are drawn by hypothesis, run by long-lived workers, and cut down
to what matters when they fail. `--long` draws thousands. A program that has once failed stays here, in `FOUND`.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from launching import environment
from script_programs import programs
from script_runner import NUM_RANKS, Runner
from script_sides import over_axes

pytestmark = pytest.mark.slow

NATIVE, ALONE, FOUR, MULTIPROCESS, SPMD = NUM_RANKS
LAYOUTS = {
    NATIVE: ["full-shard", "grad-op", "no-shard", "default", *over_axes(2)],
    ALONE: ["default", "grad-op"],
    FOUR: ["hybrid", "replicated", "compiled", *over_axes(4)],
    MULTIPROCESS: ["full-shard", "no-shard", "default"],
    SPMD: ["full-shard", "tp", "sp", "ep"],
}
NUM_PROGRAMS = {NATIVE: 24, ALONE: 6, FOUR: 12, MULTIPROCESS: 5, SPMD: 8}
"""So that CI runs some hundred rules, in two minutes of one core: a rule takes a few milliseconds natively, and a
tenth of a second or two under XLA, where it may have to be compiled."""
LENGTH = 14

Call = tuple[str, int, int]

FOUND: dict[str, list[Call]] = {
    "optimizer-made-after-a-forward": [("forward", 0, 0), ("train", 0, 0)],
    "inference-mode-first": [("evaluate", 0, 1), ("train", 0, 0), ("evaluate", 0, 1)],
    "inference-mode-between": [("train", 0, 0), ("evaluate", 0, 1), ("evaluate", 0, 0), ("train", 0, 0)],
    "largest-element-of-one-row": [("forward", 0, 0), ("backward", 0, 0), ("clip", 4, 3), ("clip", 1, 1)],
    "some-gradients-dropped-in-a-window": [("make_optimizer", 0, 3), ("accumulate", 0, 0), ("zero_grad", 0, 1)],
    "freeze-in-a-window": [("accumulate", 0, 0), ("freeze", 0, 1), ("train", 0, 0)],
    "filled-by-torch-nn-init": [("edit", 4, 4), ("evaluate", 0, 0)],
    "clip-in-a-window": [("accumulate", 0, 0), ("clip", 0, 0), ("clip", 0, 1)],
}
FOUND_OVER_AXES: dict[str, list[Call]] = {
    "pp-zero-bubble-fsdp": [("forward", 2, 6), ("look_at_state", 0, 0), ("backward", 2, 10)],
    "dp-pp": [("freeze", 0, 4), ("freeze", 0, 1), ("freeze", 0, 2), ("forward", 0, 0), ("train", 0, 0)],
    "pp": [("accumulate", 1, 8), ("freeze", 0, 1), ("train", 0, 0), ("look_at_gradients", 0, 0)],
}
"""By layout."""
EACH = [pytest.param(engine, marks=[pytest.mark.xla] if engine.startswith("xla") else []) for engine in NUM_RANKS]


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[str, Runner]]:
    """The engines' workers, of which each starts with its first program."""
    made = {engine: Runner(engine, environment()) for engine in NUM_RANKS}
    yield made
    for runner in made.values():
        runner.close()


def check(runner: Runner, program: dict[str, Any]) -> None:
    failure = runner.run(program)
    assert failure is None, f"{json.dumps(program)}\n{failure}"


@pytest.mark.parametrize("engine", EACH)
def test_random_scripts(runners, engine, request):
    long = request.config.getoption("--long")

    @settings(
        max_examples=settings().max_examples if long else NUM_PROGRAMS[engine],
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(LAYOUTS[engine], length=2 * LENGTH if long else LENGTH))
    def run(program: dict[str, Any]) -> None:
        check(runners[engine], program)

    run()
    print(f"{engine}: {runners[engine].num_rules} rules in {runners[engine].num_programs} programs")


@pytest.mark.parametrize("engine", [each for each in EACH if each.values != (FOUR,)])
def test_programs_that_have_failed(runners, engine, request):
    layouts = LAYOUTS[engine][:2]
    for index, (name, rules) in enumerate(FOUND.items()):
        for layout in layouts if request.config.getoption("--long") else [layouts[index % len(layouts)]]:
            failure = runners[engine].run({"layout": layout, "looks": False, "syncs": False, "rules": rules})
            assert failure is None, f"{name}, {layout}: {failure}"


@pytest.mark.parametrize("layout", FOUND_OVER_AXES)
def test_programs_over_axes_that_have_failed(runners, layout):
    runner = runners[FOUR if layout in over_axes(4) else NATIVE]
    check(runner, {"layout": layout, "looks": False, "syncs": False, "rules": FOUND_OVER_AXES[layout]})
