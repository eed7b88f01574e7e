"""Models whose samples the native engine does not split; that those it splits are right is in the contract."""

import pytest

from torchacc.config import Config
from torchacc.engines.native.split_sequence import check
from torchacc.errors import ConfigError
from torchacc.parallel.mesh import Mesh

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_rotations_that_depend_on_the_length_are_refused_for_any_kind_of_layer():
    rotations = {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = transformers.Gemma3TextConfig(**SIZES, num_key_value_heads=4, head_dim=8, rope_parameters=rotations)
    with pytest.raises(ConfigError, match=r"rotary embeddings \('dynamic'\) depend on the number of tokens"):
        check(Config(dist={"sp": {"size": 2}}), Mesh((("fsdp", 1), ("sp", 2))), transformers.Gemma3ForCausalLM(config))
