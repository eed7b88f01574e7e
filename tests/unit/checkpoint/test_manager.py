"""The manager with real files, in one process of the native engine."""

import logging
import os
import re
import shutil
import threading

import pytest
import torch

from tests.logged import heard
from tests.unit.checkpoint.manager_run import Run, flip, names
from torchacc.checkpoint import loader, saver
from torchacc.checkpoint import manager as manager_module
from torchacc.checkpoint.own_format import removal
from torchacc.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.usefixtures("listening")


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("at", [4, 6, 9])
def test_a_restored_run_goes_on_as_if_nothing_had_happened(tmp_path, at, async_save):
    """Six steps make an epoch: in the middle of one, at its end, and in the second."""
    whole = Run(tmp_path / "whole")
    whole.train(until=16)
    whole.manager.close()

    with (first := Run(tmp_path / "run", every_steps=1, async_save=async_save)).manager:
        first.train(until=at)
    resumed = Run(tmp_path / "run", seed=5)
    restored = resumed.restore()
    assert restored.step == at
    assert restored.path == tmp_path / "run" / f"step-{at:08d}"
    assert restored.extra == {"losses": first.losses}
    resumed.train(until=16)
    resumed.manager.close()
    assert {**first.losses, **resumed.losses} == whole.losses


def test_a_run_that_saves_after_each_step_logs_one_of_many_saves(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(manager_module, "_LOG_EVERY_SECS", 3600.0)
    caplog.set_level(logging.INFO, "torchacc")

    def said() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.getMessage().startswith("saved ")]
        caplog.clear()
        return found

    with (run := Run(tmp_path, every_steps=1)).manager:
        run.train(until=4)
        (line,) = said()
        assert re.search(r"step-00000001 in .* bytes\)$", line)
        monkeypatch.setattr(manager_module, "_LOG_EVERY_SECS", 0.0)
        run.train(until=6)
        assert len(said()) == 2


def test_a_run_that_counts_from_zero_after_a_restore_is_told(tmp_path):
    with (first := Run(tmp_path, every_steps=3)).manager:
        first.train(until=6)
    with (again := Run(tmp_path, every_steps=3)).manager as manager, heard() as lines:
        assert again.restore().step == 6
        manager.save(6)
        assert not any("had been restored" in line for line in lines)
        assert manager.save_if_due(3)
        assert manager.save_if_due(3)
    (warned,) = [line for line in lines if "had been restored" in line]
    assert "step 3 was saved, and step 6 had been restored" in warned
    assert "begin to count at restored.step" in warned


def test_a_rate_that_the_checkpoint_replaces_is_named(tmp_path, caplog):
    caplog.set_level(logging.INFO, "torchacc")
    with (first := Run(tmp_path, every_steps=3)).manager:
        first.train(until=3)
    for factor, num_lines in ((1, 0), (3, 1)):
        with (again := Run(tmp_path)).manager, heard() as lines:
            (group,) = again.optimizer.param_groups
            group["lr"] = group["initial_lr"] = group["lr"] * factor
            again.restore()
            assert again.optimizer.param_groups[0]["lr"] == 0.025
        found = [line for line in lines if "the optimizer's lr goes on as in the checkpoint" in line]
        assert len(found) == num_lines


def test_nothing_to_restore(tmp_path):
    with (run := Run(tmp_path / "deep" / "run")).manager:
        assert run.restore() is None
        assert run.manager.steps() == []


def test_saves_when_due_and_when_asked(tmp_path):
    with (run := Run(tmp_path, every_steps=4)).manager as manager:
        assert [manager.save_if_due(step) for step in (1, 4, 6, 8)] == [False, True, False, True]
        manager.save(9)
        assert manager.steps() == [9, 8, 4]
    assert names(tmp_path) == ["step-00000004", "step-00000008", "step-00000009"]
    with (run := Run(tmp_path)).manager as manager:
        assert [manager.save_if_due(step) for step in (4, 5)] == [False, False]
        assert run.restore().extra is None


def test_a_step_is_replaced(tmp_path):
    with Run(tmp_path).manager as manager:
        manager.save(3, "first")
        manager.save(3, "second")
        assert manager.restore().extra == "second"
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("async_save", [False, True])
def test_keeps_the_newest_and_touches_nothing_else(tmp_path, async_save):
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("step-12", "step-00000000-mine", "old-step-00000001", "step-00000001"):
        (tmp_path / name).mkdir()  # the last is named like a checkpoint, and has no manifest
    strangers = names(tmp_path)
    with Run(tmp_path, every_steps=2, keep=2, async_save=async_save).manager as manager:
        for step in range(2, 11):
            manager.save_if_due(step)
    assert names(tmp_path) == sorted([*strangers, "step-00000008", "step-00000010"])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_old_one_is_there_until_the_new_one_is_complete(tmp_path, monkeypatch):
    with Run(tmp_path, keep=1).manager as manager:
        manager.save(1)
        write = saver.PendingSave.write

        def look_first(pending):
            assert manager.steps() == [1]
            write(pending)
            assert manager.steps() == [2, 1]

        monkeypatch.setattr(saver.PendingSave, "write", look_first)
        manager.save(2)
        assert manager.steps() == [2]


def test_a_later_checkpoint_that_is_not_whole_does_not_crowd_out_new_ones(tmp_path, caplog):
    with Run(tmp_path).manager as manager:
        for step in (1, 2, 3):
            manager.save(step, step)
    flip(tmp_path / "step-00000003" / "model.safetensors")
    with Run(tmp_path, keep=1).manager as manager:
        assert manager.restore().step == 2
        manager.save(2, "again")
        assert manager.steps() == [3, 2]
        assert manager.restore().extra == "again"
        manager.save(3)
        assert manager.steps() == [3]
        assert manager.restore().step == 3


# What cannot be restored


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "optimizer.json", "state.json"])
def test_skips_what_is_altered_and_says_why(tmp_path, caplog, name):
    with Run(tmp_path).manager as manager:
        manager.save(1, "old")
        manager.save(2, "new")
    flip(tmp_path / "step-00000002" / name)
    with Run(tmp_path).manager as manager:
        assert manager.restore().extra == "old"
    assert f"step-00000002 is not restored: {tmp_path / 'step-00000002' / name} is " in caplog.text


def test_skips_a_manifest_that_is_nested_beyond_reading(tmp_path, caplog):
    run = Run(tmp_path)
    run.manager.save(1)
    run.manager.save(2)
    (tmp_path / "step-00000002" / "manifest.json").write_text("[" * 100_000)
    assert run.restore().step == 1
    assert "step-00000002 is not restored" in caplog.text


def test_skips_what_is_not_complete(tmp_path, caplog):
    with Run(tmp_path).manager as manager:
        for step in (1, 2, 3, 4, 5):
            manager.save(step)
    (tmp_path / "step-00000005" / "manifest.json").unlink()
    (tmp_path / "step-00000004" / "model.safetensors").unlink()
    flip(tmp_path / "step-00000003" / "manifest.json", 30)
    os.truncate(tmp_path / "step-00000002" / "optimizer.safetensors", 100)
    with Run(tmp_path).manager as manager:
        assert manager.restore().step == 1
    for reason in (
        "step-00000005 is not restored: it is not complete, as it has no manifest.json",
        "step-00000004 is not restored: .*model.safetensors is missing",
        "step-00000003 is not restored: .*manifest.json is not as it was written",
        "step-00000002 is not restored: .*optimizer.safetensors has 100 bytes",
    ):
        assert re.search(reason, caplog.text), reason
    assert len(names(tmp_path)) == 5


def test_nothing_whole_is_an_error_and_leaves_a_model_that_does_not_run(tmp_path):
    with Run(tmp_path).manager as manager:
        manager.save(1)
    flip(tmp_path / "step-00000001" / "model.safetensors")
    run = Run(tmp_path)
    with run.manager, pytest.raises(CheckpointError, match="1 checkpoints, and none is whole: .*Remove them to start"):
        run.restore()


def test_checkpoints_that_all_lack_their_manifests_are_an_error(tmp_path):
    with Run(tmp_path).manager as manager:
        manager.save(1)
        manager.save(2)
    for step in (1, 2):
        (tmp_path / f"step-0000000{step}" / "manifest.json").unlink()
    run = Run(tmp_path)
    with run.manager, pytest.raises(CheckpointError, match=r"2 checkpoints, and none is whole: .*0002 is not complete"):
        run.restore()


def test_saving_where_one_lacks_its_manifest_leaves_that_by_another_name(tmp_path):
    with Run(tmp_path).manager as manager:
        manager.save(1)
        manager.save(2)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    with Run(tmp_path).manager as manager:
        assert manager.restore().step == 1
        manager.save(2)
    assert (tmp_path / "step-00000002.damaged-1" / "model.safetensors").is_file()
    assert Run(tmp_path).manager.restore().step == 2


def test_a_model_that_does_not_fit_is_an_error_and_not_passed_over(tmp_path):
    with Run(tmp_path).manager as manager:
        manager.save(1)
        manager.save(2)
    other = Run(tmp_path, width=5)
    with other.manager, pytest.raises(CheckpointError, match="step-00000002.*has the shape"):
        other.restore()


def test_a_scheduler_of_another_class_is_refused(tmp_path):
    run = Run(tmp_path)
    run.manager.save(1)
    other = Run(tmp_path, seed=1)
    before = other.model[0].weight.clone()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(other.optimizer)
    with pytest.raises(CheckpointError, match="saved with the scheduler StepLR, and this one is ReduceLROnPlateau"):
        loader.load(tmp_path / "step-00000001", model=other.model, optimizer=other.optimizer, scheduler=scheduler)
    assert torch.equal(other.model[0].weight, before)


def test_what_a_dead_run_has_left_is_removed(tmp_path, caplog):
    with Run(tmp_path).manager as manager:
        manager.save(1)
    for name in (".step-00000002.0badc0de.incomplete", ".step-00000001.0badc0de.incomplete", ".step-00000009.pruned"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
        removal.write_save_intent(tmp_path / name, names(tmp_path / name))
        (tmp_path / name / "manifest.json").unlink()
    (tmp_path / ".mine.incomplete").mkdir()
    with Run(tmp_path).manager as manager:
        assert names(tmp_path) == [".mine.incomplete", "step-00000001"]
        assert manager.restore().step == 1
    assert "step-00000002 is not complete: its save was cut short" in caplog.text
    assert "step-00000001 is not complete" not in caplog.text


def test_a_replacement_that_was_cut_short_is_completed(tmp_path):
    """The run died after the old one was moved aside, and before the new one had its name."""
    with Run(tmp_path).manager as manager:
        manager.save(1, "new")
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.0badc0de.incomplete")
    with Run(tmp_path).manager as manager:
        assert names(tmp_path) == ["step-00000001"]
        assert manager.restore().extra == "new"


# In the background


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    gate, write = threading.Event(), saver.PendingSave.write

    def slow(pending):
        assert threading.current_thread() is not threading.main_thread()
        assert gate.wait(20)
        write(pending)

    monkeypatch.setattr(saver.PendingSave, "write", slow)
    with (run := Run(tmp_path, every_steps=4, async_save=True)).manager as manager:
        run.train(until=5)
        assert manager.steps() == []
        gate.set()
        manager.wait()
        assert manager.steps() == [4]
    with (other := Run(tmp_path)).manager:
        other.restore()
        other.train(until=5)
    assert other.losses[5] == run.losses[5]


def test_one_save_waits_for_the_last(tmp_path, monkeypatch):
    running, most, write = [], [], saver.PendingSave.write

    def counted(pending):
        running.append(1)
        most.append(len(running))
        threading.Event().wait(0.05)
        write(pending)
        running.pop()

    monkeypatch.setattr(saver.PendingSave, "write", counted)
    with Run(tmp_path, async_save=True).manager as manager:
        for step in range(4):
            manager.save(step)
    assert most == [1] * 4
    assert manager.steps() == [3, 2, 1, 0]


@pytest.mark.parametrize("call", ["save", "wait", "close", "restore", "save_if_due"])
def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch, call):
    manager = Run(tmp_path, every_steps=7, async_save=True).manager
    manager.save(1)
    manager.wait()

    def fail(pending):
        raise CheckpointError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(saver.PendingSave, "write", fail)
        manager.save(2)
        manager._saving.exception()
    with pytest.raises(CheckpointError, match="the disk is full"):
        getattr(manager, call)(*([3] if call.startswith("save") else []))
    manager.save(4)  # and it goes on
    manager.close()
    assert manager.steps() == [4, 1]


# Wrong use


@pytest.mark.parametrize("options", [{"every_steps": 0}, {"keep": -1}, {"every_steps": 2.5}, {"keep": True}])
def test_wrong_numbers_are_refused(tmp_path, options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*whole number of 1 or more"):
        Run(tmp_path, **options)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        Run(tmp_path / "file")


@pytest.mark.parametrize("step", [-1, 1.0, "3", None])
def test_a_step_that_would_not_be_found_again_is_refused(tmp_path, step):
    run = Run(tmp_path)
    with run.manager, pytest.raises(ConfigError, match=f"step={step!r}: write a whole number of 0 or more"):
        run.manager.save(step)
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_still_saving_completes_nothing_that_is_being_removed(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.train(until=1)
    pending = saver.snapshot(tmp_path / "step-00000001", model=run.model)
    seen = []
    monkeypatch.setattr(removal, "remove", lambda path, **_: seen.append(path.name))  # it takes its time
    Run(tmp_path)  # as one that is started while the last one is still at it
    with pytest.raises(CheckpointError, match="step-00000001 was not saved"):
        pending.write()
    assert run.manager.steps() == []
    assert names(tmp_path) == [seen[0]]
    assert seen[0].endswith(".removed")
    monkeypatch.undo()
    Run(tmp_path)
    assert not names(tmp_path)
