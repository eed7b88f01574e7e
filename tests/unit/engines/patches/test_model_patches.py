"""What a family of models needs to have changed before it runs on XLA."""

import copy

import pytest
import torch
from torch import nn

from torchacc.engines.patches import model_patches

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.pytorch_utils")


def test_experts_of_a_model_within_another_get_static_shapes():
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    inner = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    model_patches.prepare(nn.ModuleDict({"language": inner}), partitioned=False)
    assert inner.config._experts_implementation == "batched_mm"
    assert inner.model.layers[0].mlp.experts.config._experts_implementation == "batched_mm"


def test_the_linear_layer_of_gpt2_has_the_same_numbers_with_samples_and_tokens_apart():
    plain = transformers.pytorch_utils.Conv1D(6, 4)
    nn.init.normal_(plain.bias)
    prepared = copy.deepcopy(plain)
    model_patches.prepare(nn.Sequential(prepared), partitioned=True)
    assert "forward" in vars(prepared)
    for shape in ((2, 3, 4), (3, 4), (2, 2, 3, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(prepared(x), plain(x))
    prepared(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(prepared.weight.grad, plain.weight.grad)
    torch.testing.assert_close(prepared.bias.grad, plain.bias.grad)
