"""Attention in blocks of queries: values and gradients of PyTorch's, at any length and with any mask."""

import pytest
import torch
from torch.nn import functional as F

from torchacc.engines.patches import blockwise_attention
from torchacc.errors import EngineError

SIZE = 8
LENGTHS = [(50, 50), (16, 16), (1, 1), (5, 40), (40, 5), (33, 70)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockwise_attention, "BLOCK", 16)


def not_to_be_called(*args, **kwargs):
    raise AssertionError("PyTorch's attention was called")


attention = blockwise_attention.replace(not_to_be_called)


def computed(function, tensors, options):
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    output = function(*inputs, **options)
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    return [output.detach(), *torch.autograd.grad(output, inputs, weights.to(output.dtype))]


def check(tensors, *, bound=1e-5, **options):
    for found, expected in zip(
        computed(attention, tensors, options),
        computed(F.scaled_dot_product_attention, tensors, options),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def projections(length, others, *, heads=4, kv_heads=4):
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, heads, length, SIZE), (2, kv_heads, others, SIZE), (2, kv_heads, others, SIZE - 2)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def hidden_at_random(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3


def negative(mask, number):
    return torch.zeros(mask.shape).masked_fill(~mask, number)


MASKS = {
    "padding": lambda length, others: hidden_at_random(2, 1, 1, others),
    "of_each_sample": lambda length, others: hidden_at_random(2, 1, length, others),
    "of_each_head": lambda length, others: hidden_at_random(2, 4, length, others),
    "for_all": hidden_at_random,
    "some_see_none": lambda length, others: (
        hidden_at_random(2, 1, length, others) & (torch.arange(length) > 2)[:, None]
    ),
    "infinite": lambda length, others: negative(hidden_at_random(2, 1, length, others), float("-inf")),
    "lowest": lambda length, others: negative(hidden_at_random(2, 1, length, 1), torch.finfo().min).expand(
        -1, -1, -1, others
    ),
    "a_bias": lambda length, others: torch.randn(1, 4, length, others),
}


@pytest.mark.parametrize(("length", "others"), LENGTHS)
def test_without_a_mask(length, others):
    for options in ({}, {"is_causal": True}, {"scale": 0.3}):
        check(projections(length, others), **options)


@pytest.mark.parametrize(("length", "others"), LENGTHS)
@pytest.mark.parametrize("mask", MASKS)
def test_with_a_mask(length, others, mask):
    check(projections(length, others), attn_mask=MASKS[mask](length, others))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": hidden_at_random(2, 4, 50, 50)}])
def test_heads_that_share_keys(options):
    check(projections(50, 50, kv_heads=2), enable_gqa=True, **options)


def test_in_bfloat16():
    check([each.bfloat16() for each in projections(50, 50)], is_causal=True, bound=2e-2)


def test_no_value_has_an_element_for_each_pair_of_tokens():
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            sizes.extend(each.numel() for each in (found,) if isinstance(each, torch.Tensor))
            return found

    with Sizes():
        computed(attention, projections(128, 128), {"is_causal": True})
    assert 0 < max(sizes) <= 2 * 4 * 16 * 128 < 2 * 4 * 128 * 128


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        (projections(5, 5), {"attn_mask": torch.zeros(5, 5, requires_grad=True)}),
        ([each[0] for each in projections(5, 5)], {}),
        (projections(5, 5), {"attn_mask": torch.ones(5, 5, dtype=torch.bool), "is_causal": True}),
    ],
)
def test_what_it_does_not_take_is_left_to_pytorch(tensors, options):
    with pytest.raises(AssertionError, match="was called"):
        attention(*tensors, **options)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(16, 16, dtype=torch.long), torch.ones(17, 17).tril() > 0, torch.ones(2, 2, 16, 16) > 0],
    ids=["integers", "longer", "of_each_key_head"],
)
def test_what_pytorch_refuses_is_left_to_pytorch(mask):
    inputs = projections(16, 16, kv_heads=2)
    with pytest.raises(AssertionError, match="PyTorch's attention was called"):
        attention(*inputs, attn_mask=mask, enable_gqa=True)


def test_second_derivatives_are_refused():
    query, key, value = (each.requires_grad_() for each in projections(16, 16))
    loss = attention(query, key, value).sum()
    with pytest.raises(EngineError, match="create_graph=True"):
        torch.autograd.grad(loss, query, create_graph=True)


def test_attention_with_dropout_is_left_to_pytorch_if_asked_for():
    calls = []
    attention = blockwise_attention.replace(lambda *args, **_: calls.append(args[4]) or args[0], takes_dropout=False)
    query = torch.rand(1, 2, 4, 8)
    attention(query, query, query, dropout_p=0.1)
    attention(query, query, query, is_causal=True)
    assert calls == [0.1]
