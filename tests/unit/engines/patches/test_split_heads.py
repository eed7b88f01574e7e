"""Products that keep batch and heads apart are PyTorch's own, on the CPU too."""

import pytest
import torch
from torch.nn import functional as F

from torchacc.engines.patches.split_heads import HeadsStayApart

HIDDEN = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
"""What the second of three rows does not see."""
NOTHING = torch.tensor([[True] * 4, [False] * 4, [True] * 4])
"""A mask of which the second row sees nothing."""
BIAS = torch.randn(1, 4, 3, 4, generator=torch.Generator().manual_seed(1))
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.5},
    "of-booleans": {"attn_mask": ~HIDDEN},
    "of-a-row-that-sees-nothing": {"attn_mask": NOTHING},
    "of-numbers": {"attn_mask": BIAS},
    "of-numbers-and-infinities": {"attn_mask": BIAS.masked_fill(HIDDEN, float("-inf"))},
    "of-infinities-in-a-row": {"attn_mask": BIAS.masked_fill(~NOTHING, float("-inf"))},
}


def operands(num_key_heads=4):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 3, 5), (2, num_key_heads, 4, 5), (2, num_key_heads, 4, 5)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def result_and_gradients(function, tensors):
    result = function(*tensors)
    return [result, *torch.autograd.grad(result.square().sum(), tensors)]


def check(function, tensors):
    expected = result_and_gradients(function, tensors)
    with HeadsStayApart():
        found = result_and_gradients(function, tensors)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_attention(options):
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), operands())


def test_attention_with_fewer_key_heads():
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), operands(num_key_heads=2))


def test_a_bias_that_is_trained():
    def attention(q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    check(attention, [*operands(), BIAS.clone().requires_grad_()])


def test_dropout_keeps_what_it_says():
    ones = torch.ones(1, 1, 64, 64)
    with HeadsStayApart():
        found = F.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.25)
    assert found.unique().numel() > 1
    assert found.mean().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("product", [torch.matmul, torch.Tensor.matmul, lambda a, b: a @ b], ids=["torch", "own", "@"])
@pytest.mark.parametrize("shapes", [((2, 4, 3, 5), (2, 4, 5, 6)), ((2, 4, 3, 5), (2, 1, 5, 6)), ((2, 4, 3, 5), (5, 6))])
def test_products(product, shapes):
    generator = torch.Generator().manual_seed(0)
    check(product, [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes])
