import re

import pytest
import torch
from torch import nn

from torchacc.errors import ConfigError
from torchacc.parallel.layer_scan import select_scanned


class Layer(nn.Module):
    def __init__(self, index, width=4, rate=0.5):
        super().__init__()
        self.layer_idx = index
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        return self.drop(self.linear(x))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def units_of(model):
    return [f"layers.{index}" for index in range(len(model.layers))]


def refusal(model, units=None, recomputed=()):
    with pytest.raises(ConfigError) as raised:
        select_scanned(model, units_of(model) if units is None else units, recomputed=recomputed)
    return str(raised.value)


def test_layers_that_differ_in_values_and_in_their_number_are_scanned():
    model = Model([Layer(index) for index in range(3)])
    assert select_scanned(model, units_of(model), recomputed=()) == ("layers",)


def change_rate(model):
    model.layers[2].drop.p = 0.1


def freeze(model):
    model.layers[1].linear.bias.requires_grad_(False)


def add_buffer(model):
    for index, layer in enumerate(model.layers):
        layer.register_buffer("scale", torch.tensor(float(index)), persistent=False)


def add_saved_buffer(model):
    for layer in model.layers:
        layer.register_buffer("scale", torch.ones(1))


def share(model):
    model.layers[1].linear.weight = model.layers[0].linear.weight


def widen(model):
    model.layers[2] = Layer(2, width=5)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (change_rate, "layer 2 differs from the first in 'drop'"),
        (freeze, "layer 1 differs from the first in 'linear'"),
        (widen, "layer 2 differs from the first in 'linear'"),
        (add_buffer, "layer 1 has a buffer of other values in 'itself'"),
        (add_saved_buffer, "they have buffers that a checkpoint holds"),
        (share, "they share a parameter"),
    ],
)
def test_layers_that_differ_are_refused(change, why):
    model = Model([Layer(index) for index in range(3)])
    change(model)
    assert re.search(f"the layers of 'layers' .* and {re.escape(why)}", refusal(model))


def test_a_smaller_unit_inside_is_refused():
    model = Model([Layer(0), Layer(1)])
    assert "'layers.0.linear'" in refusal(model, [*units_of(model), "layers.0.linear"])


@pytest.mark.parametrize("units", [[], ["layers.0"], ["head"]])
def test_a_model_without_a_list_of_units_is_refused(units):
    assert "wrap_layer_cls" in refusal(Model([Layer(0), Layer(1)]), units)


def test_recompute_beside_it_is_refused():
    model = Model([Layer(0), Layer(1)])
    assert "memory.gc" in refusal(model, recomputed=("layers.0",))
