"""Which linear layers compute in float8, and what is said of the others."""

import pytest
import torch
import transformers
from torch import nn

from torchacc.config import Config, resolve
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.parallel.float8_layers import select_float8
from torchacc.parallel.mesh import from_config
from torchacc.parallel.plan import make_plan


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)


class Model(nn.Module):
    def __init__(self, width=32, inner=64, vocab=96):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(2))
        self.output = nn.Linear(width, vocab, bias=False)


def select(model, sections=None, **compute):
    compute = {"bf16": True, "fp8": True, **{f"fp8_{name}": value for name, value in compute.items()}}
    config = Config.from_dict({"compute": compute, **(sections or {})})
    return select_float8(model, resolve(config, Job(), num_devices=1))


def on_meta(make, *args):
    with torch.device("meta"):
        return make(*args)


def test_nothing_is_chosen_where_it_is_not_asked_for():
    config = resolve(Config(), Job(), num_devices=1)
    assert make_plan(nn.Linear(8, 8), config, from_config(config)).float8 is None


def test_layers_but_the_head_are_chosen_and_printed():
    chosen = select(Model(), min_features=16)
    assert chosen.names == ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")
    assert chosen.weights == {f"{name}.weight" for name in chosen.names}
    assert str(chosen) == (
        "  4 linear layers in float8 (tensorwise, gathered in float8): layers.*.up, layers.*.down\n"
        "  not in float8, as it makes the logits: output"
    )


@pytest.mark.parametrize(
    ("width", "inner", "recipe", "expected"),
    [
        (2048, 8192, "tensorwise", ["up", "down"]),
        (2048, 1024, "tensorwise", ["down"]),
        (2048, 4096, "rowwise", []),
        (4096, 14336, "rowwise", ["up", "down"]),
        (2048, 8192, "rowwise", ["up"]),
    ],
)
def test_sizes_are_those_that_gain(width, inner, recipe, expected):
    model = on_meta(Block, width, inner)
    if not expected:
        with pytest.raises(ConfigError, match=r"as it is too small to gain by it: up, down\).*fp8_min_features = 16"):
            select(model, recipe=recipe)
        return
    assert list(select(model, recipe=recipe).names) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"layers": "layers.*.up"}, {"layers.0.up", "layers.1.up"}),
        ({"layers": ["layers.0", "output"]}, {"layers.0.up", "layers.0.down", "output"}),
        ({"layers": "layers.*", "skip": "layers.1"}, {"layers.0.up", "layers.0.down"}),
        ({"skip": "layers.*.down", "min_features": 16}, {"layers.0.up", "layers.1.up"}),
    ],
)
def test_layers_are_chosen_by_name(options, expected):
    assert set(select(Model(), **options).names) == expected


def test_a_pattern_that_names_only_what_cannot_is_refused():
    with pytest.raises(
        ConfigError, match=r"pattern 'layers\.\*', and 'layers\.0\.up' cannot compute in float8: as it has"
    ):
        select(Model(width=64, inner=48), layers=["layers.*", "output"], min_features=64)
    model = Model()
    model.output.weight = model.embed.weight
    with pytest.raises(ConfigError, match=r"'output' cannot compute in float8: as its weight is tied to embed\.weight"):
        select(model, layers="output")


@pytest.mark.parametrize("option", ["layers", "skip"])
def test_a_pattern_that_names_nothing_is_refused(option):
    with pytest.raises(ConfigError, match=rf"fp8_{option} has the pattern 'layer\.\*\.up', in which no linear layer"):
        select(Model(), **{option: ["layer.*.up"]})


def test_what_cannot_is_named_with_the_reason():
    model = Model()
    model.output.weight = model.embed.weight
    model.layers[0].up = nn.Linear(32, 24)
    model.layers[0].down.forward = lambda x: x
    model.attention = nn.MultiheadAttention(32, 2)
    chosen = select(model, min_features=16)
    assert chosen.names == ("layers.1.up", "layers.1.down")
    assert chosen.others == {
        "layers.0.up": "as its inputs or outputs are not a multiple of 16",
        "layers.0.down": "as its weight is computed, or its forward replaced",
        "output": "as its weight is tied to embed.weight",
        "attention.out_proj": "as a NonDynamicallyQuantizableLinear is not an nn.Linear",
    }


def test_layers_of_gpt2_are_none_of_torchaos():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96))
    with pytest.raises(
        ConfigError, match=r"no linear layer of GPT2LMHeadModel would.*as a Conv1D is not an nn\.Linear"
    ):
        select(model, min_features=16)


def test_weights_on_the_host_are_gathered_as_they_are():
    chosen = select(Model(), {"dist": {"fsdp": {"cpu_offload": True}}}, min_features=16, emulate=True)
    assert not chosen.are_gathered
    assert "(tensorwise, emulated)" in str(chosen)
    assert not select(Model(), min_features=16, recipe="rowwise").are_gathered


def test_the_head_of_a_chunked_loss_stays():
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**shape, vocab_size=96, tie_word_embeddings=False)
    model = on_meta(transformers.LlamaForCausalLM, config)
    config = {"compute": {"bf16": True, "fp8": True, "fp8_min_features": 16, "chunked_loss": True}}
    chosen = select_float8(model, resolve(Config.from_dict(config), Job(), num_devices=1))
    assert chosen.others == {"lm_head": "as compute.chunked_loss computes with its weight"}
