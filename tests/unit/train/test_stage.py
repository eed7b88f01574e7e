import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, GPT2Config, T5Config

from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.train.run_folder import mark_finished, take_folder


def refusal(make, *args, **kwargs):
    with pytest.raises(ConfigError) as raised:
        make(*args, **kwargs)
    return str(raised.value)


def test_a_stage_becomes_a_frozen_run(make, tmp_path):
    run = make()
    assert (run.stage, run.folder, run.model_name) == ("one", tmp_path / "out" / "one", "model_config_small")
    assert (run.final, run.checkpoints) == (run.folder / "final", run.folder / "checkpoints")
    assert (run.layout.num_nodes, run.layout.num_processes, run.layout.num_devices) == (1, 2, 2)
    assert run.config.dist.fsdp.size == 2
    assert (run.examples_per_step, run.tokens_per_step) == (12, 12 * 128)
    for change in (lambda: setattr(run, "stage", "x"), lambda: setattr(run.training, "seed", 1)):
        with pytest.raises((ConfigError, FrozenInstanceError)):
            change()
    with pytest.raises(ConfigError, match="frozen"):
        run.config.compute.bf16 = True
    assert "2, engine native, 2 processes on one machine" in str(run)
    assert "3 x 2 devices x 2 micro-batches = 12 examples, 1,536 tokens, in a step" in str(run)
    assert not run.folder.exists()


def test_a_preset_stands_in_for_the_section_and_the_command_wins_over_both(make):
    run = make(preset="preset", chosen_model="1.7B")
    assert (run.layout.num_nodes, run.layout.num_processes, run.model_name) == (2, 4, "model_config_1.7B")
    assert run.config.dist.fsdp.sharding_strategy == "NO_SHARD"
    assert run.layout.data_parallel_size == 8
    run = make(preset="preset", num_nodes=1, devices=2)
    assert (run.layout.num_nodes, run.layout.num_processes) == (1, 2)


def test_devices_of_a_call_count_only_where_the_file_says_nothing(make):
    assert make(default_devices=3).layout.num_devices == 2
    assert make(default_devices=3, devices=1).layout.num_devices == 1


@pytest.mark.parametrize(
    ("precision", "bf16", "fp16", "master"),
    [
        (None, False, False, "float32"),
        ("32-true", False, False, "float32"),
        (32, False, False, "float32"),
        ("bf16-mixed", True, False, "float32"),
        ("bf16-true", True, False, "bfloat16"),
        ("16-mixed", False, True, "float32"),
    ],
)
def test_precision_has_lightnings_names(make, precision, bf16, fp16, master):
    compute = make(precision=precision).config.compute
    assert (compute.bf16, compute.fp16, compute.master_dtype) == (bf16, fp16, master)


def test_every_option_of_the_fsdp_section_reaches_the_config(make):
    given = (
        "cpu_offload: true, sharding_strategy: SHARD_GRAD_OP, backward_prefetch: NONE, forward_prefetch: true, "
        "limit_all_gathers: false, activation_checkpointing: true, use_orig_params: false"
    )
    fsdp = make(distributed=f"fsdp: {{{given}}}").config.dist.fsdp
    assert (fsdp.cpu_offload, fsdp.sharding_strategy, fsdp.backward_prefetch) == (True, "SHARD_GRAD_OP", "NONE")
    assert (fsdp.forward_prefetch, fsdp.limit_all_gathers) == (True, False)
    assert (fsdp.activation_checkpointing, fsdp.use_orig_params) == (True, False)


@pytest.mark.parametrize("distributed", ["strategy: ddp", "strategy: auto, fsdp: {enabled: false}"])
def test_without_sharding_every_device_has_the_model(make, distributed):
    run = make(distributed=distributed)
    assert run.config.dist.fsdp.sharding_strategy == "NO_SHARD"
    assert run.layout.mesh.describe() == "dp 2 x fsdp 1"


def test_what_has_no_effect_without_sharding_is_noted(make):
    run = make(distributed="strategy: ddp, fsdp: {cpu_offload: true, enabled: true}")
    assert "distributed.fsdp.cpu_offload = True has no effect: nothing is sharded" in run.notes
    assert not run.config.dist.fsdp.cpu_offload
    assert "note        distributed.fsdp.cpu_offload" in str(run)


def test_a_hybrid_shards_inside_of_each_node(make):
    run = make(distributed="num_nodes: 2, fsdp: {sharding_strategy: HYBRID_SHARD}")
    assert run.layout.mesh.describe() == "dp 2 x fsdp 2"


def test_other_axes_leave_fsdp_the_rest(make):
    run = make(stage="torchacc: {dist: {dp: {size: 2}}}")
    assert run.layout.mesh.describe() == "dp 2 x fsdp 1"
    run = make(stage="torchacc: {dist: {ep: {size: 2}}}")
    assert run.layout.mesh.describe() == "dp 1 x fsdp 1 x ep 2"


@pytest.mark.xla
@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (
            "fsdp: {size: 3}",
            "dp(1) * fsdp(3) * tp(1) * pp(1) * sp(1) * ep(1) = 3, and the run has 1 machines * 4 devices = 4",
        ),
        (
            "tp: {size: 3}",
            "dp(1) * fsdp(1) * tp(3) * pp(1) * sp(1) * ep(1) = 3, and the run has 1 machines * 4 devices = 4",
        ),
        (
            "dp: {size: 3}",
            "dp(3) * fsdp(1) * tp(1) * pp(1) * sp(1) * ep(1) = 3, and the run has 1 machines * 4 devices = 4",
        ),
        (
            "tp: {size: 8}",
            "dp(1) * fsdp(1) * tp(8) * pp(1) * sp(1) * ep(1) = 8, and the run has 1 machines * 4 devices = 4",
        ),
    ],
)
def test_a_process_that_drives_all_devices_leaves_none_idle(make, sizes, problem):
    assert problem in refusal(make, preset="auto", devices=4, stage=f"torchacc: {{dist: {{{sizes}}}}}")
    assert make(preset="auto", devices=4, stage="torchacc: {dist: {fsdp: {size: 2}}}").layout.mesh.describe() == (
        "dp 2 x fsdp 2"
    )


def test_what_means_nothing_beside_other_options_is_noted(make):
    note = "data.text_column = 'body' has no effect: stdlib has no columns"
    assert note in make(stage="data: {text_column: body}").notes


@pytest.mark.xla
def test_with_xla_one_process_drives_all_devices_of_a_machine(make):
    layout = make(preset="auto", devices=4).layout
    assert (layout.engine, layout.num_processes, layout.num_devices) == ("xla-spmd", 1, 4)
    assert layout.config.dist.fsdp.use_spmd
    apart = make(preset="auto", stage="torchacc: {dist: {fsdp: {use_spmd: false}}}").layout
    assert (apart.engine, apart.num_processes) == ("xla-multiprocess", 2)
    assert make(preset="auto", num_nodes=2).layout.engine == "xla-multiprocess"
    asked = refusal(make, preset="auto", num_nodes=2, stage="torchacc: {dist: {fsdp: {use_spmd: true}}}")
    assert "use_spmd = True on 2 machines" in asked
    torchrun = Job(num_processes=2, local_num_processes=2)
    assert make(preset="auto", launched=torchrun).layout.engine == "xla-multiprocess"
    assert not make(preset="auto", devices=1).config.dist.fsdp.use_spmd


@pytest.mark.xla
@pytest.mark.parametrize(
    ("preset", "precision", "option"),
    [("offload", None, "dist.fsdp.cpu_offload"), ("auto", "16-mixed", "compute.fp16")],
)
def test_what_xla_has_not_chooses_the_native_engine(make, preset, precision, option):
    run = make(preset=preset, precision=precision)
    assert (run.layout.engine, run.layout.num_processes) == ("native", 2)
    assert run.notes[0] == f"engine: auto takes native, as {option} is asked for, which XLA has not"
    with pytest.raises(ConfigError, match=f"{option.split('.')[-1]} = True is not available under XLA"):
        make(preset=f"{preset}_xla", precision=precision)


@pytest.mark.xla
def test_batchnorm_is_synchronous_where_one_program_sees_all(make):
    assert "so that it is so by nature" in make(preset="batchnorm").notes[0]


def test_a_launchers_processes_are_one_for_each_device(make):
    torchrun = Job(num_processes=2, local_num_processes=2)
    assert make(launched=torchrun).layout.num_processes == 2
    three = Job(num_processes=3, local_num_processes=3)
    assert "pass --num-nodes 1 --devices 3" in refusal(make, launched=three)
    assert make(launched=three, distributed="", devices=3).layout.num_devices == 3


REFUSED = {
    "distributed: strategy: fsdp, fsdp: {enabled: false}": "config.yaml:7: training_stages.one.distributed.strategy = "
    "'fsdp' with distributed.fsdp.enabled = False: they contradict each other; write strategy: ddp",
    "distributed: sync_batchnorm: true": "config.yaml:7: training_stages.one.distributed.sync_batchnorm = True: with",
    "distributed: fsdp: {backward_prefetch: BACKWARD_POST}": "config.yaml:7: training_stages.one.distributed.fsdp."
    "backward_prefetch = 'BACKWARD_POST' is not available",
    "distributed: fsdp: {sharding_strategy: HYBRID_SHARD}": "config.yaml:7: training_stages.one.distributed.fsdp."
    "sharding_strategy = 'HYBRID_SHARD' shards inside of groups",
    "stage: torchacc: {dist: {fsdp: {size: 3}}}": "config.yaml:8: training_stages.one.torchacc.dist: dp(1) * fsdp(3)",
    "stage: torchacc: {memory: {gc_cnt: 2}}": "config.yaml:8: training_stages.one.torchacc.memory.gc_cnt = 2 chooses",
    "stage: torchacc: {compute: {fp16: true, bf16: true}}": "config.yaml:8: training_stages.one.torchacc.compute.fp16",
    "stage: data: {dataset: json}": "it reads files; name them in data.files",
    "stage: data: {dataset: json, files: '*.jsonl'}": "files = '*.jsonl': there is no such file",
    "stage: data: {files: config.yaml}": "files go with dataset: text, json, parquet, not 'stdlib'",
    "stage: data: {dataset: text, files: config.yaml, validation: {split: a, files: b}}": "give one of split and files",
    "stage: data: {tokenizer: ./none}": "there is no such folder",
    "stage: scheduler: {warmup_steps: 21}": "scheduler.warmup_steps = 21: the stage has 20 steps",
    "stage: init_from: onee": "there is no such stage and no such folder; did you mean 'one'?",
    "stage: init_from: one": "a stage cannot start from itself",
    "stage: init_from: ./elsewhere": "no such folder; stages: one, two",
}


@pytest.mark.parametrize(("where", "message"), REFUSED.items(), ids=str)
def test_what_cannot_be_is_refused(make, where, message):
    section, _, text = where.partition(": ")
    assert message in refusal(make, **{section: text})


def test_devices_that_a_cpu_cannot_stand_for_are_refused(make, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    refused = refusal(make, devices=65)
    assert refused.startswith("distributed.devices = 65: each is a share of this machine's 2 cores")
    assert make(devices=64).notes == ("64 devices share this machine's 2 cores, so that each is slower",)
    assert make(devices=2).notes == ()


def test_what_a_preset_or_the_command_says_is_told_as_theirs(make):
    placed = "config.yaml:15: distributed_examples.batchnorm.sync_batchnorm = True: with one process"
    assert placed in refusal(make, preset="batchnorm", num_nodes=2)
    assert refusal(make, precision="bf17").startswith("precision 'bf17' is not one of 32")
    assert refusal(make, devices=0).startswith("distributed.devices = 0: expected at least 1")
    assert refusal(make, num_nodes=0).startswith("distributed.num_nodes = 0: expected at least 1")
    assert refusal(make, stage_name="two", default_devices=0).startswith("distributed.devices = 0: expected")
    stage = "torchacc: {memory: {offload_activations: true}}"
    assert refusal(make, stage, preset="auto", precision="half").startswith("precision 'half'")


@pytest.mark.xla
def test_what_xla_has_not_is_told_with_its_line_unless_the_command_asks_for_it(make):
    at = "config.yaml:14: distributed_examples.offload_xla.fsdp.cpu_offload = True is not available under XLA"
    assert at in refusal(make, preset="offload_xla")
    stage = "torchacc: {compute: {fp16: false}}"
    assert refusal(make, stage, preset="auto_xla", precision="16-mixed").startswith("compute.fp16 = True is not")


@pytest.mark.parametrize(
    ("model", "stage", "message"),
    [
        (
            "model_type: gpt2, n_positions: 64",
            "data: {block_size: 65}",
            "8: training_stages.one.data.block_size = 65: the model has 64 positions; write block_size: 64 or less",
        ),
        (
            "model_type: gpt2, n_positions: 127",
            "",
            "4: training_stages.one: data.block_size = 128: the model has 127 positions",
        ),
        (
            "model_type: bert, is_decoder: true",
            "data: {packing: true}",
            "8: training_stages.one.data.packing = true: bert is not known to keep to one document",
        ),
        (
            "model_type: gpt2, vocab_size: 1000",
            "data: {vocab_size: 1001}",
            "17: model_config_small.vocab_size = 1000: the model has 1000 tokens, and the text's tokenizer up to "
            "1001; write 1001, or leave it out",
        ),
    ],
)
def test_examples_that_do_not_fit_the_model_are_refused(make, model, stage, message):
    assert f"config.yaml:{message}" in refusal(make, stage, model=model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("n_embd: 33, n_head: 2", "ValueError: `embed_dim` must be divisible by num_heads"),
        ("n_head: 0", "ZeroDivisionError"),
        ("activation_function: nope", "KeyError: 'nope'"),
        ("resid_pdrop: 2.0", "ValueError: dropout probability has to be between 0 and 1"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(make, options, message):
    refused = refusal(make, model=f"model_type: gpt2, {options}")
    assert f"config.yaml:17: model_config_small: transformers cannot build this model: {message}" in refused
    assert "\n" not in refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("llama, num_attention_heads: 32, num_key_value_heads: 3", "RuntimeError: Number of heads in key and"),
        ("gptj, rotary_dim: 300, n_embd: 64, n_head: 4", "RuntimeError: "),
        ("mixtral, num_experts_per_tok: 9, num_local_experts: 8", "RuntimeError: "),
    ],
)
def test_a_model_whose_layers_do_not_fit_one_another_is_refused(make, options, message):
    family, _, options = options.partition(", ")
    layers = "n_layer: 2" if family == "gptj" else "num_hidden_layers: 2"
    refused = refusal(make, model=f"model_type: {family}, {layers}, {options}")
    assert f":17: model_config_small: transformers can build this model, and not run it: {message}" in refused


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gemma2", "qwen3", "jetmoe", "xlnet"])
def test_a_model_that_runs_is_taken_and_one_that_cannot_run_without_values(family):
    from torchacc.train.models import planned_config

    layers = "num_hidden_layers" if family != "gpt2" else "n_layer"
    config = planned_config({"model_type": family, layers: 2})
    assert config is not None
    assert config.num_hidden_layers == 2


def test_a_family_of_several_models_is_refused(make):
    assert "gemma3 consists of several models" in refusal(make, model="model_type: gemma3")


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("init_from: ''", "write a stage, a folder or a name on the hub"),
        ("init_from: empty", "empty holds no model.safetensors and no model.safetensors.index.json"),
        ("init_from: config.yaml", "there is no such stage and no such folder; stages: one, two"),
        ("training: resume: ''", "there is no such folder; write 'auto', 'never'"),
        ("training: resume: empty", "empty holds no model.safetensors"),
        ("training: resume: weights", "weights has no optimizer.json and no state.json"),
        ("model: ''", "there is no such folder; write a model's folder, or its name on the hub"),
        ("model: ./nope", "there is no such folder; write a model's folder, or its name on the hub"),
        ("model: config.yaml", "there is no such folder; write a model's folder, or its name on the hub"),
        ("model: t5", "model_type t5 is not a family of causal language models"),
        (
            "model: gpt2",
            "the model has 99 tokens, and the text's tokenizer up to 4096; choose a data.tokenizer that fits",
        ),
        ("model: empty", "empty has no config.json, so that it holds no model of transformers"),
        ("model: config", "config holds no model.safetensors"),
        ("model: bert", "bert is not known to keep to one document of a block"),
    ],
)
def test_folders_that_do_not_hold_what_is_needed_are_refused(make, tmp_path, stage, message):
    configs = {"config": GPT2Config(), "bert": BertConfig(), "t5": T5Config(), "gpt2": GPT2Config(vocab_size=99)}
    for name in ("empty", "weights", *configs):
        (tmp_path / name).mkdir()
        if name in configs:
            configs[name].save_pretrained(tmp_path / name)
        if name not in ("empty", "config"):
            save_file({"weight": torch.zeros(2)}, tmp_path / name / "model.safetensors")
    section, _, value = stage.partition(": ")
    given = {"model": {"model": f"pretrained: {value}"}, "training": {"training": value}}.get(section, {"stage": stage})
    assert re.search(rf"config.yaml:\d+: .*{re.escape(message)}", refusal(make, **given))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"stage_name": "tow"}, "there is no stage 'tow' in training_stages; did you mean 'two'?"),
        ({"preset": "preste"}, "there is no preset 'preste' in distributed_examples; did you mean 'preset'?"),
        ({"chosen_model": "smal"}, "did you mean 'model_config_small'?"),
        ({"precision": "bf17"}, "precision 'bf17' is not one of 32, 32-true, bf16"),
    ],
)
def test_unknown_names_have_their_nearest(make, asked, message):
    assert message in refusal(make, **asked)


def test_a_run_has_one_length(make):
    assert make().training.max_steps == 20
    assert "config.yaml:6: training_stages.one.training.num_epochs = 2: and max_steps = 20; keep one" in refusal(
        make, training="num_epochs: 2"
    )


def test_a_stage_starts_from_a_finished_one(make):
    one = make()
    assert "run it first, with --stage one" in refusal(make, stage_name="two")
    take_folder(one)
    assert "that stage has not finished" in refusal(make, stage_name="two")
    mark_finished(one.folder, {})
    two = make(stage_name="two")
    assert (two.init_from, two.training.num_epochs) == (one.final, 1)


def test_a_stage_starts_from_the_folder_of_a_finished_one(make, tmp_path):
    mark = tmp_path / "earlier" / "one"
    (mark / "final").mkdir(parents=True)
    save_file({"weight": torch.zeros(2)}, mark / "final" / "model.safetensors")
    assert "earlier/one holds no model.safetensors" in refusal(make, stage="init_from: ./earlier/one")
    mark_finished(mark, {})
    assert make(stage="init_from: ./earlier/one").init_from == Path("earlier/one/final")


def test_an_output_folder_that_is_below_a_file_is_refused(make, tmp_path):
    (tmp_path / "out").write_text("in the way")
    assert f"{tmp_path / 'out'} is a file; change output_dir" in refusal(make)


def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(make, monkeypatch):
    monkeypatch.setattr("torchacc.train.metric_sinks._is_installed", lambda package: False)
    refused = refusal(make, top="wandb: {use_wandb: true}")
    assert re.search(r"config.yaml:\d+: wandb.use_wandb = True needs .*torchacc\[wandb\]", refused)


@pytest.mark.parametrize(
    ("share", "training", "message"),
    [
        (0.0, "early_stopping: {}", "there is nothing to evaluate on"),
        (0.1, "early_stopping: {}", "the stage is evaluated at its end only; give eval_every_steps"),
        (0.1, "early_stopping: {}, eval_every_steps: 20", "it has 20 steps: write less than 20 as eval_every_steps"),
    ],
)
def test_stopping_early_needs_evaluations(make, share, training, message):
    refused = refusal(make, f"data: {{validation_share: {share}}}", training=training)
    assert re.search(rf"config.yaml:6: training_stages.one.training.early_stopping: .*{message}", refused)


def test_a_log_file_that_is_the_runs_own_is_refused_beforehand(make):
    assert re.search(
        r"config.yaml:\d+: logging.log_file = 'run.json'", refusal(make, top="logging: {log_file: run.json}")
    )
