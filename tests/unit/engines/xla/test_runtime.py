import os
import re

import pytest
import torch

from torchacc.engines.xla import runtime
from torchacc.env import Job
from torchacc.errors import EngineError


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


PLAIN = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
OTHER = "--xla_cpu_enable_concurrency_optimized_scheduler=true"


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(runtime, "is_running", lambda: False)


def test_recompute_chooses_the_plain_scheduler_beside_the_users_flags(on_cpu, monkeypatch, caplog):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=folder")
    runtime.use_plain_scheduler(recomputes=True)
    assert os.environ["XLA_FLAGS"] == f"--xla_dump_to=folder {PLAIN}"
    assert not caplog.records


def test_a_scheduler_that_the_user_has_chosen_stays_with_a_warning(on_cpu, monkeypatch, caplog):
    monkeypatch.setenv("XLA_FLAGS", OTHER)
    runtime.use_plain_scheduler(recomputes=False)
    assert not caplog.records
    runtime.use_plain_scheduler(recomputes=True)
    assert os.environ["XLA_FLAGS"] == OTHER
    assert "it was chosen in XLA_FLAGS" in caplog.text


def test_a_runtime_that_runs_already_is_not_told_anything(on_cpu, monkeypatch, caplog):
    monkeypatch.setattr(runtime, "is_running", lambda: True)
    runtime.use_plain_scheduler(recomputes=True)
    assert "XLA_FLAGS" not in os.environ
    assert "the runtime started with it" in caplog.text


def test_no_scheduler_is_chosen_off_the_cpu(on_cpu, monkeypatch, caplog):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    runtime.use_plain_scheduler(recomputes=True)
    assert "XLA_FLAGS" not in os.environ
    assert not caplog.records


READS_WEIGHTS = "--xla_cpu_use_xnnpack=false"


@pytest.mark.parametrize("chosen", ["", "--xla_dump_to=folder"])
def test_xnnpack_is_left_out(on_cpu, monkeypatch, chosen):
    monkeypatch.setenv("XLA_FLAGS", chosen)
    runtime._read_weights()
    assert os.environ["XLA_FLAGS"] == f"{chosen} {READS_WEIGHTS}".strip()


@pytest.mark.parametrize(("running", "why"), [(False, "XLA_FLAGS asks for it"), (True, "started before accelerate()")])
def test_xnnpack_is_refused(on_cpu, monkeypatch, running, why):
    monkeypatch.setattr(runtime, "is_running", lambda: running)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_xnnpack=true")
    with pytest.raises(EngineError, match=re.escape(f"{why}: it finds packed matrices")):
        runtime._read_weights()
    monkeypatch.setenv("XLA_FLAGS", READS_WEIGHTS)
    runtime._read_weights()


KEEPS_NAN = "--xla_cpu_enable_fast_min_max=false"


@pytest.mark.parametrize("chosen", ["", "--xla_cpu_enable_fast_min_max=true"])
def test_a_nan_is_kept_unless_the_user_has_chosen(on_cpu, monkeypatch, caplog, chosen):
    monkeypatch.setenv("XLA_FLAGS", chosen)
    runtime._keep_nan()
    assert os.environ["XLA_FLAGS"] == (chosen or KEEPS_NAN)
    assert not caplog.records


def test_a_runtime_that_loses_nan_is_warned_of(on_cpu, monkeypatch, caplog):
    monkeypatch.setattr(runtime, "is_running", lambda: True)
    runtime._keep_nan()
    assert "will lose a NaN" in caplog.text
    caplog.clear()
    monkeypatch.setenv("XLA_FLAGS", KEEPS_NAN)
    runtime._keep_nan()
    assert not caplog.records
