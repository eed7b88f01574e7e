"""Options of the compiler of TPUs."""

import pytest

from tests import forkrun
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


ADDED_BY_TORCH_XLA = """
import os, sys
import torch_xla
from torchacc.engines.xla import tpu

torch_xla.tpu.version = lambda: int(sys.argv[2])
os.environ["LIBTPU_INIT_ARGS"] = "--xla_enable_async_all_gather=false"
print(tpu.flags_of_run(sys.argv[1]))
tpu.choose_flags("TPU")
torch_xla._setup_libtpu_flags()
print(os.environ["LIBTPU_INIT_ARGS"])
"""


@pytest.mark.xla
@pytest.mark.parametrize(("chip", "version"), [("TPU v5p", "5"), ("TPU v6e", "6")])
def test_what_is_compiled_without_chips_has_the_flags_of_a_run(chip, version):
    done = forkrun.run("-c", ADDED_BY_TORCH_XLA, chip, version, imports=["torch_xla"])
    assert done.returncode == 0, done.stderr
    found, expected = done.stdout.splitlines()
    assert found == expected
    assert "--xla_enable_async_all_gather=true" not in found
