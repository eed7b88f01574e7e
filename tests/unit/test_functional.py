"""What `fsdp()` makes of its arguments, without starting anything."""

import pytest
import torch
from torch import nn

import torchacc
from tests import forkrun
from torchacc import functional


@pytest.fixture
def asked(monkeypatch):
    """The config that accelerate() is called with."""
    found = []
    monkeypatch.setattr(functional, "accelerate", lambda model, config: (found.append(config), model)[1])
    return found


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


def make_model():
    return nn.Sequential(nn.Linear(4, 4), Layer(), Layer())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mp": "bf61"}, r"mp='bf61'.*'bf16', 'fp16', 'fp32'"),
        ({"mp": torch.bfloat16}, r"mp=torch.bfloat16.*'bf16'"),
        ({"shard_strat": "FULL"}, r"shard_strat='FULL'.*'SHARD_GRAD', 'SHARD_GRAD_OP', 'FULL_SHARD', 'NO_SHARD'"),
        ({"shard_strat": {}}, r"shard_strat=\{\}.*'FULL_SHARD'"),
        ({"mp": ["bf16"]}, r"mp=\['bf16'\].*'bf16', 'fp16', 'fp32'"),
        ({"auto_wrap": "yes"}, r"auto_wrap='yes'.*True or False"),
        ({"auto_wrap": True, "TransformerBlock": "Linear"}, r"TransformerBlock='Linear': expected a class"),
        ({"auto_wrap": True, "TransformerBlock": [nn.Linear]}, r"TransformerBlock=\[.*expected a class"),
        ({"auto_wrap": True, "TransformerBlock": {nn.Linear}}, r"TransformerBlock=\{.*expected a class"),
        ({"auto_wrap": True, "TransformerBlock": nn.Linear(2, 2)}, r"TransformerBlock=Linear\(.*expected a class"),
        ({"TransformerBlock": dict}, r"TransformerBlock=<class 'dict'>: expected a class, such as nn"),
    ],
)
def test_wrong_values_name_parameter_and_choices(asked, arguments, message):
    with pytest.raises(ValueError, match=message):
        torchacc.fsdp(make_model(), **arguments)
    assert not asked


@pytest.mark.parametrize("model", [None, "x", nn.Linear])
def test_what_is_no_model(asked, model):
    with pytest.raises(ValueError, match=r"model=.*expected a model"):
        torchacc.fsdp(model)
    assert not asked


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("SHARD_GRAD", "SHARD_GRAD_OP"), ("SHARD_GRAD_OP", "SHARD_GRAD_OP"), ("FULL_SHARD", "FULL_SHARD")],
)
def test_strategies(asked, monkeypatch, name, strategy):
    for variable, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(variable, str(value))
    torchacc.fsdp(make_model(), shard_strat=name)
    assert (asked[0].dist.fsdp.sharding_strategy, asked[0].dist.fsdp.size) == (strategy, 4)


def test_layers_are_passed_or_inferred(asked):
    torchacc.fsdp(make_model(), auto_wrap=True, TransformerBlock=Layer)
    torchacc.fsdp(make_model(), auto_wrap=True)
    torchacc.fsdp(make_model(), TransformerBlock=Layer)
    assert [config.dist.fsdp.wrap_layer_cls for config in asked] == [{"Layer"}, {"Layer"}, None]


def test_layers_that_cannot_be_inferred(asked):
    with pytest.raises(ValueError, match="auto_wrap=True.*pass their class as TransformerBlock"):
        torchacc.fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), auto_wrap=True)


def test_a_class_that_is_not_there(asked):
    with pytest.raises(ValueError, match=r"^TransformerBlock=MultiheadAttention: .*classes there: .*Layer"):
        torchacc.fsdp(make_model(), auto_wrap=True, TransformerBlock=nn.MultiheadAttention)
    with pytest.raises(ValueError, match=r"^TransformerBlock=Layer: .*classes there: Linear"):
        torchacc.fsdp(Layer(), auto_wrap=True, TransformerBlock=Layer)
    assert not asked


def test_float16_trains_in_one_process_with_a_scaler():
    program = """
import torch, torchacc
torch.manual_seed(0)
model = torchacc.fsdp(torch.nn.Linear(4, 2), mp="fp16", shard_strat="FULL_SHARD")
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torchacc.GradScaler(model)
before = torchacc.full_state_dict(model)["weight"].clone()
output = model(torch.ones(2, 4))
scaler.scale(output.float().pow(2).mean()).backward()
scaler.step(optimizer)
scaler.update()
after = torchacc.full_state_dict(model)["weight"]
print(output.dtype, after.dtype, not torch.equal(before, after))
"""
    done = forkrun.run("-c", program)
    assert done.stdout.split() == ["torch.float32", "torch.float32", "True"], done.stderr[-3000:]
