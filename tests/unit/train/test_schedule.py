"""Learning rates over a stage."""

from typing import get_args

import pytest
import torch

from torchacc.errors import ConfigError
from torchacc.train.config import Schedule
from torchacc.train.schedule import DECAYS, factor, make_scheduler


def rates(name, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = make_scheduler(
        optimizer, **{"name": name, "total_steps": 6, "warmup_steps": 2, "min_lr_ratio": 0.1} | options
    )
    found = []
    for _ in range(6):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_a_file_takes_the_schedules_that_there_are():
    assert set(get_args(Schedule)) == set(DECAYS)


def test_each_schedule_warms_up_and_falls_as_its_name_says():
    assert rates("constant") == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert rates("linear") == pytest.approx([1.0, 2.0, 2.0, 1.55, 1.1, 0.65])
    cosine = rates("cosine")
    assert cosine[:3] == [1.0, 2.0, 2.0]
    assert cosine[4] == pytest.approx(1.1)  # half of the way from 2 to 0.2
    assert rates("linear", warmup_steps=0, min_lr_ratio=0.0)[0] == 2.0


def test_the_rate_ends_at_its_lowest_and_stays_there():
    ends = [factor(step, name="cosine", total_steps=6, warmup_steps=2, min_lr_ratio=0.1) for step in (6, 7, 100)]
    assert ends == pytest.approx([0.1, 0.1, 0.1])
    assert factor(1, name="linear", total_steps=2, warmup_steps=2, min_lr_ratio=0.1) == 1.0


def test_a_warm_up_longer_than_the_stage_is_refused():
    with pytest.raises(ConfigError, match=r"scheduler.warmup_steps = 7: the stage has 6 steps"):
        rates("linear", warmup_steps=7)
