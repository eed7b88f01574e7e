import signal

import pytest

from torchacc.errors import ConfigError
from torchacc.launch import LaunchOptions, run, runner

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def handlers():
    """Let no signal be ignored, as where the tests run in the background of a shell."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ASKING}
    yield dict.fromkeys(ASKING, signal.SIG_DFL)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_are_noted_and_then_belong_to_whom_they_did(handlers):
    with runner._listening() as came:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
    assert came == [signal.SIGTERM, signal.SIGHUP]
    assert {number: signal.getsignal(number) for number in ASKING} == handlers


def test_a_signal_that_nohup_has_silenced_stays_so(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with runner._listening() as came:
        signal.raise_signal(signal.SIGHUP)
    assert came == []
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_folder_for_logs_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="log_dir = .* cannot be written"):
        run(["-m", "json.tool"], LaunchOptions(log_dir=tmp_path / "file" / "logs"))
