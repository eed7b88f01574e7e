import operator
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchacc.config import Config
from torchacc.errors import ConfigError
from torchacc.train.config import DistributedConfig, StageConfig, StageFSDPConfig, TrainingConfig
from torchacc.train.file import TrainFile

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = "model_config_small: {model_type: gpt2, n_layer: 2}\n"


def read(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return TrainFile.read(path)


def refusal(tmp_path, text):
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    return str(raised.value).replace(str(tmp_path / "config.yaml"), "FILE")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_loads(path):
    file = TrainFile.read(path)
    assert {"single_node_fsdp", "multi_node_fsdp", "large_scale_fsdp"} <= file.presets.keys()
    assert {"model_config_small", "model_config_1.7B"} <= file.models.keys()
    assert list(file.stages) == ["stage1", "stage2"]


def test_a_stage_has_defaults_for_all_that_it_leaves_out(tmp_path):
    stage = read(tmp_path, "training_stages: {a: }\n" + SMALL).stages["a"]
    assert (stage.data.dataset, stage.optimizer.name, stage.training.batch_size) == ("stdlib", "adamw", 2)
    assert stage.distributed.fsdp.sharding_strategy == "FULL_SHARD"


def test_a_section_that_is_empty_is_one_of_defaults(tmp_path):
    sections = ("data", "optimizer", "scheduler", "training", "torchacc")
    text = "training_stages:\n  a:\n" + "".join(f"    {name}:\n" for name in sections)
    text += "    distributed:\n      fsdp:\n  b:\n    torchacc: {compute: , dist: {fsdp: }}\n"
    file = read(tmp_path, text + "distributed_examples:\nlogging:\nwandb:\n" + SMALL)
    assert file.stages["a"] == read(tmp_path, "training_stages: {a: }\n" + SMALL).stages["a"]
    assert (file.presets, file.wandb.use_wandb) == ({}, False)
    assert Config.from_dict(file.stages["b"].torchacc) == Config()


def test_an_optimizer_takes_any_argument_of_its_class(tmp_path):
    text = "training_stages: {a: {optimizer: {name: adam, lr: 1e-2, amsgrad: true, betas: [0.1, 0.2]}}}\n"
    optimizer = read(tmp_path, text).stages["a"].optimizer
    assert optimizer.options == {"lr": 0.01, "amsgrad": True, "betas": (0.1, 0.2)}


STAGE = "training_stages:\n  a:\n    {}\n"
WRONG = {
    STAGE.format("optimiser: {lr: 1}"): "FILE:3: training_stages.a.optimiser = {'lr': 1}: there is no such option; "
    "did you mean 'optimizer'?",
    STAGE.format("training: {batch_size: two}"): "FILE:3: training_stages.a.training.batch_size = 'two': expected a "
    "whole number",
    STAGE.format("optimizer: {lr: .inf}"): "FILE:3: training_stages.a.optimizer.lr = inf: expected a finite number",
    STAGE.format("training: {max_grad_norm: .nan}"): "FILE:3: training_stages.a.training.max_grad_norm = nan: expected "
    "a finite number",
    STAGE.format("training: {seed: 9223372036854775808}"): "FILE:3: training_stages.a.training.seed = "
    "9223372036854775808: expected less than 9223372036854775808",
    STAGE.format("modle_config: x"): "FILE:3: training_stages.a.modle_config = 'x': there is no such option; did you "
    "mean 'model_config'?",
    STAGE.format(
        "model_config: ''"
    ): "FILE:3: training_stages.a.model_config = '': expected a string that is not empty",
    STAGE.format("distributed:\n      fsdp:\n        sharding_strategy: FULL"): "FILE:5: training_stages.a.distributed."
    "fsdp.sharding_strategy = 'FULL': expected 'FULL_SHARD'",
    STAGE.format("distributed: {strategy: dpp}"): "FILE:3: training_stages.a.distributed.strategy = 'dpp': expected "
    "'auto', 'fsdp' or 'ddp'; did you mean 'ddp'?",
    STAGE.format("training:\n      early_stopping: {patience: 0}"): "FILE:4: training_stages.a.training.early_stopping."
    "patience = 0: expected at least 1",
    STAGE.format("optimizer:\n      name: sgd\n      beta: 0.9"): "FILE:5: training_stages.a.optimizer.beta = 0.9: SGD "
    "has no such option",
    STAGE.format("optimizer: {name: adanw}"): "FILE:3: training_stages.a.optimizer.name = 'adanw': torch.optim has no "
    "such optimizer; did you mean 'AdamW'?",
    STAGE.format("torchacc:\n      compute: {bf61: true}"): "FILE:4: training_stages.a.torchacc.compute.bf61 = True: "
    "there is no such option; did you mean 'bf16'?",
    STAGE.format("training: {weight_decay: 0.1}"): "FILE:3: training_stages.a.training.weight_decay = 0.1: there is no "
    "such option; write optimizer.weight_decay",
    STAGE.format("distributed: {fsdp: {size: 2}}"): "FILE:3: training_stages.a.distributed.fsdp.size = 2: there is no "
    "such option; write distributed.devices",
    STAGE.format("torchacc: {backend: xla}"): "FILE:3: training_stages.a.torchacc.backend = 'xla': in a training file "
    "this is distributed.engine",
    STAGE.format("torchacc: {dist: {fsdp: {cpu_offload: true}}}"): "FILE:3: training_stages.a.torchacc.dist.fsdp."
    "cpu_offload = True: in a training file this is distributed.fsdp.cpu_offload",
    "training_stages: {a: 3}": "FILE:1: training_stages.a = 3: expected options by name",
    "training_stages: {a/b: }": "FILE:1: training_stages.a/b: a stage's name is that of its folder",
    "training_stages: {'': }": "FILE:1: training_stages.: a stage's name is that of its folder",
    'training_stages: {"a\\0": }': "FILE:1: training_stages: 'a\\x00' holds a character that no text has, in column 19",
    'training_stages: {"a\\e": }': "FILE:1: training_stages.a\\x1b: the name of an option can be printed, and 'a\\x1b' "
    "cannot, in column 19",
    f"training_stages: {{{'a' * 101}: }}": "aaa: a folder's name has 100 bytes at most",
    "training_stages: {a: }\nmodel_config_x: {model_type: gpt2, n_layer: 1000000000}": "FILE:2: "
    "model_config_x.n_layer = 1000000000: a model has 10,000 layers at most",
    "training_stages:\n  a: {init_from: a}": "FILE:2: training_stages.a.init_from = 'a': a stage cannot "
    "start from itself",
    "training_stages:\n  d: {init_from: a}\n  a: {init_from: c}\n  b: {init_from: a}\n  c: {init_from: b}": "FILE:3: "
    "training_stages.a.init_from = 'c': a from c from b from a: none of them could be trained first",
    "training_stagse: {a: }": "FILE:1: training_stagse = {'a': None}: there is no such option; did you mean "
    "'training_stages'?",
    STAGE.format(
        "data: {cache_dir: ''}"
    ): "FILE:3: training_stages.a.data.cache_dir = '': expected a string that is not empty",
    "output_dir: ''": "FILE:1: output_dir = '': expected a string that is not empty",
    "training_stages: ": "FILE:1: training_stages: there is none",
    "output_dir: x": "FILE: training_stages: there is none",
    "training_stages: {a: }\ndistributed_examples:\n  one:\n    fsdp: {forward_prefetch: 1}": "FILE:4: "
    "distributed_examples.one.fsdp.forward_prefetch = 1: expected True or False",
    "training_stages: {a: }\nwandb: {projekt: x}": "FILE:2: wandb.projekt = 'x': there is no such option; did you mean "
    "'project'?",
    "training_stages: {a: }\nmodel_config_x: {model_type: gtp2}": "FILE:2: model_config_x.model_type: model_type = "
    "'gtp2' is not a family of models in transformers; did you mean 'gpt2'?",
    "training_stages: {a: }\nmodel_config_x: {model_type: gpt2, n_layers: 3}": "FILE:2: model_config_x.n_layers = 3: "
    "gpt2 has no such option; did you mean 'n_layer'?",
    "training_stages: {a: }\nmodel_config_x: {model_type: gpt2, n_layer: two}": "FILE:2: model_config_x: transformers "
    "refuses it: ",
    "training_stages: {a: }\nmodel_config_x: {n_layer: 3}": "FILE:2: model_config_x: model_type is missing; write "
    "the family, such as model_type: gpt2",
    "training_stages: {a: }\nmodel_config_x: {model_type: [gpt2]}": "FILE:2: model_config_x.model_type: model_type = "
    "['gpt2'] is not a family of models in transformers; did you mean 'gpt2'?",
    "training_stages: {a: }\nmodel_config_x: {model_type: t5}": "FILE:2: model_config_x.model_type: model_type = 't5' "
    "is not a family of causal language models in transformers",
    "training_stages: {a: }\nmodel_config_x: {model_type: vit}": "FILE:2: model_config_x.model_type: model_type = "
    "'vit' is not a family of causal language models in transformers",
    "training_stages: {a: }\nmodel_config_x: {model_type: gpt2,\n  n_layer: 0}": "FILE:3: model_config_x.n_layer = 0: "
    "a model has at least one layer",
    "training_stages: {a: }\nmodel_config_x: {model_type: llama,\n  num_hidden_layers: -1}": "FILE:3: model_config_x."
    "num_hidden_layers = -1: a model has at least one layer",
    "training_stages: {a: }\nmodel_config_x: {pretrained: gpt2, n_layer: 3}": "FILE:2: model_config_x.n_layer beside "
    "model_config_x.pretrained = 'gpt2': what that names says all of the model, so leave n_layer out",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items(), ids=lambda text: text[:60])
def test_what_is_wrong_is_told_with_file_and_line(text, message, tmp_path):
    assert message in refusal(tmp_path, text)


@pytest.mark.parametrize("section", [TrainingConfig, DistributedConfig, StageFSDPConfig])
def test_where_else_an_option_is_said_to_be_it_is(section):
    adamw = torch.optim.AdamW([torch.zeros(1)]).defaults
    stage = vars(StageConfig()) | {"torchacc": Config(), "optimizer": SimpleNamespace(name="adamw", **adamw)}
    for path in section.elsewhere.values():
        operator.attrgetter(path.partition(",")[0])(SimpleNamespace(output_dir="runs", **stage))


def test_everything_wrong_in_a_section_is_told_at_once(tmp_path):
    text = "training_stages:\n  a:\n    training:\n      batch_size: 0\n      max_step: 3\n"
    lines = refusal(tmp_path, text).splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        "FILE:4: training_stages.a.training.batch_size",
        "FILE:5: training_stages.a.training.max_step",
    ]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'none.yaml'}: there is no such file")):
        TrainFile.read(tmp_path / "none.yaml")
