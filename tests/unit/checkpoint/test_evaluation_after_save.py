"""An evaluation between a save and the next step is noticed, and no other loop."""

import logging

import pytest

from tests.logged import heard
from torchacc.checkpoint.evaluation_after_save import EvaluationAfterSave
from torchacc.data import AsyncLoader

WARNING = "an evaluation follows the save of step 2, and draws a random number"


def run(order, prefetch):
    """Train three epochs of two steps; return what was logged."""
    training, evaluation = (AsyncLoader([1, 2], prefetch=prefetch) for _ in range(2))
    late, step = EvaluationAfterSave(training), 0

    def save_if_due():
        late.on_step(step)
        if step == 2:
            late.on_save(step)

    acts = {"save": save_if_due, "evaluate": lambda: list(evaluation) if step % 2 == 0 else None}
    with heard(logging.WARNING) as warned:
        for _ in range(3):
            for _ in training:
                step += 1
                for act in order:
                    acts[act]()
    return warned


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_evaluation_after_a_save_is_warned_of_once(prefetch):
    (said,) = run(["save", "evaluate"], prefetch)
    assert said.startswith(WARNING)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("order", [["evaluate", "save"], ["save"]])
def test_other_loops_are_not(order, prefetch):
    assert not run(order, prefetch)


def test_the_last_evaluation_is_not():
    training, evaluation = AsyncLoader([1, 2]), AsyncLoader([1])
    late = EvaluationAfterSave(training)
    with heard(logging.WARNING) as warned:
        for step, _ in enumerate(training, start=1):
            late.on_step(step)
        late.on_save(2)
        list(evaluation)
    assert not warned
