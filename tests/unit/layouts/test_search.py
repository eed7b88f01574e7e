"""The search for layouts, as plain data, and as a command."""

import json

import pytest
import torch
import yaml

from torchacc.cli import _search_layouts
from torchacc.cli.main import main
from torchacc.config import Config, resolve
from torchacc.engines.native.native_engine import check_axes
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.layouts import PlannedLayout, find_device
from torchacc.layouts.search import Candidate, grouped
from torchacc.parallel.axes import AXES
from torchacc.parallel.mesh import from_config
from torchacc.train.config import DistributedConfig
from torchacc.train.device_layout import make_layout
from torchacc.train.file import TrainFile

pytest.importorskip("transformers.models.llama.modeling_llama")
from transformers import AutoConfig, AutoModelForCausalLM

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
SPEEDS = "1e11,1e10,1e9,1e8,4"


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Set what the command sets in its process."""
    monkeypatch.setenv("PJRT_SELECT_DEFAULT_DEVICE", "0")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")


@pytest.fixture
def run(tmp_path, capsys):
    def run(options, *arguments, status=0):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(options))
        command = ["plan", "--search", "--model", str(path), "--device", SPEEDS, "--seq", "64", *arguments]
        assert main(command) == status
        return capsys.readouterr()

    return run


def found(run, options, *arguments, status=0):
    return json.loads(run(options, *arguments, "--json", status=status).out)


def test_each_layout_is_tried_and_the_fastest_is_first(run):
    result = found(run, LLAMA, "--devices", "4", "--global-batch", "8", "--memory", "1GiB")
    sizes = [each["sizes"] for each in result["fitting"]]
    for axis in ("dp", "fsdp", "tp", "sp", "pp"):
        assert any(each[axis] == 2 for each in sizes)
    assert all(each["dp"] * each["fsdp"] * each["tp"] * each["sp"] * each["pp"] * each["ep"] == 4 for each in sizes)
    seconds = [each["seconds"]["total"] for each in result["fitting"]]
    assert seconds == sorted(seconds)
    assert "has no module of experts" in result["refused"]["ep 2"]
    assert "2 layers: choose at most 2 stages" in result["refused"]["pp 4"]
    assert any(each["pp"] == each["sp"] == 2 for each in sizes)


def test_layouts_that_an_optimizer_cannot_step_are_refused(run):
    command = (LLAMA, "--devices", "2", "--global-batch", "2", "--memory", "1GiB", "--optimizer")
    result = found(run, *command, "adafactor")
    assert all(each["sizes"]["tp"] == each["sizes"]["pp"] == 1 for each in result["fitting"])
    assert "Adafactor is not known to update each element by itself" in result["refused"]["tp 2"]
    assert "in stages of dist.pp" in result["refused"]["pp 2"]


def test_configs_are_those_of_the_layouts(run):
    result = found(run, MIXTRAL, "--devices", "2", "--global-batch", "4", "--memory", "1GiB", "--bf16")
    assert any(each["sizes"]["ep"] == 2 for each in result["fitting"])
    for each in result["fitting"]:
        config = Config.from_dict(each["config"])
        assert {axis: getattr(config.dist, axis).size for axis in each["sizes"]} == each["sizes"]
        assert config.compute.bf16
        assert config.memory.gc == ("recompute" in each["layout"])
    assert any(each["sizes"]["pp"] == 2 for each in result["fitting"])


def test_experts_of_replicas_are_in_configs_that_the_engine_accepts(run):
    result = found(run, MIXTRAL, "--devices", "4", "--global-batch", "4", "--memory", "1GiB")
    assert "dp 2 x ep 2, FULL_SHARD" in [each["layout"] for each in result["fitting"]]
    config = AutoConfig.for_model(**MIXTRAL)
    for each in result["fitting"]:
        resolved = resolve(Config.from_dict(each["config"]), Job(num_processes=4), num_devices=4)
        with torch.device("meta"):
            check_axes(resolved, from_config(resolved), AutoModelForCausalLM.from_config(config))


def test_what_chooses_modules_to_recompute_is_left_out_without_recompute():
    base = Config()
    base.memory.gc, base.memory.gc_cls = True, {"LlamaDecoderLayer"}
    sizes = dict.fromkeys(AXES, 1)
    assert Candidate(sizes, "FULL_SHARD", True, 1).apply(base).memory.gc_cls == {"LlamaDecoderLayer"}
    assert not Candidate(sizes, "FULL_SHARD", False, 1).apply(base).memory.gc_cls


def test_the_config_in_the_text_is_one(run, tmp_path):
    text = run(LLAMA, "--devices", "2", "--global-batch", "2", "--memory", "1GiB").out
    path = tmp_path / "layout.yaml"
    path.write_text(text.partition("config of the first:")[2])
    assert Config.from_yaml(path).backend == "native"


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        ({"fsdp": 4}, "SHARD_GRAD_OP"),
        ({"dp": 4}, "NO_SHARD"),
        ({"dp": 2, "fsdp": 2}, "HYBRID_SHARD"),
        ({"fsdp": 2, "tp": 2}, "FULL_SHARD"),
        ({"pp": 2, "fsdp": 2}, "FULL_SHARD"),
        ({"sp": 2, "dp": 2}, "FULL_SHARD"),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_sections_of_a_training_file_are_the_layout(sizes, strategy, recompute, tmp_path):
    candidate = Candidate(dict.fromkeys(AXES, 1) | sizes, strategy, recompute, 2, 2)
    base = Config.from_dict({"dist": {"fsdp": {"forward_prefetch": True, "wrap_layer_cls": ["Block"]}}})
    text = _search_layouts._stage_yaml(PlannedLayout(candidate, None, None), base)
    sections = yaml.safe_load(text)
    stage = {"torchacc": sections["torchacc"], "distributed": {**sections["distributed"], "devices": 4}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"training_stages": {"one": stage}}))
    TrainFile.read(tmp_path / "run.yaml")  # takes them
    distributed = DistributedConfig(**stage["distributed"])
    layout = make_layout(distributed, sections["torchacc"], precision=None, launched=None)
    wanted = candidate.apply(Config())
    assert sections["training"] == {"batch_size": 2}
    assert dict(layout.mesh.sizes) == {axis: getattr(wanted.dist, axis).size for axis in AXES}
    assert layout.config.dist.fsdp.sharding_strategy == strategy
    assert layout.config.dist.pp.schedule == wanted.dist.pp.schedule
    assert layout.config.memory.gc == recompute


def test_where_nothing_fits_the_nearest_is_named(run):
    text = run(LLAMA, "--devices", "2", "--memory", "1KiB", status=1).out
    assert "no layout fits" in text
    assert "the closest is " in text
    assert "most of it " in text


def test_samples_that_do_not_divide_leave_layouts_that_share_them(run):
    result = found(run, LLAMA, "--devices", "4", "--global-batch", "1", "--memory", "1GiB")
    assert all(each["sizes"]["dp"] * each["sizes"]["fsdp"] == 1 for each in result["fitting"])
    assert "does not divide over 4 parts of the data" in result["refused"]["data parallel"]


def test_one_device_is_a_layout(run):
    result = found(run, LLAMA, "--devices", "1", "--memory", "1GiB")
    assert [each["layout"] for each in result["fitting"]] == [
        "one device, FULL_SHARD",
        "one device, FULL_SHARD, recompute",
    ]


def test_options_that_a_layout_has_are_refused(run):
    for options in (("--batch", "2"), ("--strategy", "NO_SHARD"), ("--gc",), ("--dp", "2")):
        assert f"by itself: leave {options[0]} out" in run(LLAMA, *options, "--memory", "1GiB", status=2).err
    assert "those of the native engine" in run(LLAMA, "--engine", "xla", status=2).err
    assert "write --memory" in run(LLAMA, status=2).err


def test_devices_are_known_by_name_or_by_their_figures():
    assert find_device("H100").flops_per_second == 989e12
    own = find_device(SPEEDS)
    assert find_device(f"{SPEEDS},5e-5").seconds_per_exchange == 5e-5
    assert find_device(f"{SPEEDS},5e-5").devices_per_processor == 1
    assert find_device(f"{SPEEDS},5e-5,4").devices_per_processor == 4
    assert find_device(f"{SPEEDS},5e-5,4,1e-4").seconds_per_operation == 1e-4
    assert (own.near_bytes_per_second, own.far_bytes_per_second, own.devices_per_machine) == (1e9, 1e8, 4)
    for wrong in (
        "h101",
        "1,2,3",
        "1e9,0,1,1,4",
        "1,1,1,1,0",
        "1,1,1,1,nan",
        "1,1,1,1,1e999",
        "nan,1,1,1,4",
        "1,1,1,1,4,0",
        "1,1,1,1,4,1,0.5",
        "1,1,1,1,4,1,inf",
        "1,1,1,1,4,1,1,0",
        "1,1,1,1,4,1,1,1,1",
    ):
        with pytest.raises(ConfigError, match="there is no such device"):
            find_device(wrong)


def test_reasons_that_differ_in_sizes_are_one():
    assert grouped({"a": "size 2", "b": "size 4", "c": "none"}) == {"size 2": ["a", "b"], "none": ["c"]}
