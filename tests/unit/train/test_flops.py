import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, MixtralForCausalLM

from torchacc.config import Config
from torchacc.engines import registry
from torchacc.engines.sharded_model import HANDLE
from torchacc.env import Job
from torchacc.parallel.plan import make_plan
from torchacc.train.flops import flops_per_token, peak_flops

TINY = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
LLAMA = TINY | {"intermediate_size": 32}


def sharded(config):
    """Return a model that knows its plan, as one that accelerate() returned, without starting an engine."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config) if not isinstance(config, nn.Module) else config
    engine = registry.make_engine(Config(backend="native"), Job())
    engine_model = type("Planned", (), {"plan": make_plan(model, engine.config, engine.mesh)})()
    vars(model)[HANDLE] = engine_model
    return model


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1307e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("CPU", None),
    ],
)
def test_the_peak_is_that_of_this_very_device_or_unknown(name, peak):
    assert peak_flops(name) == peak


def test_each_parameter_that_is_multiplied_counts_once():
    block = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16  # attention, the gated layer, two norms
    attention = 12 * 3 * 16 * 64
    untied = sharded(LlamaConfig(**LLAMA, tie_word_embeddings=False))
    assert flops_per_token(untied, 64) == 6 * (3 * block + 16 + 100 * 16) + attention
    tied = sharded(LlamaConfig(**LLAMA, tie_word_embeddings=True))
    assert flops_per_token(tied, 64) == flops_per_token(untied, 64)


def test_positions_that_are_looked_up_do_not_count():
    short, long = (sharded(GPT2Config(**TINY, n_positions=length)) for length in (64, 128))
    assert flops_per_token(short, 64) == flops_per_token(long, 64)


def test_what_the_formula_does_not_describe_has_none():
    assert flops_per_token(sharded(nn.Linear(4, 4)), 8) is None
    others = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 0}
    assert flops_per_token(sharded(MixtralConfig(**LLAMA, **others)), 8) is None


def test_experts_that_are_modules_of_their_own_have_none():
    class ApartExperts(nn.ModuleList):
        num_experts = 4

    model = MixtralForCausalLM(MixtralConfig(**LLAMA, num_key_value_heads=2, num_local_experts=4))
    for layer in model.model.layers:
        layer.mlp.experts = ApartExperts(nn.Linear(16, 16) for _ in range(4))
    assert flops_per_token(sharded(model), 8) is None


def test_of_experts_those_count_that_a_token_is_sent_to():
    def counted(num_experts):
        config = MixtralConfig(**LLAMA, num_key_value_heads=2, num_local_experts=num_experts, num_experts_per_tok=2)
        return flops_per_token(sharded(config), 8)

    routers = 6 * 3 * 16  # for each expert
    assert counted(8) - counted(4) == 4 * routers
