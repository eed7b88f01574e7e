"""trl's trainers give the same numbers on torchacc's engines as by themselves on one device."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests import forkrun

SCRIPT = Path(__file__).with_name("trl_script.py")
NUM_RANKS = {"plain": 0, "native": 2, "xla": 2, "spmd": 0}
CASES = (
    *("sft", "sft_lora", "sft_recomputed", "reward"),
    *("dpo", "dpo_from_folder", "dpo_lora", "dpo_adapters"),
)
UNDER_XLA = ("sft", "sft_lora", "dpo", "dpo_lora", "reward")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl: pip install trl"),
]


def run(mode, folder, *cases):
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "HF_HOME": str(folder / "home")}
    if mode != "plain":
        environ.pop("USE_TORCH_XLA", None)
    imports = ["trl", *(["torch_xla"] if mode != "plain" else [])]
    done = forkrun.run(
        SCRIPT, mode, folder, *cases, num_ranks=NUM_RANKS[mode], imports=imports, env=environ, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-5000:]
    facts = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    return {fact["case"]: fact for fact in facts}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="module")
def plain(folder):
    return run("plain", folder, *CASES)


@pytest.fixture(scope="module")
def native(folder):
    return run("native", folder, *CASES, "sft_resumed", "refused")


@pytest.fixture(scope="module")
def xla(folder):
    return run("xla", folder, *UNDER_XLA)


def check(found, expected, folder, mode, case):
    from safetensors.torch import load_file

    assert [entry.keys() for entry in found["history"]] == [entry.keys() for entry in expected["history"]]
    for entry, other in zip(found["history"], expected["history"], strict=True):
        assert entry == pytest.approx(other, rel=2e-5, abs=1e-4), (case, entry, other)
    (ours,) = (folder / f"{mode}-{case}").glob("*model.safetensors")
    weights = load_file(folder / f"plain-{case}" / ours.name)
    found_weights = load_file(ours)
    assert found_weights.keys() == weights.keys()
    for name, tensor in found_weights.items():
        assert (tensor - weights[name]).abs().max() < 1e-5, (case, name)


@pytest.mark.parametrize("case", CASES)
def test_natively_losses_metrics_and_weights_are_those_of_one_device(plain, native, folder, case):
    check(native[case], plain[case], folder, "native", case)


@pytest.mark.xla
@pytest.mark.parametrize("case", UNDER_XLA)
def test_under_xla_losses_metrics_and_weights_are_those_of_one_device(plain, xla, folder, case):
    check(xla[case], plain[case], folder, "xla", case)


def test_a_run_goes_on_from_its_checkpoint_with_the_same_losses(native):
    losses = [entry["loss"] for entry in native["sft"]["history"] if "loss" in entry]
    assert [entry["loss"] for entry in native["sft_resumed"]["history"] if "loss" in entry] == losses


def test_what_cannot_be_right_is_refused(native):
    said = native["refused"]
    assert "evaluate on a number of rows that divides" in said["uneven"]
    assert "compares or averages over a whole batch" in said["sorted"]
    assert "precompute_ref_log_probs=True" in said["precomputed"]
    assert "sync_ref_model=True" in said["synced"]


@pytest.mark.xla
def test_one_process_that_drives_all_devices_refuses_pairs(folder):
    assert "what belongs together is apart" in run("spmd", folder, "refused")["refused"]["pairs"]
