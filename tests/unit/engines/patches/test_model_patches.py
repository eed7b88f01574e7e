"""What a family of models needs to have changed before it runs on XLA."""

import pytest
from torch import nn

from torchacc.engines.patches import model_patches

transformers = pytest.importorskip("transformers")


def test_experts_of_a_model_within_another_get_static_shapes():
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    inner = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    model_patches.prepare(nn.ModuleDict({"language": inner}), partitioned=False)
    assert inner.config._experts_implementation == "batched_mm"
    assert inner.model.layers[0].mlp.experts.config._experts_implementation == "batched_mm"
