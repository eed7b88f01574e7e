"""What scripts do beside training, on two devices of one process under XLA: see `test_behaviour_native.py`."""

import pytest
from launching import SECONDS_TO_RUN, launch

pytest.importorskip("transformers")
import contract_worker  # noqa: F401 - registers the cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS_TO_RUN + 60)]
TABLE_ON = ("xla-spmd-2",)
RANDOM = "second_model_draws_other_numbers_than_the_first"


def test_behaviour(launched, engine, name):
    launched(engine).returned(name)


@pytest.mark.xla
def test_seed_decides_over_random_numbers(launched, tmp_path):
    again = launch("xla-spmd-2", tmp_path / "again", [RANDOM])
    assert again.returned(RANDOM) == launched("xla-spmd-2").returned(RANDOM)
