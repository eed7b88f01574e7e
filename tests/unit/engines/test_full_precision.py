"""Which outputs of a model come back in float32."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from torchacc.engines.full_precision import returns_float32

LOW, LOSS = torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(1.0, dtype=torch.bfloat16)
Pair = namedtuple("Pair", ["features", "scale"])


def dtypes(output, lowered=torch.bfloat16):
    found = returns_float32(lambda: output, lowered)()
    assert type(found) is type(output)
    leaves = torch.utils._pytree.tree_leaves(dict(found) if isinstance(found, dict) else found)
    return [str(leaf.dtype).removeprefix("torch.") for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize(
    "output",
    [
        LOW,
        LOSS,
        (LOW, LOSS),
        [LOW],
        {"logits": LOW},
        {"loss": None, "logits": LOW},
        Pair(LOW, LOSS),
        ([LOW], {"x": LOW}),
    ],
)
def test_outputs_without_a_loss_are_float32(output):
    assert set(dtypes(output)) == {"float32"}


def test_beside_a_loss_the_rest_stays_as_it_is():
    assert dtypes((LOSS, LOW)) == ["float32", "bfloat16"]
    assert dtypes({"logits": LOW, "loss": LOSS}) == ["bfloat16", "float32"]
    assert dtypes(CausalLMOutput(loss=LOSS, logits=LOW)) == ["float32", "bfloat16"]
    assert dtypes(CausalLMOutput(logits=LOW)) == ["float32"]


def test_other_dtypes_and_other_things_pass_through():
    other = {"x": LOW.half(), "n": torch.ones(2, dtype=torch.int8), "text": "a", "cache": SimpleNamespace(keys=LOW)}
    assert dtypes(other) == ["float16", "int8"]
    assert returns_float32(lambda: other, torch.bfloat16)()["cache"] is other["cache"]
    assert returns_float32(lambda: None, torch.bfloat16)() is None
