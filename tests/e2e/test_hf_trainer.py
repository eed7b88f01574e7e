"""transformers' Trainer gives the same numbers on torchacc's engines as by itself on one device."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests import forkrun

SCRIPT = Path(__file__).with_name("hf_trainer_script.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer.py"
NUM_RANKS = {"plain": 0, "native": 2, "xla": 2, "spmd": 0}
UNEVEN = ("masked_lm", "classes", "padded", "sequences", "smoothed_tokens", "smoothed_sequences")
SOME_OF_UNEVEN = {"xla": ("masked_lm", "classes", "sequences"), "spmd": ("padded", "smoothed_tokens")}
"""How a loss is weighed is the same code in each engine: natively all run, and under XLA most in one of the two."""

pytestmark = pytest.mark.slow


def run(mode, folder, *cases, killed=False):
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if mode != "plain":
        environ.pop("USE_TORCH_XLA", None)  # as a user has it: transformers and accelerate find torch_xla
    imports = ["torch_xla"] if mode != "plain" else []
    done = forkrun.run(
        SCRIPT, mode, folder, *cases, num_ranks=NUM_RANKS[mode], imports=imports, env=environ, cwd=folder
    )
    assert (done.returncode != 0) == killed, done.stderr[-5000:]
    lines = done.stdout.splitlines()
    facts = [json.loads(line[6:]) for line in lines if line.startswith("FACTS ")]
    return {fact["case"]: fact for fact in facts} | {"lines": lines}


def check_histories(found, expected, rel=2e-5):
    assert [entry.keys() for entry in found["history"]] == [entry.keys() for entry in expected["history"]]
    for entry, other in zip(found["history"], expected["history"], strict=True):
        assert entry == pytest.approx(other, rel=rel)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def plain(folder):
    found = run(
        "plain", folder, "whole", "adapters", "classification", "streamed", "loss_function", *UNEVEN, "numbers", "axes"
    )
    shutil.rmtree(folder / "whole")
    return found


@pytest.fixture(scope="module")
def native(folder):
    same = ("whole", "adapters", "classification", "streamed", "loss_function")
    return run("native", folder, *same, "overridden", "dropout", "by_length", "best", *UNEVEN, "numbers", "axes")


@pytest.fixture(scope="module")
def uneven(request):
    """The uneven runs of each way of training under XLA."""
    return dict.fromkeys(SOME_OF_UNEVEN, UNEVEN) if request.config.getoption("--full-contract") else SOME_OF_UNEVEN


@pytest.fixture(scope="module")
def xla(folder, uneven):
    return run("xla", folder, *uneven["xla"], "numbers")


@pytest.fixture(scope="module")
def killed(folder):
    """Two folders of a run that was killed after its fifth step, one of them with a torn checkpoint, too."""
    assert "interrupted" not in run("native", folder, "interrupted", killed=True)
    shutil.copytree(folder / "run", folder / "run4")
    (folder / "run" / "checkpoint-6").mkdir()
    return folder


@pytest.fixture(scope="module")
def native_resumed(killed):
    return run("native", killed, "resumed", "resumed_otherwise")


@pytest.fixture(scope="module")
def spmd(killed, native, uneven):  # which goes on from native's adapters
    return run("spmd", killed, "whole", "resumed=run4", "adapters", "dropout", *uneven["spmd"])


def check_whole(found, expected):
    check_histories(found, expected)
    assert found["predictions"] == [pytest.approx(row, abs=0.02) for row in expected["predictions"]]
    assert found["flos"] == expected["flos"]


def test_natively_losses_norms_and_metrics_are_those_of_one_device(plain, native):
    check_whole(native["whole"], plain["whole"])
    evaluations = [entry for entry in native["whole"]["history"] if "eval_loss" in entry]
    assert [entry["eval_rows"] for entry in evaluations] == [13, 13, 13]  # of batches of 4
    assert native["whole"]["history"][-1]["eval_loss"] < evaluations[0]["eval_loss"]


@pytest.mark.xla
def test_under_spmd_losses_norms_and_metrics_are_those_of_one_device(plain, spmd):
    check_whole(spmd["whole"], plain["whole"])


def test_what_save_model_writes_opens_with_from_pretrained(native, folder):
    from transformers import GPT2LMHeadModel

    _, report = GPT2LMHeadModel.from_pretrained(folder / "whole", output_loading_info=True)
    assert not any(report.values())


@pytest.mark.parametrize("axis", ["pp", "tp", "sp"])
def test_over_other_axes_losses_norms_and_metrics_are_those_of_one_device(plain, native, axis):
    check_histories({"history": native["axes"][axis]}, plain["whole"])


def test_over_experts_losses_and_norms_are_those_of_one_device(plain, native):
    check_histories({"history": native["axes"]["ep"]}, {"history": plain["axes"]["ep"]})


def test_a_run_in_stages_goes_on_in_split_layers(native):
    resumed, before = ([entry for entry in native["axes"][run] if "loss" in entry] for run in ("resumed", "pp"))
    check_histories({"history": resumed}, {"history": before})


def test_one_process_logs(native_resumed):
    assert sum("'loss':" in line for line in native_resumed["lines"]) == 3 + 1  # of two runs


def test_a_killed_run_goes_on_with_the_same_losses(native, native_resumed):
    entries = [entry for entry in native["whole"]["history"] if "loss" in entry]
    assert native_resumed["resumed"]["history"] == entries
    assert native_resumed["resumed"]["kept"] == ["checkpoint-6", "checkpoint-7"]


def test_a_step_keeps_its_rows_when_a_run_goes_on_in_other_micro_batches(native_resumed):
    check_histories(native_resumed["resumed_otherwise"], native_resumed["resumed"])
    error = native_resumed["resumed_otherwise"]["other_batch"]
    assert "saved by a run of 8 rows per step, and this one has 16 = per_device_train_batch_size(2)" in error


def test_a_resumed_run_drops_the_same_units(native):
    assert native["dropout"]["resumed"] == native["dropout"]["history"]
    assert native["dropout"]["history"] != native["whole"]["history"]


@pytest.mark.xla
def test_under_spmd_a_resumed_run_drops_the_same_units(spmd):
    assert spmd["dropout"]["resumed"] == spmd["dropout"]["history"]


@pytest.mark.xla
def test_a_killed_native_run_goes_on_under_spmd(native, spmd):
    entries = [entry for entry in native["whole"]["history"] if "loss" in entry]
    check_histories(spmd["resumed"], {"history": entries})


def check_adapters(found, expected, folder):
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    check_histories(found, expected)
    shape = {"vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    opened = PeftModel.from_pretrained(GPT2LMHeadModel(GPT2Config(**shape)), folder)
    weights = opened.state_dict()
    for name, saved in load_file(folder / "adapter_model.safetensors").items():
        whole = name.replace(".ln_f.", ".ln_f.modules_to_save.default.")
        assert weights[whole if whole != name else name.replace(".weight", ".default.weight")].equal(saved)


def test_natively_adapters_train_sharded_and_open_with_peft(plain, native, folder):
    check_adapters(native["adapters"], plain["adapters"], folder / "adapters-native")
    assert native["adapters"]["resumed"] == native["adapters"]["history"]


@pytest.mark.xla
def test_under_spmd_adapters_train_sharded_and_open_with_peft(plain, spmd, folder):
    check_adapters(spmd["adapters"], plain["adapters"], folder / "adapters-spmd")
    check_histories({"history": spmd["adapters"]["resumed"]}, plain["adapters"])  # from native's checkpoint


def check_uneven(found, expected, folder, mode, names):
    """Compare runs of which neither the rows nor the labels of a step divide by the devices."""
    from safetensors.torch import load_file

    for name in names:
        run, other = found[name], expected[name]
        check_histories(run, other)
        assert run["eval_loss"] == pytest.approx(other["eval_loss"], rel=2e-5)
        assert run["rows"] == pytest.approx(other["rows"], rel=1e-3, abs=1e-3)
        assert len(run["rows"]) == 13
        weights = load_file(folder / f"plain-{name}" / "model.safetensors")
        for key, tensor in load_file(folder / f"{mode}-{name}" / "model.safetensors").items():
            assert (tensor - weights[key]).abs().max() < 1e-5, (name, key)


def test_natively_each_device_counts_by_its_own_labels(plain, native, folder):
    check_uneven(native, plain, folder, "native", (*UNEVEN, "numbers"))


@pytest.mark.xla
def test_with_an_xla_process_for_each_device_each_counts_by_its_own_labels(plain, xla, folder, uneven):
    check_uneven(xla, plain, folder, "xla", (*uneven["xla"], "numbers"))


@pytest.mark.xla
def test_under_spmd_rows_and_labels_need_not_divide(plain, spmd, folder, uneven):
    check_uneven(spmd, plain, folder, "spmd", uneven["spmd"])


def test_a_loss_that_is_a_mean_over_rows_is_that_of_one_device(plain, native):
    check_histories(native["classification"], plain["classification"])
    assert native["classification"]["even"] == pytest.approx(plain["classification"]["even"], rel=2e-5)


def test_a_loss_that_cannot_be_weighed_is_refused_before_the_first_step(native):
    error, step = native["classification"]["uneven"]
    assert ("evaluate on a number of rows that divides" in error, step) == (True, 0)
    error, step = native["classification"]["labels_differ"]
    assert ("cannot be weighed" in error, step) == (True, 0)


def test_a_loss_function_that_divides_by_the_number_of_labels_gives_the_same_losses(plain, native):
    check_histories(native["loss_function"], plain["loss_function"])


def test_an_override_of_compute_loss_sees_each_devices_own_losses(native):
    one, other = native["overridden"]["returned"]
    assert len(one) == len(other) > 4
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_a_stream_gives_the_same_losses(plain, native):
    check_histories(native["streamed"], plain["streamed"])


def test_batches_by_length_are_other_batches(native):
    losses = [entry["loss"] for entry in native["by_length"]["history"]]
    others = [entry["loss"] for entry in native["whole"]["history"][:2]]
    assert losses != others
    assert losses == pytest.approx(others, rel=0.02)  # each device by its own number of labels


def test_the_best_model_comes_back_after_an_early_stop(native):
    found = native["best"]
    assert found["steps"] < 7
    assert found["best"] == min(found["eval_losses"]) < found["eval_losses"][-1]
    assert found["after"] == pytest.approx(found["best"], rel=1e-6)
    assert (found["bf16"], found["recomputed"]) == ("bfloat16", 2)


def test_the_example_leaves_a_model_that_opens(tmp_path):
    from transformers import GPT2LMHeadModel

    options = ("--engine", "native", "--steps", 2, "--context", 16, "--files", 60, "--out", "out")
    done = forkrun.run(EXAMPLE, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("'eval_loss':") == 2
    assert "engine      native, 1 device," in done.stdout
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "out").config.n_positions == 16
