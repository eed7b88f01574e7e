"""A stage trains the same model in every layout, the one that a bare loop of PyTorch trains on whole batches."""

import shutil

import pytest

from tests.e2e.training import MODEL, NO_DROPOUT, carry_out, data, write_file
from torchacc.train.metric_sinks import read_metrics

STEPS, EVERY = 8, 4
LAYOUTS = {
    "native1": {"devices": 1, "engine": "native", "batch_size": 8},
    "native1-accumulated": {"devices": 1, "engine": "native", "batch_size": 2, "gradient_accumulation_steps": 4},
    "native2": {"devices": 2, "engine": "native", "batch_size": 4},
    "native2-accumulated": {"devices": 2, "engine": "native", "batch_size": 2, "gradient_accumulation_steps": 2},
    "spmd4": {"devices": 4, "engine": "xla", "batch_size": 2},
    "spmd4-accumulated": {"devices": 4, "engine": "xla", "batch_size": 1, "gradient_accumulation_steps": 2},
}
ENDINGS = {
    "ended": {},
    "early": {"early_stopping": {"patience": 1, "min_delta": 100.0}, "eval_every_steps": 2},
    "taken-up": {},
    "taken-up-by-two": {"devices": 2, "batch_size": 2, "gradient_accumulation_steps": 2},
}
AXES = {"pp": {"schedule": "1f1b", "num_microbatches": 2}, "tp": {}, "sp": {}, "ep": {}}

MIXTURE = {
    "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")

    def stage(devices=1, engine="native", **training):
        return {
            "model_config": "model_config_tiny",
            "data": data(folder),
            "optimizer": {"name": "adamw", "lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1},
            "scheduler": {"name": "cosine", "warmup_steps": 2},
            "training": {
                "batch_size": 8, "max_steps": STEPS, "log_every_steps": 3, "eval_every_steps": EVERY,
                "save_every_steps": EVERY, "keep_checkpoints": None, "max_grad_norm": 0.5, **training,
            },
            "distributed": {"devices": devices, "engine": engine},
        }  # fmt: skip

    stages = {name: stage(**options) for name, options in (LAYOUTS | ENDINGS).items()}
    for name in ("taken-up", "taken-up-by-two"):
        stages[name]["training"]["resume"] = str(folder / "runs/native1/checkpoints/step-00000004")
    packed = stage(max_steps=3, eval_every_steps=3)
    stages["packed"] = packed | {"data": packed["data"] | {"packing": True}}
    stages["mixture"] = stage(max_steps=3, eval_every_steps=3) | {"model_config": "model_config_mixture"}
    spread = {"model_config": "model_config_mixture", "torchacc": {"dist": {"ep": {"size": 2}}}}
    stages["mixture4"] = stage(4, "xla", batch_size=2, max_steps=3) | spread
    for name, devices in (("balanced", 1), ("balanced2", 2)):
        rows = {"batch_size": 4 // devices, "gradient_accumulation_steps": 2}
        balanced = stage(devices, max_steps=3, eval_every_steps=3, **rows)
        stages[name] = balanced | {"model_config": "model_config_balanced"}
    for axis, options in AXES.items():
        rows = 4 if axis == "ep" else 8  # of a device that sees the same data as the other one
        over = {"model_config": "model_config_mixture", "torchacc": {"dist": {axis: {"size": 2, **options}}}}
        stages[f"mixture-{axis}"] = stage(2, batch_size=rows, max_steps=3, eval_every_steps=3) | over
    balanced = MIXTURE | {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    return write_file(folder, stages, tiny=MODEL | NO_DROPOUT, mixture=MIXTURE, balanced=balanced)


@pytest.fixture(scope="module")
def alone(file):
    asked = [
        "plain:native1",
        "native1",
        "open:native1",
        "native1-accumulated",
        "plain:packed",
        "packed",
        "early",
        "mixture",
        "plain:balanced",
        "balanced",
    ]
    return carry_out(file, *asked, "ended@15:5", "ended", "taken-up")


@pytest.mark.slow
def test_a_stage_does_what_a_bare_loop_does(alone):
    plain, own = alone["plain:native1"], alone["native1"]
    whole = plain["num_rows"] // 8
    assert 2 * EVERY > whole >= EVERY, "a whole evaluation is compared, and the stage goes on into a second epoch"
    assert own["losses"][:whole] == pytest.approx(plain["losses"][:whole], rel=1e-5)
    assert own["norms"][:whole] == pytest.approx(plain["norms"][:whole], rel=1e-4)
    assert own["rates"][:whole] == pytest.approx(plain["rates"][:whole])
    assert own["evaluations"]["4"] == pytest.approx(plain["evaluations"]["4"], rel=1e-5)
    assert own["losses"][-1] < own["losses"][0]
    assert own["finished"]
    assert own["own_losses"]


@pytest.mark.slow
def test_packed_documents_are_apart_in_training_and_in_evaluation(alone):
    plain, own = alone["plain:packed"], alone["packed"]
    assert len(plain["losses"]) == 3
    assert own["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert own["evaluations"]["3"] == pytest.approx(plain["evaluations"]["3"], rel=1e-5)


@pytest.mark.slow
def test_the_loss_that_balances_experts_counts_once_a_step_and_not_in_an_evaluation(alone, file):
    plain, own = alone["plain:balanced"], alone["balanced"]
    own2 = carry_out(file, "balanced2", num_processes=2)["balanced2"]
    for found in (own, own2):
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(plain["norms"], rel=1e-4)
        assert found["evaluations"]["3"] == pytest.approx(plain["evaluations"]["3"], rel=1e-5)


def check_alike(found, expected):
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert found["evaluations"].keys() == {"4", "8"}
    assert found["evaluations"] == pytest.approx(expected["evaluations"], rel=1e-5)


@pytest.mark.slow
def test_accumulated_and_on_two_processes_it_is_the_same_run(alone, file):
    check_alike(alone["native1-accumulated"], alone["native1"])
    found = carry_out(file, "native2", "native2-accumulated", "taken-up-by-two", num_processes=2)
    taken_up = found.pop("taken-up-by-two")
    for each in found.values():
        check_alike(each, alone["native1"])
    assert taken_up["losses"] == pytest.approx(alone["native1"]["losses"][4:], rel=1e-5)


@pytest.mark.slow
def test_over_other_axes_it_is_the_same_run(alone, file):
    found = carry_out(file, *(f"mixture-{axis}" for axis in AXES), num_processes=2)
    for name, each in found.items():
        assert each["losses"] == pytest.approx(alone["mixture"]["losses"], rel=1e-5), name
        assert each["norms"] == pytest.approx(alone["mixture"]["norms"], rel=1e-4), name
        assert each["evaluations"] == pytest.approx(alone["mixture"]["evaluations"], rel=1e-5), name
        check_loads(file, name)


@pytest.mark.slow
@pytest.mark.xla
def test_on_four_devices_of_one_process_it_is_the_same_run_in_one_program(alone, file):
    found = carry_out(file, "spmd4", "spmd4-accumulated", "mixture4")
    check_mixture(found.pop("mixture4"), alone["mixture"], file)
    for each in found.values():
        check_alike(each, alone["native1"])
    assert found["spmd4"]["compiled"] == 2, "a program for the step, one for the evaluation"
    assert found["spmd4-accumulated"]["compiled"] == 3, "one for the first micro-batches, one for the last and the step"


def check_mixture(found, expected, file):
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["compiled"] == 2, "programs: the step and the evaluation, and none for the loads"
    check_loads(file, "mixture4")


def check_loads(file, name):
    found, expected = loads_of(file, name), loads_of(file, "mixture")
    assert found == {name: pytest.approx(shares, abs=1e-6) for name, shares in expected.items()}


def loads_of(file, name):
    rows = read_metrics(file.parent / f"runs/{name}/metrics.jsonl")
    return next(row["expert_loads"] for row in reversed(rows) if "expert_loads" in row)


@pytest.mark.slow
def test_the_finished_model_opens_in_transformers(alone):
    found = alone["open:native1"]
    assert found["loss"] == pytest.approx(alone["native1"]["evaluations"]["8"], rel=1e-5)
    assert found["text"] == "the quick brown fox"
    assert found["vocab_size"] == found["num_tokens"] == 300
    assert found["generates_with_cache"]


@pytest.mark.slow
def test_a_loss_that_no_longer_falls_ends_the_stage(alone):
    early = alone["early"]
    assert len(early["losses"]) == 4, "the second evaluation is the first without an improvement of 100"
    assert early["evaluations"].keys() == {"2", "4"}
    assert early["finished"]


@pytest.mark.slow
def test_a_stage_goes_on_after_sigterm_and_from_a_named_checkpoint(alone):
    ended, goes_on, whole = alone["ended@15:5"], alone["ended"], alone["native1"]
    assert (ended["code"], ended["finished"], goes_on["finished"]) == (143, False, True)
    assert ended["losses"] == whole["losses"][: len(ended["losses"])]
    assert 4 <= len(ended["losses"]) < STEPS
    assert goes_on["made"] == list(range(len(ended["losses"]) + 1, STEPS + 1))
    assert goes_on["losses"] == whole["losses"]
    assert goes_on["evaluations"] == whole["evaluations"]
    assert alone["taken-up"]["losses"] == whole["losses"][4:]


@pytest.mark.slow
def test_a_stages_random_numbers_are_its_own_whatever_its_weights_come_with(tmp_path):
    def stage(**options):
        training = {"batch_size": 8, "max_steps": 3, "log_every_steps": 1}
        return {"data": data(tmp_path), "training": training, "distributed": {"engine": "native"}, **options}

    bare = tmp_path / "bare"
    stages = {"first": stage(), "second": stage(init_from="first"), "bare": stage(init_from=str(bare))}
    path = write_file(tmp_path, stages, tiny=MODEL)  # with dropout
    carry_out(path, "first")
    shutil.copytree(tmp_path / "runs/first/final", bare, ignore=shutil.ignore_patterns("manifest.json", "state.*"))
    found = carry_out(path, "second", "bare")
    assert found["second"]["losses"] == found["bare"]["losses"]


@pytest.mark.slow
def test_metrics_have_the_loads_of_experts(alone, file):
    *_, last = [row for row in read_metrics(file.parent / "runs/mixture/metrics.jsonl") if "expert_loads" in row]
    layers = last["expert_loads"]
    assert list(layers) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert all(len(shares) == 4 and sum(shares) == pytest.approx(1) for shares in layers.values())
    assert last["expert_imbalance"] == pytest.approx(4 * max(map(max, layers.values())))
    assert not any("expert_loads" in row for row in read_metrics(file.parent / "runs/native1/metrics.jsonl"))
