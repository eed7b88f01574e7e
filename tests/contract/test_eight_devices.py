"""Shards, stages and split layers at once, over eight devices; and a checkpoint of these that goes on elsewhere."""

import pytest
import torch

pytest.importorskip("transformers")
import contract_worker  # noqa: F401 - registers the cases
from launching import SECONDS_TO_RUN, launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS_TO_RUN)]
RELATIVE = 1e-5
TRAINS, GOES_ON = "eight_devices_train_as_the_unsharded_model", "a_checkpoint_goes_on"
EXPERTS = "experts_of_stages_of_split_samples_train_as_unsharded"


@pytest.mark.xla
def test_a_checkpoint_of_shards_stages_and_split_layers_goes_on_in_other_layouts_and_back(tmp_path):
    found = []
    for number, engine in enumerate(("native-8", "native-4", "xla-spmd-4", "native-8")):
        launched = launch(engine, tmp_path / str(number), [GOES_ON] if number else [TRAINS, EXPERTS, GOES_ON])
        if not number:
            launched.returned(TRAINS)
            launched.returned(EXPERTS)
        found.append(launched.returned(GOES_ON))
    (expected, loss), *others = found
    assert len(expected) > 60, "weights, and two moments and a number of steps of each"
    for states, other_loss in others:
        assert states.keys() == expected.keys()
        assert all(torch.equal(states[key], expected[key]) for key in expected)
        assert other_loss == pytest.approx(loss, rel=RELATIVE)
