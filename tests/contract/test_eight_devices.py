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
EXPERTS_TRAIN = "experts_of_shards_and_split_layers_train_as_unsharded"
EXPERTS_GO_ON = "a_checkpoint_of_spread_experts_goes_on"


@pytest.mark.xla
def test_a_checkpoint_of_shards_stages_and_split_layers_goes_on_in_other_layouts_and_back(tmp_path):
    found = []
    for number, engine in enumerate(("native-8", "native-4", "xla-spmd-4", "native-8")):
        launched = launch(engine, tmp_path / str(number), [GOES_ON] if number else [TRAINS, EXPERTS, GOES_ON])
        if not number:
            launched.returned(TRAINS)
            launched.returned(EXPERTS)
        found.append(launched.returned(GOES_ON))
    assert len(found[0][0]) > 60, "weights, and two moments and a number of steps of each"
    check_same(*found)


@pytest.mark.xla
def test_a_checkpoint_of_spread_experts_goes_on_in_one_program_and_back(tmp_path):
    found = []
    for number, engine in enumerate(("native-2", "xla-spmd-8", "native-2")):
        trained = [EXPERTS_TRAIN] if number == 1 else []
        launched = launch(engine, tmp_path / str(number), [*trained, EXPERTS_GO_ON])
        for name in trained:
            launched.returned(name)
        found.append(launched.returned(EXPERTS_GO_ON))
    check_same(*found)


def check_same(first, *others):
    expected, following = first
    for states, other in others:
        assert states.keys() == expected.keys()
        assert all(torch.equal(states[key], expected[key]) for key in expected)
        assert other == pytest.approx(following, rel=RELATIVE)
