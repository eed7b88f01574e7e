"""Whose a stage's folder is, and what `--overwrite` removes: what the run has written, and nothing else."""

import json
from pathlib import Path

import pytest

from torchacc.checkpoint.own_format.manifest import digest, render_manifest
from torchacc.errors import ConfigError
from torchacc.train.run_folder import check_folder, drop_replaced, lock_folder, mark_finished, take_folder


def begun(run):
    """Leave what a run leaves that has made a step."""
    take_folder(run)
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "loss": 4.0}\n')
    return run


def checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    segments = [[7, digest(b"weights")]]
    manifest = {"token": "t", "files": {"model.safetensors": {"size": 7, "segments": segments}}}
    (folder / "manifest.json").write_text(render_manifest(manifest))


@pytest.fixture
def run(make):
    """A finished run, beside which its user has put some things."""
    run = begun(make())
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
    take_folder(run, overwrite=True)  # the new one has failed, and is started again
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
def test_a_foreign_folder_with_a_run_json_is_never_touched(make, note, overwrite):
    run = make()
    run.folder.mkdir(parents=True)
    (run.folder / "run.json").write_text(json.dumps(note))
    (run.folder / "results.csv").write_text("mine")
    for act in (check_folder, take_folder):
        with pytest.raises(ConfigError, match="nothing there is known to be a run's"):
            act(run, overwrite=overwrite)
    assert content(run.folder) == {"run.json", "results.csv"}
    assert json.loads((run.folder / "run.json").read_text()) == note


def test_a_run_goes_on_in_its_folder_in_another_layout(make):
    run = begun(make())
    before = (run.folder / "run.json").read_bytes()
    take_folder(make(devices=4, precision="bf16-mixed"))
    assert (run.folder / "run.json").read_bytes() == before


def test_the_folder_of_another_run_is_refused_with_what_differs(make):
    begun(make())
    with pytest.raises(ConfigError) as raised:
        check_folder(make(stage="optimizer: {lr: 0.5}\ndata: {block_size: 64}"))
    assert "data.block_size was 128 and is 64; optimizer.lr was 0.001 and is 0.5" in str(raised.value)
    with pytest.raises(ConfigError, match="model_config_small.n_layer was 2 and is 'nothing'"):
        check_folder(make(chosen_model="1.7B"))


def test_the_folder_of_a_finished_run_is_refused_unless_told(make):
    run = make()
    take_folder(run)
    mark_finished(run.folder, {"step": 20})
    with pytest.raises(ConfigError, match="holds a finished run; pass --overwrite"):
        check_folder(run)
    assert (run.folder / "finished.json").is_file()
    take_folder(run, overwrite=True)
    assert [path.name for path in run.folder.iterdir()] == ["run.json"]


def test_a_run_that_made_no_step_does_not_bind_the_one_that_mends_it(make):
    take_folder(make())
    mended = make(stage="data: {block_size: 64}")
    take_folder(mended)
    assert json.loads((mended.folder / "run.json").read_text())["identity"]["data.block_size"] == 64


def test_two_runs_do_not_share_a_folder(make):
    run = begun(make())
    with lock_folder(run.folder), pytest.raises(ConfigError, match="another process is training there"):
        check_folder(run)
    check_folder(run)


@pytest.mark.parametrize("text", ["{bro", "{}", "[]", '{"identity": 3}', "[" * 100_000])
def test_a_damaged_note_of_whose_run_it_is_is_refused(make, text):
    run = begun(make())
    (run.folder / "run.json").write_text(text)
    with pytest.raises(ConfigError, match="run.json, which says whose run it holds, cannot be read"):
        check_folder(run)


def test_a_folder_that_no_run_has_written_is_never_touched(make):
    run = make()
    run.folder.mkdir(parents=True)
    (run.folder / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds thesis.txt, and no run.json"):
        take_folder(run, overwrite=True)
    assert [path.name for path in run.folder.iterdir()] == ["thesis.txt"]


def test_a_run_that_never_resumes_does_not_start_among_older_checkpoints(make):
    run, never = make(), make(training="resume: never")
    take_folder(never)
    take_folder(never)  # as each of its processes does
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    with pytest.raises(ConfigError, match="training.resume = 'never' would start at step 0"):
        check_folder(never)
    check_folder(run)


def test_the_logs_of_a_rank_that_was_faster_are_no_other_run(make):
    run = make()
    (run.folder / "logs").mkdir(parents=True)
    check_folder(run)
