"""The types of options: the names that they can have, and how their values are checked."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, StrictInt, StrictStr, WithJsonSchema

from torchacc.errors import shown

Axis = Literal["dp", "fsdp", "pp", "ep", "sp", "tp"]
"""From the slowest (devices far apart) to the fastest (neighbours), unless `dist.topology` says otherwise."""
HighPrecision = Literal["float32", "bfloat16"]
ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
RecomputePolicy = Literal["full", "save_matmuls"]
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Float8Recipe = Literal["tensorwise", "rowwise"]
BackwardPrefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "NONE"]
Attention = Literal[
    "auto",
    "eager",
    "sdpa",
    "blockwise",
    "flash",
    "sdpa_flash",
    "sdpa_efficient",
    "sdpa_cudnn",
    "sdpa_math",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
]
"""`auto` is the model's own, `sdpa_*` PyTorch's backends, `blockwise` and `flash` XLA's; others: of transformers."""


def _at_least_one(value: Any) -> Any:
    """Return a list of one where one name or class is passed."""
    return [value] if isinstance(value, str | type) else value


def _class_names(value: Any) -> Any:
    value = _at_least_one(value)
    if not isinstance(value, list | tuple | set | frozenset):
        return value
    return [item.__name__ if isinstance(item, type) else item for item in value]


def _all_axes(axes: list[Axis]) -> list[Axis]:
    """Return the axes with those that are left out behind them."""
    if len(axes) > len(set(axes)):
        raise ValueError(f"each axis at most once, not {shown(axes)}")
    return list(dict.fromkeys([*axes, *get_args(Axis)]))


def _of_64_bits(number: int) -> int:
    if not -(2**63) <= number < 2**63:
        raise ValueError("a number of 64 bits")
    return number


def _regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"regular expressions, and {shown(pattern)} is none: {error}") from None
    return pattern


def _every_axis_at_most_once(axes: list[str | None]) -> list[str | None]:
    named = [axis for axis in axes if axis is not None]
    if len(named) > len(set(named)):
        raise ValueError(f"each axis at most once for a parameter, not {shown(axes)}")
    return axes


# What is counted, and what tensors hold, has 64 bits: Python takes any number, and cannot even print a very large one.
Bits64 = AfterValidator(_of_64_bits)
Count = Annotated[int, Field(strict=True, ge=1), Bits64]
Natural = Annotated[int, Field(strict=True, ge=0), Bits64]
Int64 = Annotated[StrictInt, Bits64]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Names = Annotated[set[StrictStr], Field(min_length=1), PlainSerializer(sorted)]
ClassNames = Annotated[Names, BeforeValidator(_class_names)]
Patterns = Annotated[Names, BeforeValidator(_at_least_one)]
AxisOrder = Annotated[list[Axis], AfterValidator(_all_axes)]
PartitionSpec = Annotated[list[Literal["fsdp", "tp"] | None], AfterValidator(_every_axis_at_most_once)]
TensorParallelRules = Annotated[
    dict[Annotated[StrictStr, AfterValidator(_regular_expression)], PartitionSpec], Field(min_length=1)
]
# A file cannot hold a function: to a schema, these two can only be null.
WrapFunction = Annotated[Callable[[str, Any], bool], WithJsonSchema({"type": "null", "title": "function"})]
ShardFunction = Annotated[Callable[..., Any], WithJsonSchema({"type": "null", "title": "function"})]
