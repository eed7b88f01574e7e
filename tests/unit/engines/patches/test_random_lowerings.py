"""Dropout under XLA: its statistics, and the same masks on any number of devices."""

import json
from pathlib import Path

import pytest

from tests import forkrun

pytestmark = pytest.mark.xla


def run(num_devices):
    program = Path(__file__).with_name("dropout_program.py")
    done = forkrun.run(program, str(num_devices), imports=["torch_xla"], timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def on_one():
    return run(1)


@pytest.fixture(scope="module")
def on_four():
    return run(4)


def test_losses_do_not_depend_on_the_number_of_devices(on_one, on_four):
    assert on_four["plain"]["losses"] == pytest.approx(on_one["plain"]["losses"], rel=1e-5)
    assert on_four["eager"]["losses"] != pytest.approx(on_one["plain"]["losses"], rel=1e-4)  # of another seed


def test_what_is_computed_again_drops_the_same(on_four):
    assert on_four["recomputed"]["losses"] == pytest.approx(on_four["plain"]["losses"], rel=1e-5)


def test_no_device_draws_for_all_and_a_step_compiles_once(on_one, on_four):
    for found in (on_four["plain"], on_four["eager"], on_one["plain"]):
        assert len(found["shapes"]) == 7  # the embedding's, and three of each layer
        assert set(found["shapes"]) == {"u64[2]"}
        assert found["graphs"][1:] == [found["graphs"][1]] * 3


def test_operations_draw_no_more_than_a_key(on_one):
    for name, found in on_one["operations"].items():
        assert found["drawn"] == ["u64[2]"], name
        if name not in ("alpha", "attention"):
            assert found["kept"] == pytest.approx(0.75, abs=0.03 if name == "of_channels" else 0.005), name
        if name not in ("alpha", "bernoulli", "bernoulli_of_each", "bernoulli_like"):
            assert found["mean"] == pytest.approx(1, abs=0.03), name
        assert found.get("gradient_is_the_mask", True), name


def test_dropout_is_pytorchs_at_the_edges(on_one):
    found = on_one["operations"]["dropout"]
    assert found["keeps_nan"]
    assert found["all_or_nothing"] == [8.0, 0.0]
    assert found["in_eval"] == 8.0


def test_each_call_draws_others(on_one):
    first, second, third = on_one["masks"]
    assert first != second != third != first


def test_bits_are_those_of_the_published_hash(on_one):
    assert on_one["bits"]["first"] == 0x99BA4EFE  # of Random123's known answers
    assert on_one["bits"]["is_of_places"]


def test_masks_are_not_correlated(on_one):
    found, count, variance = on_one["bits"], 512 * 512, 0.3 * 0.7
    assert abs(found["mean"]) < 5 * (variance / count) ** 0.5
    assert found["variance"] == pytest.approx(variance, rel=0.01)
    assert found["row_variance"] == pytest.approx(variance, rel=0.3)
    for name, product in found["products"].items():
        assert abs(product) < 5 * variance / (count / 2) ** 0.5, name
    mean, spread, low, high = found["uniform"]
    assert mean == pytest.approx(0.5, abs=5 * (1 / 12 / count) ** 0.5)
    assert spread == pytest.approx(1 / 12, rel=0.01)
    assert 0 <= low < 1e-4
    assert 1 - 1e-4 < high < 1
