"""What scripts do beside training: the native engine, on two devices, does it as plain PyTorch does, or refuses it.

The cases are those of `casekit.CASES`, tiny models against their plain copies; its docstrings and tolerances say how
closely. Each engine has a file of its own, as pytest's processes share the files.
"""

import pytest
from launching import SECONDS_TO_RUN

pytest.importorskip("transformers")
import contract_worker  # noqa: F401 - registers the cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS_TO_RUN + 60)]
TABLE_ON = ("native-2",)


def test_behaviour(launched, engine, name):
    launched(engine).returned(name)
