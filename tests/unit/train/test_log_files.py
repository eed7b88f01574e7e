import logging
import warnings

import pytest

from torchacc.errors import ConfigError
from torchacc.logging import OF_THIS_RANK, get_logger
from torchacc.train.config import LoggingConfig
from torchacc.train.log_files import check_log_file, log_files
from torchacc.train.stage import CHECKPOINTS, FINAL

NAMES = ("torchacc", "py.warnings", "transformers", "datasets")


def state():
    loggers = [logging.getLogger(name) for name in NAMES]
    return [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]


def talk():
    get_logger("torchacc.train").debug("a detail")
    get_logger("torchacc.train").info("a line")
    get_logger("torchacc.train").warning("a warning")
    warnings.warn("of a library", UserWarning, stacklevel=1)


@pytest.fixture(autouse=True)
def every_warning():
    import datasets  # noqa: F401  (its logger gets its handler at import)
    import transformers.utils.logging

    transformers.utils.logging.get_logger()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def test_rank_0_speaks_and_the_others_warn_of_what_is_their_own(tmp_path, capsys):
    with log_files(tmp_path, LoggingConfig(), rank=0):
        talk()
    said = capsys.readouterr().err
    assert "torchacc: a line\ntorchacc: a warning\n" in said
    assert said.count("UserWarning: of a library") == 1
    assert "a detail" not in said
    with log_files(tmp_path, LoggingConfig(), rank=1):
        talk()
        logging.getLogger("transformers.models").warning("of another library")
        logging.getLogger("torchacc.train").warning("of this rank", extra=OF_THIS_RANK)
    assert capsys.readouterr().err == "torchacc[1]: of this rank\n"
    assert list(tmp_path.iterdir()) == []


def test_with_debug_each_rank_has_a_file_of_everything(tmp_path, capsys):
    options = LoggingConfig(debug=True, log_file="training.log")
    for rank in (0, 3):
        with log_files(tmp_path, options, rank=rank):
            talk()
    assert "torchacc[3]" not in capsys.readouterr().err
    found = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.log")}
    assert sorted(found) == ["logs/rank-00000.log", "logs/rank-00003.log", "training.log"]
    for text in found.values():
        for line in ("DEBUG torchacc.train: a detail", "INFO torchacc.train: a line", "UserWarning: of a library"):
            assert text.count(line) == 1


def test_the_file_ends_with_the_error_that_ended_the_stage(tmp_path):
    with pytest.raises(ZeroDivisionError), log_files(tmp_path, LoggingConfig(log_file="training.log"), rank=0):
        _ = 1 / 0
    assert (tmp_path / "training.log").read_text().endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (".", "it is a folder"),
        ("..", "it is a folder"),
        ("run.json", "the run keeps something else there"),
        ("./metrics.jsonl", "the run keeps something else there"),
        ("logs/rank-00000.log", "the run keeps something else there"),
        (".lock", "the run keeps something else there"),
        (CHECKPOINTS, "the run keeps something else there"),
        (FINAL, "the run keeps something else there"),
        ("../notes.txt", "it is there, and no log"),
        ("../notes.txt/train.log", "notes.txt is a file"),
    ],
)
def test_a_file_that_is_something_else_is_refused_and_left_alone(name, problem, tmp_path):
    (tmp_path / "notes.txt").write_text("do not lose")
    folder, options = tmp_path / "stage", LoggingConfig(log_file=name)
    with pytest.raises(ConfigError, match=rf"logging.log_file = '{name}': .*{problem}"):
        check_log_file(folder, options)
    with pytest.raises(ConfigError, match=problem), log_files(folder, options, rank=0):
        pass
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"notes.txt": "do not lose"}


def test_a_log_of_an_earlier_run_is_gone_on_with(tmp_path):
    (tmp_path / "train.log").touch()
    options = LoggingConfig(log_file=str(tmp_path / "train.log"))
    for _ in range(2):
        check_log_file(tmp_path / "stage", options)
        with log_files(tmp_path / "stage", options, rank=0):
            talk()
    assert (tmp_path / "train.log").read_text().count("a warning") == 2


def test_a_file_that_cannot_be_opened_is_an_error_of_the_configuration(tmp_path):
    options = LoggingConfig(log_file="/proc/none/train.log")
    with (
        pytest.raises(ConfigError, match=r"/proc(/none/train.log)? cannot be written"),
        log_files(tmp_path, options, rank=0),
    ):
        pass


def test_logging_is_afterwards_as_it_was(tmp_path):
    before = state()
    for rank in (0, 1):
        with log_files(tmp_path, LoggingConfig(debug=True), rank=rank):
            assert state() != before
        assert state() == before
