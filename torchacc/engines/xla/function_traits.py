"""What PyTorch's functions do to shards of tensors, by their names."""

import functools
from dataclasses import dataclass
from typing import Any

from torchacc.engines.tensor_functions import ELEMENTWISE, RANDOM_LIKE, VIEWS

_QUESTIONS = {
    "_backward_hooks", "_base", "_cdata", "_grad_fn", "_is_view", "_version", "device", "dtype",
    "element_size", "get_device", "grad_fn", "has_names", "is_complex", "is_conj", "is_contiguous", "is_cpu", "is_cuda",
    "is_floating_point", "is_inference", "is_leaf", "is_meta", "is_neg", "is_nested", "is_quantized", "is_signed",
    "is_sparse", "is_sparse_csr", "is_xla", "itemsize", "layout", "name", "names", "output_nr",
    "requires_grad", "requires_grad_", "result_type", "retain_grad", "retains_grad", "storage_offset", "stride",
    "untyped_storage", "data_ptr", "is_mps", "is_xpu", "is_mtia", "is_mkldnn", "is_vulkan", "is_maia", "is_ipu",
    "can_cast", "is_tensor", "is_same_size",
}  # fmt: skip
"""Names of what asks for no value and no size."""

_ELEMENTWISE = ELEMENTWISE | {
    "acos", "asin", "constant", "deg2rad", "erfc", "exp2", "float_power", "fmax", "fmin", "greater", "greater_equal",
    "hardshrink", "heaviside", "hypot", "isfinite", "isinf", "isneginf", "isposinf", "ldexp", "less", "less_equal",
    "logaddexp", "logit", "masked_fill", "nextafter", "not_equal", "positive", "rad2deg", "signbit", "softshrink",
    "threshold", "truediv", "type", "xlogy",
}  # fmt: skip

_OPERATORS = {
    f"__{prefix}{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
    for prefix in ("", "r", "i")
} | {f"__{name}__" for name in ("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge")}

_RANDOM = RANDOM_LIKE | {"bernoulli", "poisson", "normal"}

_VIEWS = VIEWS | {"diag", "getitem", "iter"}

_IN_PLACE_OPERATORS = {name for name in _OPERATORS if name.startswith("__i") and name != "__invert__"} | {"__setitem__"}


@dataclass(frozen=True)
class FunctionTraits:
    """What a function of PyTorch is, by its name."""

    name: str
    base: str
    """The name without what marks operators, methods in place, and functions of lists."""
    is_question: bool
    is_elementwise: bool
    is_each: bool
    """Whether it takes lists, of which it does the same to each."""
    is_view: bool
    is_random: bool
    writes: bool
    """Whether it changes its first argument."""


@functools.cache
def traits_of(func: Any) -> FunctionTraits:
    """Return what a function of PyTorch is."""
    name: str = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        name = func.__self__.__name__
    is_each = name.startswith("_foreach_")
    is_dunder = name.startswith("__") and name.endswith("__")
    base = name.removeprefix("_foreach_").strip("_")
    in_place = (is_dunder and name in _IN_PLACE_OPERATORS) or (not is_dunder and name.endswith("_"))
    return FunctionTraits(
        name=name,
        base=base,
        is_question=name in _QUESTIONS,
        is_elementwise=name in _OPERATORS if is_dunder else base in _ELEMENTWISE,
        is_each=is_each,
        is_view=base in _VIEWS,
        is_random=base in _RANDOM,
        writes=(in_place and name not in _QUESTIONS) or getattr(func, "__name__", "") in ("__set__", "__delete__"),
    )
