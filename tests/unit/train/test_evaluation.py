"""When the validation loss says to stop."""

import math

from torchacc.train.config import EarlyStoppingConfig
from torchacc.train.evaluation import EarlyStopping


def stops_after(losses, **options):
    stopping = EarlyStopping(EarlyStoppingConfig(**options))
    for count, loss in enumerate(losses, start=1):
        again = EarlyStopping(EarlyStoppingConfig(**options))
        again.load_state_dict(stopping.state_dict())
        stopping = again  # as after a checkpoint
        stopping.see(loss)
        if stopping.is_due:
            return count
    return None


def test_it_is_due_after_evaluations_without_an_improvement():
    assert stops_after([3.0, 2.0, 2.1, 2.2, 2.3], patience=3) == 5
    assert stops_after([3.0, 2.0, 2.1, 1.9, 2.0], patience=2) is None
    assert stops_after([3.0, 2.95, 2.91], patience=2, min_delta=0.1) == 3
    assert stops_after([3.0, math.nan, math.nan], patience=2) == 3


def test_without_the_section_it_never_is():
    stopping = EarlyStopping(None)
    for _ in range(10):
        stopping.see(1.0)
    assert not stopping.is_due
