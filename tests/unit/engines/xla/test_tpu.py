"""Options of the compiler of TPUs."""

from torchacc import env
from torchacc.engines.xla import tpu


def test_they_are_chosen_for_tpus_unless_the_user_has(monkeypatch):
    (name, value), *_ = tpu.FLAGS.items()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    tpu.choose_flags("CPU")
    assert not env.get("LIBTPU_INIT_ARGS")
    tpu.choose_flags("TPU")
    assert env.get("LIBTPU_INIT_ARGS") == f"--{name}={value}"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{name}=0")
    tpu.choose_flags("TPU")
    assert env.get("LIBTPU_INIT_ARGS") == f"--{name}=0"
