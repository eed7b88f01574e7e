"""On one device a native step is plain PyTorch's, to the last bit and operation by operation."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("plain_model_program.py")
CASES = [
    "parameters_stay_what_they_are",
    "step_runs_the_operations_of_plain_pytorch",
    "numbers_are_those_of_plain_pytorch",
    "window_adds_up_and_its_end_is_waited_for",
    "optimizer_made_before_goes_on",
    "weights_changed_before_recompute_are_refused",
    "autocast_of_the_script_has_no_effect_and_is_warned_of",
    "backward_inside_of_a_scripts_autocast_has_the_gradients_of_the_forward",
    "deferred_model_gets_its_numbers",
    "checkpoint_goes_on_where_it_was",
    "graphs_of_gradients_are_plain_pytorchs",
    "half_precision_is_kept_in_float32",
    "weights_step_in_backward_as_they_do_after_it",
]


@pytest.mark.parametrize("case", CASES)
def test_one_device_does_what_plain_pytorch_does(found, case):
    assert found[case] is None, found[case]


def test_all_cases_were_looked_at(found):
    assert found.keys() == set(CASES)
