"""Attention by JAX's kernel for TPUs: numbers by its interpreter, and what is left to blocks of queries.

What needs JAX is skipped without it.
"""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests import forkrun
from torchacc.engines.patches import blockwise_attention, splash_attention
from torchacc.engines.patches.versions import is_for_installed
from torchacc.errors import ConfigError

needs_jax = pytest.mark.skipif(
    not is_for_installed("splash_attention"), reason="no such version of JAX: pip install 'torchacc[plan-tpu]'"
)


@pytest.mark.xla
@pytest.mark.slow
@needs_jax
def test_a_sharded_model_is_the_unsharded_one_by_the_interpreted_kernel():
    done = forkrun.run(Path(__file__).with_name("splash_attention_program.py"), imports=["torch_xla"], timeout=500)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    again = ["forward", "backward"]  # each layer is recomputed
    in_turn, in_a_loop = (["forward"] * 2 + again * 2) * 2, (["forward"] + again) * 2
    calls = {name: found["calls"] for name, found in cases.items()}
    assert calls == {"plain": in_turn, "packed": in_turn, "packed, in a loop": in_a_loop}
    for found in cases.values():
        assert torch.tensor(found["ours"]).allclose(torch.tensor(found["plain"]), rtol=1e-5)
        assert found["difference"] < 1e-6
    first, second, _ = ([loss for loss, _ in found["plain"]] for found in cases.values())
    assert first != pytest.approx(second, rel=1e-4)  # documents in a row are other than one


@pytest.mark.skipif(is_for_installed("splash_attention"), reason="JAX is installed")
def test_without_jax_the_message_names_another_kernel():
    with pytest.raises(ConfigError, match=r"pip install 'torchacc\[plan-tpu\]'.*blockwise"):
        splash_attention.check_installed()


def not_to_be_called(*args, **kwargs):
    raise AssertionError("it was called")


@pytest.mark.parametrize(
    ("length", "dtype", "options"),
    [
        (100, torch.float32, {}),
        (128, torch.float32, {"attn_mask": torch.ones(128, 128, dtype=torch.bool).tril()}),
        (128, torch.float64, {}),
    ],
    ids=["length", "mask", "dtype"],
)
def test_what_the_kernel_does_not_take_is_computed_in_blocks(length, dtype, options):
    in_blocks = blockwise_attention.replace(not_to_be_called)
    attention = splash_attention.replace(not_to_be_called, in_blocks, not_to_be_called)
    query, key, value = torch.randn(3, 2, 2, length, 8, dtype=dtype)
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(attention(query, key, value, **options), expected, rtol=1e-5, atol=1e-5)
