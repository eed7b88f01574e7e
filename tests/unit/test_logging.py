"""Who has set logging up, and what the lines look like."""

import logging
import sys

import pytest

from torchacc.logging import OF_THIS_RANK, make_console, start_logging


@pytest.fixture
def line(capsys):
    """Return what a line looks like, in a process where logging is set up by nobody, or as the arguments say."""

    def log(*, has_torch_xla: bool, **options) -> str:
        root, package = logging.getLogger(), logging.getLogger("torchacc")
        with pytest.MonkeyPatch.context() as patch:  # not longer: pytest has handlers of its own
            for logger, level in ((root, logging.WARNING), (package, logging.NOTSET)):
                patch.setattr(logger, "handlers", [])
                patch.setattr(logger, "level", level)
            patch.setattr(package, "propagate", True)
            patch.delitem(sys.modules, "torch_xla", raising=False)
            if has_torch_xla:
                patch.setitem(sys.modules, "torch_xla", None)
            if options:
                options.pop("plain", None)
                logging.basicConfig(**options)
            start_logging(0)
            logging.getLogger("torchacc.api").info("ready")
            return capsys.readouterr().err

    return log


def test_a_line_begins_with_the_packages_name(line):
    assert line(has_torch_xla=False) == "torchacc: ready\n"
    assert line(has_torch_xla=True) == "torchacc: ready\n"


def test_a_line_stays_as_it_is_where_torch_xla_was_imported_first(line):
    assert line(has_torch_xla=True, plain=True) == "torchacc: ready\n"


def test_logging_that_the_user_has_set_up_is_left_alone(line):
    assert line(has_torch_xla=True, level=logging.DEBUG) == "INFO:torchacc.api:ready\n"
    assert line(has_torch_xla=True, format="mine: %(message)s") == "mine: ready\n"
    assert line(has_torch_xla=False, plain=True) == "INFO:torchacc.api:ready\n"


def test_the_device_that_torch_xla_would_choose_is_not_printed(caplog):
    logging.warning("Defaulting to PJRT_DEVICE=CPU")  # as torch_xla does when it is imported
    logging.warning("another line")
    assert caplog.messages == ["another line"]


def test_what_every_rank_warns_of_rank_0_says_for_all(capsys):
    logger = logging.getLogger("a_rank's")
    logger.propagate = False
    for rank in range(2):
        logger.handlers = [make_console(rank)]
        logger.warning("all")
        logger.warning("mine", extra=OF_THIS_RANK)
        logger.error("wrong")
    said = ["torchacc: all", "torchacc: mine", "torchacc: wrong", "torchacc[1]: mine", "torchacc[1]: wrong"]
    assert capsys.readouterr().err.splitlines() == said
