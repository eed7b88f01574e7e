"""What a manager leaves in its folder, as it is not of a checkpoint, and who may save there."""

import subprocess
import sys

import pytest

from tests.unit.checkpoint.manager_run import Run, flip, names
from torchacc.checkpoint import loader, saver
from torchacc.checkpoint.own_format import locks, removal
from torchacc.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("listening")


def test_what_a_user_has_put_beside_a_checkpoint_stays(tmp_path, caplog):
    with Run(tmp_path, keep=1).manager as manager:
        manager.save(1)
        (tmp_path / "step-00000001" / "README").write_text("mine")
        manager.save(1)
        assert (tmp_path / "step-00000001" / "README").read_text() == "mine"
        manager.save(2)
        manager.save(3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    loader.verify(tmp_path / "step-00000001")
    assert caplog.text.count("step-00000001 is kept, as README in it is not of the checkpoint") == 1


def test_a_file_that_would_be_taken_for_the_checkpoint_is_refused(tmp_path):
    run = Run(tmp_path / "run")
    saver.save(tmp_path / "c", model=run.model)
    before = (tmp_path / "c" / "manifest.json").read_bytes()
    for name in ("optimizer.json", "model-00001-of-00009.safetensors"):
        (tmp_path / "c" / name).write_text("mine")
        with pytest.raises(CheckpointError, match=f"holds {name}, not of the checkpoint there"):
            saver.save(tmp_path / "c", model=run.model, optimizer=run.optimizer)
        (tmp_path / "c" / name).unlink()
    assert (tmp_path / "c" / "manifest.json").read_bytes() == before


def test_a_checkpoint_whose_manifest_is_damaged_is_put_aside(tmp_path, caplog):
    run = Run(tmp_path)
    with run.manager as manager:
        manager.save(1)
        flip(tmp_path / "step-00000001" / "manifest.json")
        with pytest.raises(CheckpointError, match="manifest.json is not as it was written"):
            saver.save(tmp_path / "step-00000001", model=run.model)
        manager.save(1)
    assert names(tmp_path) == ["step-00000001", "step-00000001.damaged-1"]
    assert (tmp_path / "step-00000001.damaged-1" / "model.safetensors").exists()
    loader.verify(tmp_path / "step-00000001")


def test_what_lies_in_the_folder_of_a_dead_save_stays(tmp_path, caplog):
    left = tmp_path / ".step-00000002.0badc0de.incomplete"
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    (left / "notes.txt").write_text("mine")
    removal.write_save_intent(left, ["model.safetensors", "state.json"])
    with Run(tmp_path).manager:
        assert names(tmp_path) == [".step-00000002.0badc0de.removed"]
    assert names(tmp_path / ".step-00000002.0badc0de.removed") == ["notes.txt"]
    assert "stays, as notes.txt in it is not of a checkpoint" in caplog.text


HOLDER = """
import sys, time
from pathlib import Path
from torchacc.checkpoint.own_format.locks import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.take()
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_job_is_refused_until_the_first_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_PATIENCE_SECS", 0.2)
    other = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"in use by another job, process {other.pid} on .*, since 20"):
            Run(tmp_path)
    finally:
        other.kill()  # which leaves the file behind
        other.wait()
    assert (tmp_path / ".lock").exists()
    with Run(tmp_path).manager as manager:
        manager.save(1)
    assert not (tmp_path / ".lock").exists()
    manager.save(2)  # a manager that was closed takes the lock again
    assert (tmp_path / ".lock").exists()
    manager.close()
    assert not (tmp_path / ".lock").exists()


def test_only_what_a_dead_process_of_this_machine_has_made_is_abandoned():
    token = locks.new_token()
    assert not locks.is_abandoned(token)
    machine = token.partition("-")[0]
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert locks.is_abandoned(f"{machine}-{ended.pid}-0badc0de")
    assert not locks.is_abandoned(f"00000000-{ended.pid}-0badc0de")
    assert not locks.is_abandoned("0badc0de")
