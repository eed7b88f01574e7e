import logging
import warnings

import pytest

from torchacc.logging import get_logger
from torchacc.train.config import LoggingConfig
from torchacc.train.log_files import log_files

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
    assert capsys.readouterr().err == "torchacc[1]: a warning\n"
    assert list(tmp_path.iterdir()) == []


def test_with_debug_each_rank_has_a_file_of_everything(tmp_path, capsys):
    options = LoggingConfig(debug=True, log_file="training.log")
    for rank in (0, 3):
        with log_files(tmp_path, options, rank=rank):
            talk()
    assert "torchacc[3]: a warning\n" in capsys.readouterr().err
    found = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.log")}
    assert sorted(found) == ["logs/rank-00000.log", "logs/rank-00003.log", "training.log"]
    for text in found.values():
        for line in ("DEBUG torchacc.train: a detail", "INFO torchacc.train: a line", "UserWarning: of a library"):
            assert text.count(line) == 1


def test_the_file_ends_with_the_error_that_ended_the_stage(tmp_path):
    with pytest.raises(ZeroDivisionError), log_files(tmp_path, LoggingConfig(log_file="training.log"), rank=0):
        _ = 1 / 0
    assert (tmp_path / "training.log").read_text().endswith("ZeroDivisionError: division by zero\n")


def test_logging_is_afterwards_as_it_was(tmp_path):
    before = state()
    for rank in (0, 1):
        with log_files(tmp_path, LoggingConfig(debug=True), rank=rank):
            assert state() != before
        assert state() == before
