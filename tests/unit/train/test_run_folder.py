"""What `--overwrite` removes: what the run has written, and nothing else."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchacc.checkpoint.format.manifest import digest, render_manifest
from torchacc.errors import ConfigError
from torchacc.train.run_folder import check_folder, drop_replaced, mark_finished, take_folder


class Stage(SimpleNamespace):
    """As much of a stage's run as its folder needs."""

    stage = "one"
    resumes = True

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def final(self) -> Path:
        return self.folder / "final"

    def identity(self) -> dict:
        return {"lr": 0.1}

    def __str__(self) -> str:
        return "a plan"


def checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    segments = [[7, digest(b"weights")]]
    manifest = {"token": "t", "files": {"model.safetensors": {"size": 7, "segments": segments}}}
    (folder / "manifest.json").write_text(render_manifest(manifest))


@pytest.fixture
def run(tmp_path) -> Stage:
    """A finished run, beside which its user has put some things."""
    run = Stage(folder=tmp_path / "out" / "one")
    take_folder(run)
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "loss": 4.0}\n')
    for name in ("logs/rank-00000.log", "tensorboard/events.out.tfevents.1", "report.html"):
        (run.folder / name).parent.mkdir(exist_ok=True)
        (run.folder / name).write_text("the run's")
    for name in ("checkpoints/step-00000010", "final", "checkpoints/.step-00000020.0badc0de.replaced"):
        checkpoint(run.folder / name)
    mark_finished(run.folder, {})
    for name in ("notes.txt", "logs/mine.log", "plots/loss.png", "checkpoints/which.txt"):
        (run.folder / name).parent.mkdir(exist_ok=True)
        (run.folder / name).write_text("mine")
    return run


def content(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


MINE = {"notes.txt", "logs/mine.log", "plots/loss.png", "checkpoints/which.txt"}


def test_only_what_the_run_has_written_is_removed(run):
    before = content(run.folder)
    take_folder(run, overwrite=True)
    assert content(run.folder) == MINE | {"run.json"}
    aside = run.folder.parent / ".one.replaced"
    assert content(aside) == before - MINE
    drop_replaced(run)
    assert not aside.exists()
    assert content(run.folder) == MINE | {"run.json"}


def test_what_is_put_into_a_replaced_run_stays(run, caplog):
    take_folder(run, overwrite=True)
    aside = run.folder.parent / ".one.replaced"
    (aside / "final" / "mine.txt").write_text("mine")
    drop_replaced(run)
    assert content(aside) == {"final/mine.txt"}
    assert "stays, as" in caplog.text


@pytest.mark.parametrize("name", ["checkpoints/step-00000010/README", "final/plots/loss.png"])
def test_a_checkpoint_with_something_else_in_it_is_refused(run, name):
    (run.folder / name).parent.mkdir(exist_ok=True)
    (run.folder / name).write_text("mine")
    before = content(run.folder)
    with pytest.raises(ConfigError, match="is not of the checkpoint that it lies in"):
        take_folder(run, overwrite=True)
    assert content(run.folder) == before


def test_a_checkpoint_that_nobody_can_tell_is_refused(run):
    (run.folder / "final" / "manifest.json").write_text("?")
    with pytest.raises(ConfigError, match="final/manifest.json, final/model.safetensors is not of the checkpoint"):
        take_folder(run, overwrite=True)


@pytest.mark.parametrize("note", [{"name": "of another program"}, {"stage": 1, "identity": {}}, [], "x"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_foreign_folder_with_a_run_json_is_never_touched(tmp_path, note, overwrite):
    run = Stage(folder=tmp_path / "one")
    run.folder.mkdir()
    (run.folder / "run.json").write_text(json.dumps(note))
    (run.folder / "results.csv").write_text("mine")
    for act in (check_folder, take_folder):
        with pytest.raises(ConfigError, match="nothing there is known to be a run's"):
            act(run, overwrite=overwrite)
    assert content(run.folder) == {"run.json", "results.csv"}
    assert json.loads((run.folder / "run.json").read_text()) == note
