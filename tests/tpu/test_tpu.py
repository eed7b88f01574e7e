"""Training on the TPUs of this machine gives the numbers of the unsharded run on the CPU. Skipped where there is none.

Each run is a process of its own, one after another, as a chip is for one process at a time.
"""

import pytest
from safetensors.torch import load_file

from tests import accelerators, forkrun, tpus
from tests.accelerators import fingerprint
from torchacc.env import installed_version

pytest.importorskip("transformers")

CHIPS = tpus.count()
NUM_SAMPLES = 8

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.xla,
    pytest.mark.slow,
    pytest.mark.timeout(2 * accelerators.SECONDS),
    pytest.mark.skipif(bool(tpus.why_not()), reason=tpus.why_not()),
    pytest.mark.skipif(CHIPS > 0 and NUM_SAMPLES % CHIPS > 0, reason=f"8 samples are not a multiple of {CHIPS} chips"),
]
several = pytest.mark.skipif(CHIPS < 2, reason=f"this machine has {CHIPS} TPU chips, and this needs 2")


def train(out, *options, processes=1):
    environment = tpus.shown(accelerators.environment())
    return accelerators.train("xla", CHIPS, out, environment, *options, processes=processes)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return unsharded(tmp_path_factory.mktemp("tpu"), "gpt2")


def unsharded(folder, model):
    return accelerators.train("reference", 1, folder / "reference.json", forkrun.environment(), "--model", model)


def check(found, reference, report, name):
    assert found["device"] == "xla:0"
    assert found["platform"] == tpus.shown({})["PJRT_DEVICE"]
    accelerators.compare(found, reference, report, name)


def test_one_process_for_all_chips_trains_as_the_cpu_does(reference, tmp_path, record_property):
    saved = tmp_path / "saved"
    found = train(tmp_path / "out.json", "--save", str(saved))
    record_property("report", f"versions {found['versions']}")
    record_property("report", f"places of the chips {found['places']}, their order on the mesh {found['device_order']}")
    assert sorted(found["device_order"]) == list(range(CHIPS))
    check(found, reference, record_property, f"xla-spmd on {CHIPS}")
    weights = load_file(saved / "model.safetensors")
    assert {name: fingerprint(value) for name, value in weights.items()} == {
        name: found["weights"][name] for name in weights
    }


@several
def test_one_process_for_each_chip_trains_as_the_cpu_does(reference, tmp_path, record_property):
    found = train(tmp_path / "out.json", processes=CHIPS)
    record_property("report", f"numbers of the chips by rank {found['ordinals']}")
    assert found["engine"] == "xla-multiprocess"
    check(found, reference, record_property, f"xla-multiprocess on {CHIPS}")


@several
def test_layers_that_are_split_train_as_on_the_cpu(reference, tmp_path, record_property):
    found = train(tmp_path / "out.json", "--tp", "2")
    check(found, reference, record_property, f"xla-spmd on {CHIPS}, tp 2")


@pytest.mark.skipif(installed_version("jax") is None, reason="no jax, which has the kernel: see docs/hardware.md")
def test_attention_by_the_kernel_has_the_numbers_of_the_cpu(tmp_path, record_property):
    reference = unsharded(tmp_path, "llama")
    for attention in ("sdpa", "flash"):
        found = train(tmp_path / f"{attention}.json", "--model", "llama", "--attention", attention)
        check(found, reference, record_property, f"compute.attention = {attention!r}")
