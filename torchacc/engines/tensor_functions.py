"""What PyTorch's functions do to tensors, by name.

From these lists follow, natively, how a function has to be called with DTensors (`native/function_kinds.py`), and under
XLA what it does to the shards of `ShardTensor`s (`xla/function_traits.py`).
"""

ELEMENTWISE = {
    "abs", "absolute", "add", "addcdiv", "addcmul", "atan", "atan2", "bfloat16", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "clone", "contiguous", "copy",
    "copysign", "cos", "cosh", "detach", "div", "divide", "double", "empty_like", "eq", "erf", "exp", "expm1", "fill",
    "float", "floor", "floor_divide", "fmod", "full_like", "ge", "gt", "half", "isnan", "le", "lerp", "log", "log10",
    "log1p", "log2", "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "maximum", "minimum", "mul",
    "multiply", "nan_to_num", "ne", "neg", "negative", "ones_like", "pow", "reciprocal", "relu", "remainder", "round",
    "rsqrt", "rsub", "sgn", "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "sub", "subtract", "tan", "tanh", "to",
    "true_divide", "trunc", "type_as", "where", "zero", "zeros_like",
}  # fmt: skip
"""Names, without underscores, of functions of which each element of the result depends on one of each operand."""

WITHOUT_GRADIENT = {
    "detach", "empty_like", "eq", "full_like", "ge", "greater", "greater_equal", "gt", "isfinite", "isinf", "isnan",
    "isneginf", "isposinf", "le", "less", "less_equal", "lt", "ne", "not_equal", "ones_like", "signbit", "zeros_like",
}  # fmt: skip
"""Names of functions of `ELEMENTWISE`, and of others like them, that pass no gradient on."""

VIEWS = {
    "H", "T", "as_strided", "chunk", "diagonal", "expand", "expand_as", "flatten", "mH", "mT", "movedim", "narrow",
    "permute", "ravel", "reshape", "reshape_as", "select", "split", "split_with_sizes", "squeeze", "swapaxes",
    "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as",
}  # fmt: skip
"""Names of functions that return a part of a tensor, or another view, which a script may then change in place."""

RANDOM_LIKE = {
    "rand_like", "randint_like", "randn_like",
}  # fmt: skip
"""Names of functions that draw a tensor of random numbers in the shape of another."""
