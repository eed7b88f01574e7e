"""Record one training step of a model on the meta device: which operation reads and makes how many bytes.

Shapes are all there is: no memory, no device, and no value. A billion parameters take as long as a thousand.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, noop_context_fn, set_checkpoint_early_stop
from torch.utils.flop_counter import flop_registry

from torchacc.chunked_loss.model_loss import ModelLoss
from torchacc.engines.patches import dense_experts
from torchacc.errors import ConfigError, in_one_line
from torchacc.parallel.saved_matmuls import SavedMatmuls

aten = torch.ops.aten
_PRODUCTS = {
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.scaled_dot_product_attention, torch.matmul, torch.Tensor.matmul,
    torch.Tensor.__matmul__, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum,
}  # fmt: skip

# https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32, those of models.
_IN_FLOAT32 = {
    F.cosine_similarity, F.cross_entropy, F.group_norm, F.kl_div, F.l1_loss, F.layer_norm, F.log_softmax, F.mse_loss,
    F.nll_loss, F.normalize, F.smooth_l1_loss, F.softmax, F.softplus, torch.cumsum, torch.exp, torch.log,
    torch.log_softmax, torch.norm, torch.pow, torch.prod, torch.reciprocal, torch.rsqrt, torch.softmax, torch.sum,
    torch.Tensor.__pow__, torch.Tensor.__rpow__, torch.Tensor.__rdiv__, torch.Tensor.cumsum, torch.Tensor.exp,
    torch.Tensor.log, torch.Tensor.log_softmax, torch.Tensor.norm, torch.Tensor.pow, torch.Tensor.prod,
    torch.Tensor.reciprocal, torch.Tensor.rsqrt, torch.Tensor.softmax, torch.Tensor.sum,
}  # fmt: skip

_GROUPED = {each for each in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if each is not None}
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True)
class Value:
    """A tensor with memory of its own; views of it are the same value."""

    nbytes: int
    parameter: str | None = None
    """The name of the parameter that it is."""
    is_input: bool = False
    """Whether it was there before the step: a parameter, a buffer or the batch."""


@dataclass(frozen=True)
class Read:
    """What an operation reads of a value: all of it, or a part."""

    value: int
    nbytes: int
    offset: int


@dataclass(frozen=True)
class Operation:
    """One operation of the step; those that only make views are left out."""

    name: str
    """Such as `aten.mm.default`."""
    is_pointwise: bool
    """Whether PyTorch says that each element of the result comes from one element of each input."""
    reads: tuple[Read, ...]
    makes: tuple[int, ...]
    """Values that are new."""
    after: tuple[int, ...] = ()
    """Values that are waited for and not read: a repetition waits for the gradient of what it repeats."""
    step: int = 0
    """Which step of backward it is a part of: one of autograd's nodes, which frees all that it read at its end."""
    flops: int = 0
    """Of matrix products, additions and multiplications both counted."""
    nbytes: int = 0
    """That it reads and makes."""

    @property
    def needs(self) -> tuple[int, ...]:
        """Values that must be there before it runs."""
        return (*(read.value for read in self.reads), *self.after)


@dataclass(frozen=True)
class Trace:
    """Forward and backward of one batch on one device."""

    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    num_forward: int
    """How many of the operations belong to forward."""
    gradients: Mapping[str, int]
    """For each trained parameter the value that is its gradient."""


def record(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    recomputed: Sequence[str] = (),
    saves_matmuls: bool = False,
    eager: bool = False,
    platform: str = "cuda",
    chunked_loss: bool | int = False,
) -> Trace:
    """Run forward and backward on the meta device, and note each operation.

    Args:
        model: On the meta device, in training mode.
        batch: Keyword arguments of its forward, on the meta device; among them what makes it return a `loss`.
        dtype: Of matmuls, where they are not run eagerly; then they are in the model's.
        recomputed: Names of the modules that are recomputed in backward.
        saves_matmuls: Whether the results of their matmuls are kept.
        eager: Whether PyTorch's own kernels run, of which attention keeps no scores; XLA has matmuls and a softmax.
        platform: Of the device: XLA's CPU client holds bfloat16 in float32, and PyTorch's autocast computes some
            functions in float32 on a GPU.
        chunked_loss: The value of `compute.chunked_loss`.

    Raises:
        ConfigError: The model cannot run without values, or returns no loss.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    mode: Callable[[], TorchFunctionMode] = partial(_ProductsIn, dtype)
    if eager:  # on a CPU autocast lowers all that the model does
        mode = partial(_Kernels, torch.float32 if platform == "cpu" else dtype, platform)
    widens = platform == "cpu" and not eager
    recorder = _Recorder({parameter: name for name, parameter in model.named_parameters()}, widens=widens)
    try:
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(_recomputing(model, recomputed, mode, recorder, saves_matmuls=saves_matmuls))
            stack.enter_context(mode())
            if not eager:
                stack.enter_context(dense_experts.without_copies())
            stack.enter_context(recorder)
            output = stack.enter_context(_with_loss(model, chunked_loss))(**batch)
            loss = _loss_of(output, model)
            num_forward = len(recorder.operations)
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    except ConfigError:
        raise
    except Exception as error:  # it is the model's own code that runs
        raise ConfigError(
            f"{type(model).__name__} cannot be planned, as it does not train with {', '.join(batch)} on the meta "
            f"device, where tensors have a shape and no values: {type(error).__name__}: {in_one_line(error)}"
        ) from error
    found = {
        name: recorder.find(gradient)
        for name, gradient in zip(parameters, gradients, strict=True)
        if gradient is not None
    }
    return Trace(tuple(recorder.values), tuple(recorder.operations), num_forward, found)


def _loss_of(output: Any, model: nn.Module) -> torch.Tensor:
    loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", output)
    if not isinstance(loss, torch.Tensor) or loss.dim():
        raise ConfigError(
            f"{type(model).__name__} returns no loss for such a batch, so that it has no backward to plan"
        )
    return loss


class WithoutValues(TorchDispatchMode):
    """While entered, models of transformers run on the meta device, where tensors have a shape and no values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on shapes, or answer for the values."""
        if func is aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # transformers asks whether masks can be left out: nothing is packed, and nothing is padded
        return func(*args, **(kwargs or {}))


class _Recorder(WithoutValues):
    """Notes what operations read and make."""

    def __init__(self, names: Mapping[torch.Tensor, str], *, widens: bool) -> None:
        super().__init__()
        self._widens = widens
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self._ids: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []  # so that no address is used twice
        self._after: tuple[int, ...] = ()
        self._node: object = None
        self._step = 0
        for parameter, name in names.items():
            self._add(parameter, parameter=name, is_input=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on shapes, and note it."""
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(output, bool):
            return output
        reads = dict.fromkeys(self._read(tensor) for tensor in _tensors((args, kwargs)))
        known = len(self.values)
        makes = dict.fromkeys(self.find(tensor) for tensor in _tensors(output))
        new = tuple(value for value in makes if value >= known)
        if new or func._schema.is_mutable:
            pointwise = torch.Tag.pointwise in func.tags
            flops = _count_flops(func, args, kwargs or {}, output)
            nbytes = sum(read.nbytes for read in reads) + sum(self.values[value].nbytes for value in new)
            step = self._find_step()
            self.operations.append(Operation(str(func), pointwise, tuple(reads), new, self._after, step, flops, nbytes))
        return output

    def _find_step(self) -> int:
        node = None if self._after else torch._C._current_autograd_node()
        if node is None or node is not self._node:
            self._node, self._step = node, self._step + 1
        return self._step

    @contextmanager
    def after(self, gradients: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context manager that records of all operations while the context is entered that they wait for gradients."""
        before, self._after = self._after, tuple(self.find(gradient) for gradient in gradients)
        try:
            yield
        finally:
            self._after = before

    def find(self, tensor: torch.Tensor) -> int:
        """Return the value that a tensor is, or is a view of."""
        found = self._ids.get(tensor.untyped_storage()._cdata)
        return self._add(tensor) if found is None else found

    def _read(self, tensor: torch.Tensor) -> Read:
        address = tensor.untyped_storage()._cdata
        value = self._add(tensor, is_input=True) if address not in self._ids else self._ids[address]
        nbytes = tensor.nbytes * self._times(tensor)
        return Read(value, min(nbytes, self.values[value].nbytes), int(tensor.storage_offset()))

    def _times(self, tensor: torch.Tensor) -> int:
        return 2 if self._widens and tensor.dtype == torch.bfloat16 else 1

    def _add(self, tensor: torch.Tensor, *, parameter: str | None = None, is_input: bool = False) -> int:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        self._ids[storage._cdata] = len(self.values)
        self.values.append(Value(storage.nbytes() * self._times(tensor), parameter, is_input))
        return len(self.values) - 1


class _ProductsIn(TorchFunctionMode):
    """While entered, matrix products are in a lower dtype, as autocast has them, which the meta device has not.

    A tensor is cast once for all matmuls that read it, as equal operations are one under XLA.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._cast_before: dict[torch.Tensor, torch.Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of PyTorch, a product with its inputs cast."""
        if func in _PRODUCTS and self._dtype != torch.float32:
            args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if tensor not in self._cast_before:
            self._cast_before[tensor] = tensor.to(self._dtype)
        return self._cast_before[tensor]


class _Kernels(TorchFunctionMode):
    """While entered, attention is PyTorch's kernel that keeps a number for each row of scores, and no scores.

    Experts compute equally many tokens each. Where the dtype is lower than float32, some functions are in float32 all
    the same, as autocast has them on a GPU, and matmuls are not.
    """

    def __init__(self, dtype: torch.dtype, platform: str) -> None:
        super().__init__()
        self._dtype = dtype
        self._platform = platform

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of PyTorch, or the kernel in its place."""
        kwargs = dict(kwargs or {})
        if func in _GROUPED:
            return _GroupedProduct.apply(*args[:2])
        if self._dtype != torch.float32 and func in _PRODUCTS:
            args, kwargs = tree_map_only(torch.Tensor, partial(_cast, torch.float32, self._dtype), (args, kwargs))
        elif self._dtype != torch.float32 and func in _IN_FLOAT32:
            args, kwargs = tree_map_only(torch.Tensor, partial(_cast, self._dtype, torch.float32), (args, kwargs))
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
        if mask is not None and mask.requires_grad:
            return func(*args, **kwargs)  # as T5's, which is learned: no kernel takes it
        if query.shape[1] != key.shape[1]:
            key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
        is_causal = given.get("is_causal", False)
        if query.shape[-1] == value.shape[-1]:
            kernel = aten._scaled_dot_product_flash_attention_for_cpu
            return kernel(query, key, value, 0.0, is_causal, attn_mask=mask)[0]
        if self._platform == "cpu":  # whose kernel takes values of the size of queries only
            return func(*args, **kwargs)
        return aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, 0.0, is_causal)[0]


def _cast(source: torch.dtype, to: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(to) if tensor.dtype == source else tensor


class _GroupedProduct(torch.autograd.Function):
    """Rows (tokens, inputs) by matrices (experts, inputs, outputs), as many rows for each."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.mm(matrices[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, matrices = ctx.saved_tensors
        each = -(-len(rows) // len(matrices))
        mine = rows.new_empty(()).expand(len(matrices), rows.shape[1], each)
        theirs = rows.new_empty(()).expand(len(matrices), each, gradient.shape[1])
        return gradient.mm(matrices[0].T), torch.bmm(mine, theirs)


def _count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    name = func._schema.name
    if name.startswith(_ATTENTION):
        query, key = (args[0], args[1]) if not name.endswith("_backward") else (args[1], args[2])
        matmuls = 2 if not name.endswith("_backward") else 5
        scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        return int(matmuls * scores * query.shape[3])  # a causal mask leaves half of 2 x that
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=output)) if formula is not None else 0


@contextmanager
def _recomputing(
    model: nn.Module,
    names: Sequence[str],
    mode: Callable[[], TorchFunctionMode],
    recorder: _Recorder,
    *,
    saves_matmuls: bool,
) -> Iterator[None]:
    """Context manager in which modules are recomputed in backward, in the mode of forward."""
    modules = [model.get_submodule(name) for name in names]
    for module in modules:
        forward = module.forward

        def run(*args: Any, forward: Callable[..., Any] = forward, **kwargs: Any) -> Any:
            arrived: list[torch.Tensor] = []

            def compute(*args: Any, **kwargs: Any) -> Any:
                with mode(), recorder.after(arrived):
                    return forward(*args, **kwargs)

            contexts = SavedMatmuls("a module").contexts if saves_matmuls else noop_context_fn
            with set_checkpoint_early_stop(not saves_matmuls):
                output = checkpoint(
                    compute, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs
                )
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(arrived.append)
            return output

        module.__dict__["forward"] = run
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["forward"]


@contextmanager
def _with_loss(model: nn.Module, chunked_loss: bool | int) -> Iterator[Callable[..., Any]]:
    """Context manager with what runs the model, and computes its loss in chunks where that is asked for."""
    if not chunked_loss:
        yield model
        return
    loss = ModelLoss(model, chunked_loss)
    try:
        yield lambda **batch: loss.run(model, (), batch)
    finally:
        loss.remove()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
