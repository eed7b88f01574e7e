"""Layers split over four devices, and what a step sends between them; samples split and experts spread over them;
checkpoints of all.

That models with split layers train as the unsharded model does is seen in `test_engines.py`.
"""

import pytest

pytest.importorskip("transformers")
import contract_worker  # noqa: F401 - registers the cases
from launching import SECONDS_TO_RUN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS_TO_RUN + 60)]
TABLE_ON = ("native-4", "xla-spmd-4")
DUMPS = True


def test_case(launched, engine, name):
    found = launched(engine).returned(name)
    if name == "what_a_step_sends-alone":
        assert set(found) == {"all-reduce"}, "layers that are split send sums only"
    if name == "what_a_step_sends-with-fsdp":
        assert set(found["all-gather"]) <= {"{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)"}, "gathered over tp"
    if name == "what_a_step_sends-along-the-sequence":
        assert "all-gather" in found, "activations are not gathered"
