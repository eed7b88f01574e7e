"""How PyTorch's functions have to be called with shards, by their names."""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch

from torchacc.engines.tensor_functions import ELEMENTWISE, RANDOM_LIKE, VIEWS

Function = Callable[..., Any]


class FunctionKind(Enum):
    """How a function has to be called with shards."""

    PLAIN = auto()
    """As it is: it asks for no values."""
    ELEMENTWISE = auto()
    """On shards, if all tensors lie alike."""
    RANDOM = auto()
    """For a full tensor, of which copies of a shard get the same numbers."""
    NORM = auto()
    """On shards, if no shard is empty; what comes out are parts of a norm."""
    JOIN = auto()
    """On parts of a sum or norm, if all are; else on full tensors."""
    VIEW = auto()
    """On full tensors; what comes out would share memory with them, and is not to be written to."""
    UNSHARDED = auto()
    """On full tensors."""
    ITERATE = auto()
    PICKLE = auto()
    COPY = auto()
    SET_DATA = auto()
    GET_DATA = auto()
    SET_GRADIENT = auto()
    HOOK = auto()
    GRADIENTS = auto()
    NUMEL = auto()
    """For the full tensor, also one that another stage has."""


_PLAIN = {
    "__delete__", "__dir__", "__hash__", "__len__", "__repr__",
    "__setstate__", "_is_view", "_typed_storage", "backward", "can_cast", "cpu", "cuda", "data_ptr", "dim",
    "element_size", "get_device", "is_complex", "is_conj", "is_contiguous", "is_floating_point", "is_inference",
    "is_neg", "is_nonzero_", "is_pinned", "is_same_size", "is_set_to", "is_shared", "is_signed", "is_tensor",
    "ndimension", "pin_memory", "record_stream", "register_post_accumulate_grad_hook",
    "requires_grad_", "result_type", "retain_grad", "share_memory_", "size", "storage", "storage_offset", "stride",
    "untyped_storage", "_amp_foreach_non_finite_check_and_unscale_",
}  # fmt: skip
_ELEMENTWISE = ELEMENTWISE | {"and", "bool", "int", "invert", "long", "or", "xor"}
_CONVERSIONS = {"__bool__", "__complex__", "__float__", "__index__", "__int__", "__long__"}
_RANDOM = RANDOM_LIKE | {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "kaiming_uniform_", "log_normal_", "normal_", "random_",
    "uniform_",
}  # fmt: skip
_VIEWS = VIEWS | {"__getitem__", "adjoint", "broadcast_to", "hsplit", "moveaxis", "real", "vsplit"}
WRITING_DUNDERS = {
    "__iadd__", "__iand__", "__idiv__", "__ifloordiv__", "__ilshift__", "__imod__", "__imul__", "__ior__", "__ipow__",
    "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__setitem__",
}  # fmt: skip


_OTHERS = {
    "__deepcopy__": FunctionKind.COPY,
    "__iter__": FunctionKind.ITERATE,
    "__reduce_ex__": FunctionKind.PICKLE,
    "_foreach_norm": FunctionKind.NORM,
    "cat": FunctionKind.JOIN,
    "concat": FunctionKind.JOIN,
    "linalg_vector_norm": FunctionKind.NORM,
    "nelement": FunctionKind.NUMEL,
    "norm": FunctionKind.NORM,
    "numel": FunctionKind.NUMEL,
    "register_hook": FunctionKind.HOOK,
    "stack": FunctionKind.JOIN,
    "vector_norm": FunctionKind.NORM,
}


def kind_of(func: Function) -> FunctionKind:
    """Return how a function has to be called with shards."""
    name = getattr(func, "__name__", "")
    if func is torch.autograd.grad:
        return FunctionKind.GRADIENTS
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        special = {
            ("__get__", "data"): FunctionKind.GET_DATA,
            ("__set__", "data"): FunctionKind.SET_DATA,
            ("__set__", "grad"): FunctionKind.SET_GRADIENT,
        }
        return special.get((name, attribute), FunctionKind.VIEW if attribute in _VIEWS else FunctionKind.PLAIN)
    if name in _PLAIN:
        return FunctionKind.PLAIN
    if name in _OTHERS:
        return _OTHERS[name]
    if name in _RANDOM:
        return FunctionKind.RANDOM
    if name in _VIEWS:
        return FunctionKind.VIEW
    if name.startswith("_fused_") or (_plain_name(name) in _ELEMENTWISE and name not in _CONVERSIONS):
        return FunctionKind.ELEMENTWISE
    return FunctionKind.UNSHARDED


def _plain_name(name: str) -> str:
    """Return the name of a function of elements: `mul` for `mul_`, `__rmul__`, `__imul__` and `_foreach_mul_`."""
    bare = name.removeprefix("_foreach_").strip("_")
    if name.startswith("__") and bare not in _ELEMENTWISE and bare[:1] in ("r", "i"):
        bare = bare[1:]
    return {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}.get(bare, bare)
