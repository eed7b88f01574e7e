"""A manager that is told to end, and processes that hear of it from one another."""

import itertools
import logging
import os
import signal
import threading

import pytest

from tests.unit.checkpoint.manager_run import Run
from torchacc.checkpoint import manager as manager_module
from torchacc.checkpoint import saver
from torchacc.env import Job
from torchacc.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("listening")


@pytest.mark.parametrize("async_save", [False, True])
def test_sigterm_saves_once_and_exits(tmp_path, async_save):
    run = Run(tmp_path, every_steps=4, async_save=async_save)
    run.train(until=2)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, run.manager:
        run.train(until=9)
    assert caught.value.code == 143
    assert run.manager.steps() == [3]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with (other := Run(tmp_path)).manager:
        assert other.restore().step == 3


def test_sigterm_does_not_save_a_step_twice(tmp_path, caplog):
    caplog.set_level(logging.INFO, "torchacc")
    manager = Run(tmp_path, every_steps=1).manager
    manager.save_if_due(1)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        manager.save_if_due(1)
    assert caplog.text.count("saved /") == 1


def test_sigterm_saves_although_the_last_save_has_failed(tmp_path, monkeypatch, caplog):
    run = Run(tmp_path, every_steps=2, async_save=True)

    def fail(pending):
        raise CheckpointError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(saver.PendingSave, "write", fail)
        run.train(until=2)
        run.manager._saving.exception()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit), run.manager:
        run.train(until=9)
    assert run.manager.steps() == [3]
    assert "the last checkpoint was not saved: the disk is full" in caplog.text


def test_a_handler_of_the_users_own_hears_of_it_and_comes_back(tmp_path):
    heard = []

    def own(number, frame):
        heard.append(number)

    signal.signal(signal.SIGTERM, own)
    with Run(tmp_path).manager as manager:
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        with pytest.raises(SystemExit):
            manager.save_if_due(1)
    assert signal.getsignal(signal.SIGTERM) is own
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(heard) == 2


def test_an_error_hands_an_unanswered_signal_on(tmp_path, monkeypatch):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    monkeypatch.setattr(signal, "raise_signal", (raised := []).append)
    for signalled in (False, True):
        manager = Run(tmp_path).manager
        if signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(ZeroDivisionError), manager:
            raise ZeroDivisionError
    assert raised == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_another_thread_does_without_the_signal(tmp_path):
    managers = []
    thread = threading.Thread(target=lambda: managers.append(Run(tmp_path).manager))
    thread.start()
    thread.join()
    managers[0].save(1)
    managers[0].close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class Group:
    """A process group whose ranks take turns: the others say what they were given to say."""

    def __init__(self, *others):
        self.job = Job(num_processes=1 + len(others))
        self.others = list(others)
        self.meetings = 0

    def all_gather_objects(self, payload):
        self.meetings += 1
        return [payload, *self.others]

    def expect_all(self, what):
        """All are there."""


@pytest.mark.parametrize(("step_secs", "num_meetings"), [(0.001, 9), (0.3, 334), (5.0, 1000)])
def test_the_processes_meet_about_once_a_second(monkeypatch, step_secs, num_meetings):
    clock = itertools.count(step=step_secs)
    now = [0.0]
    monkeypatch.setattr(manager_module.time, "monotonic", lambda: now[0])
    group, agreement = Group(((False, False), 1)), manager_module._StepAgreement()
    for _ in range(1000):
        now[0] = next(clock)
        assert agreement.hear(group, False, False) == [False, False]
    assert group.meetings == pytest.approx(num_meetings, rel=0.35)


def test_what_one_process_has_met_with_all_hear_of():
    agreement = manager_module._StepAgreement()
    assert agreement.hear(Group(((False, True), 9)), True, False) == [True, True]
    assert manager_module._StepAgreement().hear(Group(), True, False) == [True, False]
