"""This machine's TPUs, for tests that are marked `tpu`; and how their way is gone where there are none.

    TORCHACC_TEST_TPU=cpu python -m pytest -m tpu

runs them with virtual devices of the CPU in the place of TPUs. It says nothing about a TPU.
"""

import importlib.util
import os
from collections.abc import Mapping

from torchacc.engines.xla import tpu

SWITCH = "TORCHACC_TEST_TPU"
_SHOWN = "TORCHACC_TEST_SHOWN_PJRT_DEVICE"
"""The variable with what `PJRT_DEVICE` was before the tests hid all TPUs."""
_STAND_INS = 2
"""How many devices stand for chips on a CPU, as many as processes may take to be there."""


def hide() -> None:
    """Let this process and those that it starts leave TPUs alone: a chip is for one process at a time."""
    if tpu.num_chips() and not os.environ.get(SWITCH):
        os.environ.setdefault(_SHOWN, os.environ.get("PJRT_DEVICE", "TPU"))
        os.environ["PJRT_DEVICE"] = "CPU"


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a process finds the TPUs, or the CPU that stands for them."""
    return {**environment, "PJRT_DEVICE": "CPU" if os.environ.get(SWITCH) else environment.get(_SHOWN, "TPU")}


def count() -> int:
    """Return the number of chips, or of what stands for them."""
    return _STAND_INS if os.environ.get(SWITCH) else tpu.num_chips()


def why_not() -> str:
    """Return why tests of TPUs are skipped; nothing where they run."""
    if not count():
        return f"this machine has no TPU ({SWITCH}=cpu goes the same way on the CPU)"
    if importlib.util.find_spec("torch_xla") is None:
        return "torch_xla is not installed"
    has_library = os.environ.get(SWITCH) or tpu.has_library()
    return "" if has_library else "libtpu is not installed: pip install 'torch_xla[tpu]==2.9.0'"
