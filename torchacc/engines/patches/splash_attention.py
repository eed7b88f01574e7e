"""`scaled_dot_product_attention()` by the kernel that JAX has for TPUs, as a part of torch_xla's program.

The kernel, splash attention, keeps no scores, skips the blocks that a causal mask hides, reads heads of keys that
several heads of queries share once, and keeps documents apart by the number of each token's. JAX makes an XLA program
of it where no TPU is, too, and touches no device.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchacc.engines.patches.blockwise_attention import have_known_shapes, refuse_second_gradients
from torchacc.engines.patches.transformers_masks import documents_of
from torchacc.engines.patches.versions import PATCHES, is_for_installed
from torchacc.env import installed_version
from torchacc.errors import ConfigError

ByHeads = Callable[[Callable[..., Sequence[torch.Tensor]], Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Runs a function of tensors of shape (samples, heads, …) on each device's part of them."""
LANES = 128
"""Of a TPU's registers: what the kernel takes a multiple of."""
_BLOCKS = (512, 256, LANES)
"""Tokens of a block, the best first."""

_UNUSED_PLUGIN = "Jax plugin configuration error"
"""How JAX begins what it logs of a plugin that it cannot use."""

interpreted = False
"""Whether the kernel's operations run one by one, on any device and slowly, as tests want it."""


@dataclass(frozen=True)
class _Shapes:
    """What a program of the kernel is made for."""

    samples: int
    heads: int
    key_heads: int
    length: int
    size: int
    dtype: torch.dtype
    is_causal: bool
    has_documents: bool


def check_installed() -> None:
    """Check that the kernel's library is there, without importing it.

    Raises:
        ConfigError: It is not, or in another version.
    """
    if not is_for_installed("splash_attention"):
        found = installed_version("jax")
        raise ConfigError(
            f"compute.attention = 'flash' takes the kernel of jax{PATCHES['splash_attention'].versions}, and "
            f"{'it is not installed' if found is None else f'jax {found} is installed'}: `pip install "
            "'torchacc[plan-tpu]'`, or set config.compute.attention = 'blockwise', which needs none"
        )


def replace(
    original: Callable[..., torch.Tensor], otherwise: Callable[..., torch.Tensor], by_heads: ByHeads
) -> Callable[..., torch.Tensor]:
    """Return a function in place of PyTorch's, which computes by the kernel what that can.

    Args:
        original: PyTorch's function.
        otherwise: Computes the rest: masks of other than documents, dropout, lengths that are not a multiple of 128.
        by_heads: Runs the kernel on each device's samples and heads.
    """

    @functools.wraps(original)
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        documents = None if is_causal else documents_of(attn_mask)
        is_known = attn_mask is None or documents is not None
        fits = is_known and not dropout_p and have_known_shapes(query, key, value, enable_gqa)
        if not fits or not _takes(query, key, value):
            others = {"scale": scale, "enable_gqa": enable_gqa}
            return otherwise(query, key, value, attn_mask, dropout_p, is_causal, **others)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        is_causal = is_causal or documents is not None
        output: torch.Tensor = _SplashAttention.apply(query * scale, key, value, documents, is_causal, by_heads)
        return output

    return attention


def _takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernel takes tensors whose shapes go together."""
    is_known = query.dtype in (torch.bfloat16, torch.float32) and query.dtype == key.dtype == value.dtype
    return is_known and query.shape[2] == key.shape[2] and query.shape[2] % LANES == 0 and key.shape == value.shape


class _SplashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: torch.Tensor | None,
        is_causal: bool,
        by_heads: ByHeads,
    ) -> torch.Tensor:
        # Of each head, as all that is split over devices has samples and heads.
        numbers = [] if documents is None else [documents.int()[:, None].expand(-1, key.shape[1], -1)]
        run = functools.partial(_run, "forward", is_causal)
        output, sums = by_heads(run, [query, key, value, *numbers])
        ctx.save_for_backward(query, key, value, *numbers, output, sums)
        ctx.is_causal, ctx.by_heads = is_causal, by_heads
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        refuse_second_gradients("flash")
        query, *others = ctx.saved_tensors
        run = functools.partial(_run, "backward", ctx.is_causal)
        return *ctx.by_heads(run, [query, *others, gradient.to(query.dtype)]), None, None, None


def _run(direction: str, is_causal: bool, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Record the kernel as one operation of the program, for tensors as they are on one device."""
    from torch_xla import _XLAC

    (samples, heads, length, size), key_heads = tensors[0].shape, tensors[1].shape[1]
    has_documents = any(tensor.dtype == torch.int32 for tensor in tensors)
    shapes = _Shapes(samples, heads, key_heads, length, size, tensors[0].dtype, is_causal, has_documents)
    computation = _computation(direction, shapes, interpreted)
    computed: Sequence[torch.Tensor] = _XLAC._xla_user_computation("xla::splash_attention", list(tensors), computation)
    return computed


@functools.lru_cache(maxsize=64)
def _computation(direction: str, shapes: _Shapes, interpreted: bool) -> Any:
    """Return the program of one direction as torch_xla takes it."""
    import torch_xla.core.xla_builder as xb

    jax = _import_jax()
    jnp = jax.numpy
    dtype = {torch.bfloat16: jnp.bfloat16, torch.float32: jnp.float32}[shapes.dtype]
    queries = jax.ShapeDtypeStruct((shapes.samples, shapes.heads, shapes.length, shapes.size), dtype)
    keys = jax.ShapeDtypeStruct((shapes.samples, shapes.key_heads, shapes.length, shapes.size), dtype)
    sums = jax.ShapeDtypeStruct((shapes.samples, shapes.heads, shapes.length), jnp.float32)
    numbers = jax.ShapeDtypeStruct((shapes.samples, shapes.key_heads, shapes.length), jnp.int32)
    given = [queries, keys, keys, *([numbers] if shapes.has_documents else [])]
    if direction == "backward":
        given += [queries, sums, queries]
    # float32 is multiplied as float32, which a TPU does not do unless it is asked to.
    with jax.default_matmul_precision("highest" if shapes.dtype == torch.float32 else "default"):
        traced = jax.jit(getattr(_SplashKernel(shapes, interpreted), direction), keep_unused=True).trace(*given)
    lowered = traced.lower(lowering_platforms=("cpu" if interpreted else "tpu",))
    program = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    return xb.computation_from_module_proto("splash_attention", program)


class _SplashKernel:
    """JAX's kernel for one shape; its methods are traced by JAX."""

    def __init__(self, shapes: _Shapes, interpreted: bool) -> None:
        self._library = importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention")
        block = next(each for each in _BLOCKS if shapes.length % each == 0)
        names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
        self._sizes = self._library.BlockSizes(**{f"block_{name}": block for name in names})
        masks = importlib.import_module(f"{self._library.__name__}.splash_attention_mask")
        mask = (masks.CausalMask if shapes.is_causal else masks.FullMask)((shapes.length, shapes.length))
        self._kernel = self._library.make_splash_mha(
            masks.MultiHeadMask([mask] * shapes.heads),
            block_sizes=self._sizes,
            head_shards=1,
            q_seq_shards=1,
            save_residuals=True,
            interpret=interpreted,
        )
        self._interpreted = interpreted

    def forward(self, *given: Any) -> Any:
        """Return the output, and the logarithm of each row's sum of exponentials."""
        output, (sums,) = _import_jax().vmap(self._of_one_sample)(*given)
        return output, sums

    def backward(self, *given: Any) -> Any:
        """Return the gradients of queries, keys and values, from what forward took and returned."""
        return _import_jax().vmap(self._gradients_of_one_sample)(*given)

    def _of_one_sample(self, query: Any, key: Any, value: Any, *numbers: Any) -> Any:
        return self._kernel(query, key, value, segment_ids=self._segments(*numbers))

    def _segments(self, *numbers: Any) -> Any:
        """Return the numbers of documents as the kernel takes them; None where there are none."""
        return self._library.SegmentIds(numbers[0][0], numbers[0][0]) if numbers else None

    def _gradients_of_one_sample(self, query: Any, key: Any, value: Any, *others: Any) -> Any:
        inner = importlib.import_module(f"{self._library.__name__}.splash_attention_kernel")
        *numbers, output, sums, gradient = others
        kernel, options = self._kernel, self._kernel.kwargs
        segments = self._segments(*numbers)
        saved = (query, key, value, segments, None, output, sums, kernel.dq_mask_info, kernel.dkv_mask_info)
        gradients = inner._splash_attention_bwd(
            False,
            options["mask_value"],
            False,
            self._sizes,
            None,
            options["mask_function"],
            None,
            self._interpreted,
            saved,
            gradient,
        )
        return gradients[3:6]


def _import_jax() -> Any:
    """Return JAX, which is to leave a TPU to torch_xla: it only traces."""
    is_new = "jax" not in sys.modules
    jax = importlib.import_module("jax")
    if is_new:
        jax.config.update("jax_platforms", "cpu")
        # Of a plugin beside it, which is torch_xla's: without the rest of JAX for CUDA it is none for JAX.
        logging.getLogger("jax._src.xla_bridge").addFilter(lambda record: _UNUSED_PLUGIN not in str(record.msg))
    return jax
