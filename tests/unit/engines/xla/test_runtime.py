import os

import pytest
import torch

from torchacc.engines.xla import runtime
from torchacc.env import Job


@pytest.fixture
def cores(monkeypatch):
    """Stand in for a machine with eight cores; holds those that this process may use."""
    mine = set(range(8))

    def pin(pid, chosen):
        mine.intersection_update(chosen)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(mine))
    monkeypatch.setattr(os, "sched_setaffinity", pin)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    runtime.pin_to_share_of_cores.cache_clear()
    yield mine
    runtime.pin_to_share_of_cores.cache_clear()


def job(local_rank, processes):
    return Job(rank=local_rank, num_processes=processes, local_rank=local_rank, local_num_processes=processes)


@pytest.mark.parametrize(("local_rank", "share"), [(0, {0, 1, 2, 3}), (1, {4, 5, 6, 7})])
def test_cores_are_shared_out(cores, local_rank, share):
    runtime.pin_to_share_of_cores(job(local_rank, 2))
    assert cores == share


def test_more_processes_than_cores_use_one_each(cores):
    runtime.pin_to_share_of_cores(job(9, 16))
    assert cores == {1}


def test_a_second_model_leaves_the_share_as_it_is(cores):
    for _ in range(2):
        runtime.pin_to_share_of_cores(job(1, 2))
    assert cores == {4, 5, 6, 7}
