"""A step that is recorded without values is the program that a real step runs."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests import forkrun
from torchacc.config import Config, resolve
from torchacc.engines.xla.recording import RecordingEngine
from torchacc.env import Job
from torchacc.parallel.mesh import from_config

pytestmark = pytest.mark.xla


@pytest.fixture(scope="module")
def found():
    done = forkrun.run(Path(__file__).with_name("recorded_step_program.py"), imports=["torch_xla"], timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_program_is_that_of_a_real_step(found):
    real, recorded = Counter(found["real"]), Counter(found["recorded"])
    assert sum(real.values()) > 500
    assert real - recorded == Counter()
    # Beside it there is one annotation for each tensor that was placed on the devices.
    others = recorded - real
    assert all(each.startswith("custom-call ") for each in others)
    assert others.total() <= sum(count for *_, count in found["inputs"])


def test_weights_and_state_are_donated_as_they_lie(found):
    donated = {sharding: count for sharding, is_donated, count in found["inputs"] if is_donated}
    assert sum(donated.values()) == 3 * found["parameters"]
    assert set(donated) == {"{devices=[2]0,1}", "{devices=[2,1]0,1}"}
    assert ["{devices=[2,1]0,1}", False, 2] in found["inputs"]  # the batch


def test_operations_bear_the_names_of_modules(found):
    assert found["names"] == ["transformer.h.1.mlp"]


@pytest.mark.parametrize(("platform", "expected"), [("TPU", True), ("CUDA", False)])
def test_kernels_of_tpus_are_recorded_for_tpus_alone(platform, expected):
    config = resolve(Config(), Job(), num_devices=1)
    engine = RecordingEngine(platform=platform, config=config, mesh=from_config(config), job=Job())
    assert engine.has_tpu_kernels is expected


def test_layers_in_a_loop_are_recorded_with_a_counter_that_a_tpu_has(found):
    assert found["loops"] == ["s32", "s32"]
