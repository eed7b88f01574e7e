"""`torchacc plan`, on files of a model's options."""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import torch

from torchacc.aot import compiler
from torchacc.cli import _compile_step, _plan_input, plan_command
from torchacc.cli.main import main
from torchacc.errors import ConfigError

ROOT = Path(__file__).parents[3]

pytest.importorskip("transformers.models.gpt2.modeling_gpt2")  # loads torch_xla, which sets variables

TINY = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
ENGINES = ("xla", "native")
TINY |= {"bos_token_id": None, "eos_token_id": None}
TRAINING = """
training_stages:
  one:
    model_config: model_config_tiny
    data: {block_size: 8, vocab_size: 300}
    optimizer: {name: sgd, lr: 0.1}
    training: {batch_size: 3}
    distributed: {fsdp: {activation_checkpointing: true}}
model_config_tiny: {model_type: gpt2, n_layer: 2, n_embd: 32, n_head: 2, n_positions: 16}
"""


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Set what the command sets in its process."""
    monkeypatch.setenv("PJRT_SELECT_DEFAULT_DEVICE", "0")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def plan(capsys, *arguments):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


def test_each_strategy_has_a_row(model, capsys):
    assert main(["plan", "--model", model, "--devices", "4", "--memory", "1GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("28,032 parameters in 3 units, AdamW, float32")
    assert lines[1] == "1 x 16 tokens on each of 4 devices, engine xla"
    assert [line.split()[0] for line in lines[4:8]] == ["FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    assert lines[3].split() == [
        "strategy", "parameters", "optimizer", "gradients", "gathered", "activations", "total", "fits",
    ]  # fmt: skip
    assert lines[4].endswith("from 1 device")
    assert lines[5].endswith("from 4 devices")


@pytest.mark.slow
def test_the_terminal_has_the_plan_alone(model):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("USE_TORCH_XLA", "PJRT_SELECT_DEFAULT_DEVICE", "TF_CPP_MIN_LOG_LEVEL", "PJRT_DEVICE"):
        environment.pop(name, None)  # transformers then imports torch_xla, where there is accelerate
    command = [sys.executable, "-m", "torchacc", "plan", "--model", model, "--strategy", "NO_SHARD"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-3].startswith("NO_SHARD")


def test_bytes_add_up(model, capsys):
    found = plan(capsys, "--model", model, "--devices", "2", "--strategy", "FULL_SHARD", "--memory", "64KiB")
    assert found["num_parameters"] == 28032
    [needed] = found["strategies"].values()
    assert needed["parameters"] == 28032 * 4 / 2
    assert needed.pop("fewest_devices") is None or needed["total"] <= 64 << 10
    assert needed.pop("total") == sum(needed.values())


def test_batch_length_and_vocabulary_are_chosen(model, capsys):
    small, large = (
        plan(capsys, "--model", model, "--strategy", "NO_SHARD", *more)
        for more in ((), ("--batch", "4", "--seq", "8", "--vocab", "128"))
    )
    assert large["num_parameters"] - small["num_parameters"] == 64 * 32
    assert (small["batch"], small["seq"], large["batch"], large["seq"]) == (1, 16, 4, 8)


@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_alone_are_trained(model, capsys, engine):
    pytest.importorskip("peft")
    options = ("--model", model, "--engine", engine, "--devices", "2", "--strategy", "FULL_SHARD")
    found = plan(capsys, *options, "--lora", "4")
    trained = 2 * (32 * 4 + 4 * 96)  # c_attn, in two layers
    assert (found["num_parameters"], found["num_trained"]) == (28032 + trained, trained)
    needed = found["strategies"]["FULL_SHARD"]
    assert needed["parameters"] == 4 * (28032 + trained) / 2
    assert needed["total"] < plan(capsys, *options)["strategies"]["FULL_SHARD"]["total"]
    assert main(["plan", *options, "--lora", "4"]) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert f"with LoRA of rank 4: {28032 + trained:,} parameters, {trained:,} of them trained" in title


def test_families_that_peft_has_no_choice_of_layers_for_are_refused(tmp_path, capsys):
    pytest.importorskip("peft")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "cpmant", "hidden_size": 32, "num_hidden_layers": 1}))
    assert "peft puts no adapters into CpmAntForCausalLM" in refused(capsys, "--model", str(path), "--lora", "4")


def test_products_that_are_kept_are_planned_natively(model, capsys):
    def total(*arguments):
        found = plan(
            capsys, "--model", model, "--engine", "native", "--strategy", "NO_SHARD", "--batch", "64", *arguments
        )
        return found["strategies"]["NO_SHARD"]["total"]

    assert total("--gc") < total("--gc", "save_matmuls") < total()
    assert "native engine only" in refused(capsys, "--model", model, "--gc", "save_matmuls")


def test_a_training_file_says_it_all(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(TRAINING)
    found = plan(capsys, "--config", str(path), "--devices", "2", "--strategy", "FULL_SHARD")
    assert (found["model"], found["batch"], found["seq"]) == ("model_config_tiny", 3, 8)
    assert found["num_parameters"] == 28032 + (300 - 64) * 32
    assert found["strategies"]["FULL_SHARD"]["optimizer"] == 0
    assert (found["devices"], found["engine"]) == (2, "xla")


def test_a_step_that_is_compiled_has_documents_where_the_training_file_packs_them(tmp_path):
    for packing, is_packed in ("", True), (", packing: concat", False), (", packing: false", False):
        path = write(tmp_path, "config.yaml", TRAINING.replace("vocab_size: 300", f"vocab_size: 300{packing}"))
        assert read(path).is_packed == is_packed
    batch = read(path).make_batch(2, with_positions=True)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), (2, 8)
    )


def test_a_step_that_is_compiled_is_sharded_as_the_training_file_says(tmp_path):
    for says, torchacc, strategy, copies in (
        ("", "", "FULL_SHARD", 1),
        ("strategy: ddp, ", "", "NO_SHARD", 1),
        ("fsdp: {sharding_strategy: SHARD_GRAD_OP}, ", "dp: {size: 2}", "SHARD_GRAD_OP", 2),
        ("", "fsdp: {size: 2}, tp: {size: 2}", "FULL_SHARD", 2),
        ("fsdp: {sharding_strategy: HYBRID_SHARD}, ", "", "HYBRID_SHARD", 2),
    ):
        text = TRAINING.replace(
            "distributed: {fsdp: {activation_checkpointing: true}}",
            f"torchacc: {{dist: {{{torchacc}}}}}\n    distributed: {{{says}}}",
        )
        training = read(write(tmp_path, "config.yaml", text))
        assert training.strategy == strategy
        options = Namespace(dp=None, devices=8)
        assert _plan_input.replicas(options, training.config, strategy) == copies
        assert _plan_input.replicas(Namespace(dp=4, devices=8), training.config, strategy) == 4


def test_the_memory_of_chips_is_not_chosen(model, capsys):
    assert "leave it out" in refused(capsys, "--model", model, "--compile-for", "v5e:2x2", "--memory", "1GiB")


def read(path):
    parser = ArgumentParser()
    plan_command.add_options(parser)
    return _plan_input.read(parser.parse_args(["--config", str(path)]))


def test_the_optimizer_has_the_options_of_a_training_file(tmp_path):
    path = tmp_path / "config.yaml"
    for options, expected in (
        ("name: sgd, lr: 0.1, momentum: 0.9", {"momentum_buffer"}),
        ("name: adamw, lr: 0.1, amsgrad: true", {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    ):
        path.write_text(TRAINING.replace("name: sgd, lr: 0.1", options))
        training = read(path)
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        parameter.grad = torch.ones_like(parameter)
        optimizer = _compile_step.optimizer_of(training)([parameter])
        optimizer.step()
        assert set(optimizer.state[parameter]) == expected
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_page_that_cannot_be_written_is_refused_before_it_is_compiled(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_compile_step, "check_installed", lambda platform: None)
    command = ("--model", model, "--compile-for", "v5e:2x2", "--html")
    assert "there is no folder" in refused(capsys, *command, str(tmp_path / "reports" / "x.html"))
    assert "cannot be written" in refused(capsys, *command, str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        compiler._new_folder(tmp_path / "file" / "compiled")


def test_several_batches_in_a_step_are_planned_natively(tmp_path, capsys):
    one = write(tmp_path, "one.yaml", TRAINING)
    two = write(
        tmp_path, "two.yaml", TRAINING.replace("batch_size: 3", "batch_size: 3, gradient_accumulation_steps: 2")
    )
    needed = [
        plan(capsys, "--config", str(path), "--engine", "native", "--strategy", "NO_SHARD") for path in (one, two)
    ]
    less, more = (each["strategies"]["NO_SHARD"]["total"] for each in needed)
    assert less < more
    assert "is in the memory plan of the native engine only" in refused(capsys, "--config", str(two))


def test_a_search_has_the_samples_of_a_training_file(tmp_path, capsys):
    path = str(write(tmp_path, "config.yaml", TRAINING))
    command = ("--search", "--config", path, "--devices", "2", "--memory", "1GiB", "--device", "1e11,1e10,1e9,1e8,4")
    assert plan(capsys, *command)["global_batch"] == 3 * 2
    assert plan(capsys, *command, "--global-batch", "4")["global_batch"] == 4


def test_a_training_file_says_on_how_many_devices_and_by_which_engine(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    for says, devices, engine in (
        ("", 1, "xla"),
        ("devices: auto, ", 1, "xla"),
        ("devices: 4, num_nodes: 2, engine: native, ", 8, "native"),
    ):
        path.write_text(TRAINING.replace("distributed: {", f"distributed: {{{says}"))
        found = plan(capsys, "--config", str(path), "--strategy", "FULL_SHARD")
        assert (found["devices"], found["engine"]) == (devices, engine)


@pytest.mark.parametrize(
    ("axis", "size", "strategies"),
    [
        ("sp", 2, ["FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP"]),
        ("tp", 2, ["FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
        ("tp", 4, ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
        ("pp", 4, ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
        ("ep", 2, ["FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP"]),
    ],
)
def test_strategies_are_those_that_can_be_had_beside_other_axes(tmp_path, capsys, axis, size, strategies):
    family = "mixtral" if axis == "ep" else "llama"
    model = {
        "model_type": family, "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16,
    }  # fmt: skip
    options = model | ({"num_local_experts": 8} if axis == "ep" else {})
    stage = {
        "model_config": "model_config_tiny",
        "data": {"block_size": 8, "vocab_size": 257},
        "training": {"batch_size": 4},
        "distributed": {"engine": "native", "devices": 8},
        "torchacc": {"dist": {axis: {"size": size}}},
    }
    path = str(
        write(tmp_path, "config.yaml", json.dumps({"training_stages": {"one": stage}, "model_config_tiny": options}))
    )
    assert list(plan(capsys, "--config", path)["strategies"]) == strategies
    assert "cannot hold 3 replicas" in refused(capsys, "--config", path, "--dp", "3")


def test_a_checkpoint_is_planned_by_its_folder(tmp_path, capsys):
    from transformers import BertConfig

    BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50,
        max_position_embeddings=16, architectures=["BertForMaskedLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    found = plan(capsys, "--model", str(tmp_path), "--engine", "native", "--strategy", "NO_SHARD")
    assert found["strategies"]["NO_SHARD"]["parameters"] == 4 * found["num_parameters"]


def test_experts_natively_keep_only_what_their_own_tokens_need(tmp_path, capsys):
    options = {
        "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 2,
        "max_position_embeddings": 16,
    }  # fmt: skip
    path = str(write(tmp_path, "config.json", json.dumps(options)))
    found = {engine: plan(capsys, "--model", path, "--strategy", "NO_SHARD", "--engine", engine) for engine in ENGINES}
    xla, native = (found[engine]["strategies"]["NO_SHARD"]["activations"] for engine in ENGINES)
    assert native < 0.5 * xla


def test_what_is_wrong_is_said_in_a_line(model, tmp_path, capsys):
    assert "there is no such model" in refused(capsys, "--model", str(tmp_path / "nothing"))
    assert "has no model_type" in refused(capsys, "--model", str(write(tmp_path, "a.yaml", "n_layer: 2")))
    assert "is a training file: write --config" in refused(capsys, "--model", str(write(tmp_path, "b.yaml", TRAINING)))
    assert "16 positions" in refused(capsys, "--model", model, "--seq", "17")
    assert "either --model, or --config" in refused(capsys)
    assert "name it with --config" in refused(capsys, "--model", model, "--stage", "one")
    assert "did you mean 'AdamW'?" in refused(capsys, "--model", model, "--optimizer", "adamww")
    assert "HYBRID_SHARD" in refused(capsys, "--model", model, "--devices", "2", "--strategy", "HYBRID_SHARD")


def test_options_that_no_model_has_or_can_be_built_with(tmp_path, capsys):
    wrong = {
        "model_type: gpt2\nn_layr: 2": "gpt2 has no option 'n_layr'; did you mean 'n_layer'?",
        "model_type: gpt2\n2: 3": "2: the name of an option is a string, not 2",
        "model_type: gtp2": "is not a family of models in transformers; did you mean 'gpt2'?",
        "model_type: llama\nhidden_size: big": "transformers refuses the model's options",
        "model_type: llama\nhidden_size: -32": "error: ",
        "model_type: llama\nhidden_size: 30\nnum_attention_heads: 4": "error: ",
        "model_type: gpt2\nn_embd: 30\nn_head: 4": "a gpt2 cannot be built with these options",
    }
    for text, message in wrong.items():
        said = refused(capsys, "--model", str(write(tmp_path, "options.yaml", text)))
        assert message in said
        assert len(said.splitlines()) == 1


def test_what_transformers_wrote_may_have_options_of_the_past(tmp_path, capsys):
    old = TINY | {"n_ctx": 16, "architectures": ["GPT2LMHeadModel"]}
    found = plan(capsys, "--model", str(write(tmp_path, "config.json", json.dumps(old))), "--strategy", "NO_SHARD")
    assert found["num_parameters"] == 28032


def test_an_optimizer_that_needs_sparse_gradients(model, capsys):
    said = refused(capsys, "--model", model, "--optimizer", "SparseAdam")
    assert "the optimizer SparseAdam cannot be planned" in said


def test_on_a_cpu_bfloat16_takes_what_float32_does(model, capsys):
    def needed(*arguments):
        found = plan(capsys, "--model", model, "--strategy", "NO_SHARD", "--batch", "64", *arguments)
        return found["platform"], found["strategies"]["NO_SHARD"]["total"]

    (_, cpu), (_, tpu), (_, whole) = (
        needed("--platform", *each) for each in (["cpu", "--bf16"], ["tpu", "--bf16"], ["cpu"])
    )
    assert tpu < whole < cpu  # which has the cast weights beside what float32 has
    assert needed("--bf16", "--engine", "native")[0] is None
    assert main(["plan", "--model", model, "--bf16", "--platform", "cpu"]) == 0
    assert "holds bfloat16 in float32. For TPUs: --platform tpu; for GPUs" in capsys.readouterr().out
    said = refused(capsys, "--model", model, "--engine", "native", "--platform", "tpu")
    assert "--platform tpu is of XLA's devices: leave it out with --engine native" in said


def test_a_size_has_a_unit(model, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--model", model, "--memory", "16"])
    assert "'16' is not a size: write a number and a unit, such as 16GiB" in capsys.readouterr().err


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path
