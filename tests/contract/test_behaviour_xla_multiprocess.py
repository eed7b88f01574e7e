"""What scripts do beside training, on two devices of two processes under XLA: see `test_behaviour_native.py`."""

import pytest
from launching import SECONDS_TO_RUN

pytest.importorskip("transformers")
import contract_worker  # noqa: F401 - registers the cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS_TO_RUN + 60)]
TABLE_ON = ("xla-multiprocess-2",)


def test_behaviour(launched, engine, name):
    launched(engine).returned(name)
