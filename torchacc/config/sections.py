"""The sections of a `Config`: plain, assignable data, each field checked when it is set."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictFloat,
    StrictStr,
    ValidationError,
)
from pydantic_core import ErrorDetails
from typing_extensions import Self

from torchacc.config.names import did_you_mean, nearest, oddness, shown_name
from torchacc.config.option_types import (
    Attention,
    Axis,
    AxisOrder,
    BackwardPrefetch,
    ClassNames,
    CompileMode,
    Count,
    Float8Recipe,
    HighPrecision,
    Int64,
    Natural,
    Patterns,
    PipelineSchedule,
    RecomputePolicy,
    ShardFunction,
    ShardingStrategy,
    Share,
    TensorParallelRules,
    WrapFunction,
)
from torchacc.errors import ConfigError, UnknownNameError, in_few_lines, shown
from torchacc.logging import get_logger

_log = get_logger(__name__)

_MAX_REASONS = 20
"""Of an option's that are looked at, where each item of a list has one."""


class Section(BaseModel):
    """A group of options that refuses unknown names and wrong types, at the assignment and with a `ConfigError`."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True)

    path: ClassVar[str] = ""
    """Where the section lies in a `Config`, dotted, to name options in messages."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Names that people look for in this section, and the paths of the options that do it."""

    _frozen: bool = PrivateAttr(default=False)
    _is_used: bool = PrivateAttr(default=False)

    def __init__(self, /, *given: Any, **values: Any) -> None:
        """Set the options passed, and leave the others at their defaults, as a section that is None or empty in a file.

        Raises:
            ConfigError: A name or a type is wrong.
        """
        if given:
            raise ConfigError(
                f"{type(self).__name__}({shown(given[0])}): options are passed by name. Config.from_dict() takes a "
                "dict, Config.from_yaml() a file"
            )
        values = {name: value for name, value in values.items() if value is not None or not self._is_nested(name)}
        for name, value in values.items():
            if oddness(name):
                raise ConfigError(self._unknown(name, value))
            self._refuse_odd_names(name, value)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(self._explain(error, values)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            if self._frozen:
                raise ConfigError(
                    f"{self.path_of(name)} = {shown(value)}: resolved configs are frozen: "
                    "change your own Config before accelerate()"
                )
            if name not in type(self).model_fields:
                raise ConfigError(self._unknown(name, value))
        self._refuse_odd_names(name, value)
        if self._is_used and not name.startswith("_") and self.__dict__.get(name) != value:
            self._is_used = False
            _log.info(
                "config.%s = %s is for models that accelerate() is given from now on: those that it has returned stay "
                "as they are",
                self.path_of(name),
                shown(value),
            )
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ConfigError(self._explain(error, {name: value})) from None

    def __getattr__(self, name: str) -> Any:
        """Look a name up that is no option: pydantic's own, or none."""
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name.startswith("_"):
                raise
            raise UnknownNameError(f"{self.path_of(name)}: there is no such option; {self._near(name)}") from None

    def __delattr__(self, name: str) -> None:
        raise ConfigError(
            f"{self.path_of(shown_name(name))}: an option cannot be deleted; assign its default in place of that"
        )

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the values, and thaw the copy; a callable stays the same, as a method would copy its whole object."""
        memo = {} if memo is None else memo
        memo.update({id(value): value for value in self.__dict__.values() if callable(value)})
        copied = super().__deepcopy__(memo)
        copied._frozen = copied._is_used = False
        return copied

    def freeze(self) -> None:
        """Refuse every later assignment, here and in the sections below."""
        self._frozen = True
        for section in self._sections():
            section.freeze()

    def note_use(self) -> None:
        """Have the next assignment, here or in a section below, say that it changes no model that is made already."""
        self._is_used = True
        for section in self._sections():
            section.note_use()

    def _sections(self) -> list["Section"]:
        return [value for value in self.__dict__.values() if isinstance(value, Section)]

    @classmethod
    def path_of(cls, name: str) -> str:
        """Return the dotted path of one of the section's options."""
        return f"{cls.path}.{name}" if cls.path else name

    @classmethod
    def _is_nested(cls, name: str) -> bool:
        """Return whether an option is a section or a dict, and cannot be None."""
        kind = cls.model_fields[name].annotation if name in cls.model_fields else None
        return get_origin(kind) is dict or cls._is_section(name)

    @classmethod
    def _is_section(cls, name: str) -> bool:
        kind = cls.model_fields[name].annotation if name in cls.model_fields else None
        return any(isinstance(part, type) and issubclass(part, Section) for part in (kind, *get_args(kind)))

    @classmethod
    def _refuse_odd_names(cls, name: str, value: Any) -> None:
        """Refuse a section below whose options are not named by strings, as arguments are."""
        for below in value if isinstance(value, dict) and cls._is_section(name) else ():
            if not isinstance(below, str):
                raise ConfigError(f"{cls.path_of(name)}.{shown_name(below)}: {oddness(below)}")

    @classmethod
    def _unknown(cls, name: str, value: Any) -> str:
        if oddness(name):
            return f"{cls.path_of(shown_name(name))}: {oddness(name)}"
        return f"{cls.path_of(name)} = {shown(value)}: there is no such option; {cls._near(name)}"

    @classmethod
    def _near(cls, name: str) -> str:
        """Return a hint about a wrong name: where else it is, the nearest option, one of that name below, or all."""
        if name in cls.elsewhere:
            return f"write {cls.elsewhere[name]}"
        valid = [field.alias or own for own, field in cls.model_fields.items()]
        found = cls._below(name) or cls._beside(name)
        return f"did you mean {found[0]!r}?" if found and not did_you_mean(name, valid) else nearest(name, valid)

    @classmethod
    def _below(cls, name: str) -> list[str]:
        """Return the paths of the options of that name in the sections below."""
        kinds = [field.annotation for field in cls.model_fields.values()]
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        own = [section.path_of(name) for section in sections if name in section.model_fields]
        return own + [path for section in sections for path in section._below(name)]

    @classmethod
    def _beside(cls, name: str) -> list[str]:
        """Return the path of the option of that name in another section; none where several have it."""
        others = [kind for kind in Section.__subclasses__() if kind.__module__ == cls.__module__ and kind.path]
        found = [kind.path_of(name) for kind in others if name in kind.model_fields]
        return found if len(found) == 1 else []

    @classmethod
    def _explain(cls, error: ValidationError, values: Mapping[str, Any]) -> str:
        """Return one line per wrong option: its path, what was passed, and what is expected."""
        by_option: dict[str, list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False):
            by_option.setdefault(str(detail["loc"][0]), []).append(detail)
        return in_few_lines(
            len(by_option), (cls._explain_option(name, values[name], by_option[name]) for name in by_option)
        )

    @classmethod
    def _explain_option(cls, name: str, value: Any, details: list[ErrorDetails]) -> str:
        # A section below has explained itself; pydantic hands its error on as the context of ours.
        below = details[0].get("ctx", {}).get("error")
        if isinstance(below, ConfigError):
            return str(below)
        if details[0]["type"] == "extra_forbidden":
            return cls._unknown(name, value)
        expected = " or ".join(dict.fromkeys(_expected(detail) for detail in details[:_MAX_REASONS]))
        return f"{cls.path_of(name)} = {shown(value)}: expected {expected}"


_EXPECTED = {
    "bool_type": "True or False",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a dict",
    "set_type": "a name, or a set or list of names",
    "callable_type": "a function",
    "model_type": "a dict of the section's options, or the section itself",
    "greater_than_equal": "at least {ge}",
    "string_too_short": "a string that is not empty",
    "too_short": "at least {min_length} item",
}
"""Our words for pydantic's types of errors, filled in from an error's context."""


def _expected(detail: ErrorDetails) -> str:
    if detail["type"] in _EXPECTED:
        return _EXPECTED[detail["type"]].format_map(detail.get("ctx", {}))
    expected = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if detail["type"] == "literal_error" and isinstance(detail["input"], str):
        hint = did_you_mean(detail["input"], re.findall("'([^']*)'", expected))
        return f"{expected}; {hint}" if hint else expected
    return expected


class ComputeConfig(Section):
    """What the devices compute in."""

    path = "compute"

    bf16: StrictBool = False
    """Compute in bfloat16."""
    fp16: StrictBool = False
    """Compute in float16, which needs a `torchacc.GradScaler` (native engine only)."""
    master_dtype: HighPrecision = "float32"
    """Dtype of the parameters that the optimizer steps, and so of its state; `bfloat16` goes with `bf16`."""
    reduce_dtype: HighPrecision = "float32"
    """Dtype in which gradients are summed over the devices and over micro-batches; under SPMD it is XLA's choice."""
    fp8: StrictBool = False
    """Multiply in float8 in linear layers, by torchao's float8 training; goes with `bf16`, in which all else computes
    (native engine only)."""
    fp8_recipe: Float8Recipe = "tensorwise"
    """What has a scale of its own: each tensor (tensorwise), whose weights are also gathered in float8; or each row of
    it (rowwise), which is more exact and gathers them in bfloat16."""
    fp8_layers: Patterns | None = None
    """Names of the linear layers that compute in float8, or of modules around them, with wildcards, such as
    `model.layers.*.mlp`; None for all but the one that makes the logits."""
    fp8_skip: Patterns | None = None
    """Names of linear layers, or of modules around them, that do not."""
    fp8_min_features: Count | None = None
    """Inputs and outputs that a layer has at least where it computes in float8; None for the sizes that gain by it on
    an H100, by torchao's measurements, or for all that `fp8_layers` names."""
    fp8_emulate: StrictBool = False
    """Round to float8 and multiply in float32, on any device and slowly: to see what float8 does to a model's numbers.
    """
    attention: Attention = "auto"
    """Which kernel computes attention: the model's own (auto); one of transformers' implementations, by its name there;
    or scaled_dot_product_attention() with one backend of PyTorch's alone (sdpa_flash, sdpa_efficient, sdpa_cudnn,
    sdpa_math). Under XLA auto, eager, sdpa, and blockwise or flash, which keep no value for each pair of tokens; on
    TPUs auto is blockwise."""
    acc_scaled_dot_attn: StrictBool = False
    """TorchAcc's older name of attention by the kernel that there is for the device: natively `attention = "sdpa"`,
    under XLA `"flash"`."""
    chunked_loss: StrictBool | Count = False
    """Compute a language model's loss in chunks of tokens, so that there are never logits of all: tokens of a chunk on
    each device, or True for as many as have 64 Mi logits."""
    scan_layers: StrictBool = False
    """Run layers that are alike as one loop, compiled as one layer and computed again in backward (SPMD only)."""
    compile: StrictBool = False
    """Compile each unit by `torch.compile`; units that are alike share their graphs (native engine only)."""
    compile_mode: CompileMode = "default"
    """How long the compiler may search: `max-autotune-no-cudagraphs` times several kernels for each product."""
    compile_dynamic: StrictBool | None = None
    """Compile for all shapes at once (True), for each shape by itself (False), or, None, for all once a second shape
    has come."""
    compile_backend: Annotated[StrictStr, Field(min_length=1)] = "inductor"
    """The backend of `torch.compile`; `aot_eager` runs its graphs without a compiler, to find out what breaks them."""
    compile_cache: StrictStr | None = None
    """Folder that keeps compiled programs for the next start: of XLA, not on the CPU; natively of `compile`. None to
    compile them each time under XLA; `torch.compile` keeps them in a temporary folder of its own."""


class MemoryConfig(Section):
    """What is given up to hold less in a device's memory."""

    path = "memory"

    gc: StrictBool = False
    """Compute the activations of a unit again in the backward pass instead of keeping them (gradient checkpointing)."""
    gc_cls: ClassNames | None = None
    """Names of the module classes to compute again; None for the units of `dist.fsdp`."""
    gc_every: Count = 1
    """Compute every so many-th of those modules again, from the first one on; 1 for each."""
    gc_cnt: Count | None = None
    """How many of the modules so chosen, from the first one on, to compute again; None for all."""
    gc_policy: RecomputePolicy = "full"
    """What of those modules to compute again: all (full), or all but matrix products, convolutions and fused attention,
    whose results are kept (save_matmuls; native engine only)."""
    step_in_backward: StrictBool = False
    """Step each weight as soon as the backward pass has its gradient, and free that, so that gradients of all are never
    there at once; the optimizer is handed to `accelerate()` (native engine only)."""
    offload_activations: StrictBool = False
    """Keep in the host's memory what the forward pass saves for the backward pass (native engine only)."""
    gpu_fraction: Share | None = None
    """Share of a GPU's memory that this process may take, above 0 and up to 1; None for 0.75 under XLA, and for all of
    it natively."""
    gpu_preallocate: StrictBool = True
    """Take that share when the device starts, and not piece by piece as it is needed (XLA only)."""


class DataLoaderConfig(Section):
    """How batches are padded to few lengths, so that a step compiles rarely, and how many wait for the device."""

    path = "dataloader"

    buckets: Annotated[list[Count], Field(min_length=1)] | None = None
    """Lengths, in tokens, to pad batches to; each batch goes to the shortest that holds it."""
    max_length: Count | None = None
    """Length, in tokens, of the longest bucket when the buckets are spaced evenly."""
    num_buckets: Count | None = None
    """How many evenly spaced buckets there are up to `max_length`."""
    pad_value_dict: dict[StrictStr, Int64 | StrictFloat] | None = None
    """Value to pad with, by the batch's key; what is not named here is not padded."""
    pad_dim_dict: dict[StrictStr, Int64] | None = None
    """Dim to pad along, by the batch's key; the last one where a key is not named."""
    truncate: StrictBool = False
    """Cut batches longer than the longest bucket, instead of refusing them."""
    prefetch: Natural = 2
    """Batches that are read and put on the device ahead of the step."""


class DPConfig(Section):
    """Replicas of the model, each with its own part of the data."""

    path = "dist.dp"

    size: Count | None = None
    """Number of replicas; None for what the other axes leave of the job's devices."""


class TPConfig(Section):
    """Weights split inside of a layer."""

    path = "dist.tp"

    size: Count = 1
    """Number of devices that share a layer."""
    plan: TensorParallelRules | None = None
    """What is split: regular expressions, searched for in the parameters' names, each with the axis of every dimension,
    `tp`, `fsdp` or None, such as `{"up.weight$": ["tp", None]}`. The first that fits decides. None for the plan of the
    model's family."""
    sequence_parallel: StrictBool = False
    """Split the activations between units along their length, over the same devices."""


class PPConfig(Section):
    """Layers split into stages."""

    path = "dist.pp"

    size: Count = 1
    """Number of devices over which the layers are split, each with a stage of them, or several."""
    num_microbatches: Count | None = None
    """Number of parts into which the rows of each batch are split, so that the stages compute at the same time; at most
    as many as there are rows. None for twice as many as `size`."""
    schedule: PipelineSchedule = "gpipe"
    """`"gpipe"`: all forwards, then all backwards. `"1f1b"`: the model's forward runs both in turn, so that a stage has
    activations of no more microbatches than there are stages; all processes have to scale the loss alike.
    `"interleaved"`: so do several stages of each device, which wait less for one another, and send more.
    `"zero_bubble"`: as `"1f1b"`, with the gradients of linear layers' weights computed while a stage would wait."""
    stages_per_device: Count | None = None
    """With `"interleaved"` the number of stages of each device, 2 or more. None for 2."""


class SPConfig(Section):
    """Samples split along their length (context parallelism)."""

    path = "dist.sp"

    size: Count = 1
    """Number of devices that share a sample, each with a part of its tokens; parameters are sharded over them, too."""
    ring_size: Count | None = None
    """Natively: of these devices, how many pass keys and values on to one another (ring attention), while the attention
    heads are split over the others (DeepSpeed-Ulysses). It divides the size; None for as few as the heads allow."""


class EPConfig(Section):
    """Experts spread over devices (expert parallelism)."""

    path = "dist.ep"

    size: Count = 1
    """Number of devices over which the experts of each layer are spread; tokens go to their experts, under SPMD to all.
    The devices see different data, and all other parameters are sharded over them, too."""


class FSDPConfig(Section):
    """Parameters, gradients and optimizer state sharded over data-parallel devices, unit by unit.

    Units are named in one of three ways: `wrap_layer_cls`, `wrap_modules` or `min_num_params`. Without any they are
    inferred from the model.
    """

    path = "dist.fsdp"

    size: Count = 1
    """Number of devices to shard over."""
    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    """What is sharded: all (FULL_SHARD), all but the parameters between forward and backward (SHARD_GRAD_OP), nothing
    (NO_SHARD: `size` replicas), or all over `size` devices with `dist.dp.size` replicas (HYBRID_SHARD)."""
    wrap_layer_cls: ClassNames | None = None
    """Classes, or their names, of the submodules that become units; one, or any collection of them."""
    min_num_params: Count | None = None
    """Make units of submodules that hold at least so many parameters outside of smaller units."""
    wrap_modules: Patterns | WrapFunction | None = None
    """Names of the submodules that become units, with wildcards, such as `transformer.h.*`; or a function of a name and
    a module that answers whether it becomes one."""
    flatten_parameters: StrictBool = False
    """Join a unit's parameters into one tensor for its collectives; the optimizer then sees that one tensor."""
    sync_module_states: StrictBool = False
    """Broadcast parameters and buffers of rank 0 before sharding, so that all ranks start from the same ones."""
    use_spmd: StrictBool = False
    """Drive all devices from one process, on several TPU hosts from one on each (XLA only)."""
    shard_output_callable: ShardFunction | None = None
    """Function of (output, mesh) that shards what the model returns under SPMD; None to shard its first tensor."""
    cpu_offload: StrictBool = False
    """Keep the shards of parameters, gradients and optimizer state in the host's memory, and step there (native engine
    only)."""
    backward_prefetch: BackwardPrefetch = "BACKWARD_PRE"
    """When the backward pass gathers the next unit: before the current one's gradients are computed (BACKWARD_PRE),
    after (BACKWARD_POST), or only when it is needed (NONE)."""
    forward_prefetch: StrictBool = False
    """Gather the next unit before the current one's forward pass."""
    limit_all_gathers: StrictBool = True
    """Let no more than two gathered units wait in memory."""
    use_orig_params: StrictBool = True
    """Let the optimizer see the model's own parameters, so that they can be in different groups."""
    activation_checkpointing: StrictBool = False
    """The same switch as `memory.gc`."""


class DistConfig(Section):
    """The axes of the mesh of devices, and their order."""

    path = "dist"

    dp: DPConfig = Field(default_factory=DPConfig)
    """Replicas, each with its own data."""
    fsdp: FSDPConfig = Field(default_factory=FSDPConfig)
    """Parameters, gradients and optimizer state sharded."""
    tp: TPConfig = Field(default_factory=TPConfig)
    """Weights split inside of a layer."""
    pp: PPConfig = Field(default_factory=PPConfig)
    """Layers split into stages."""
    sp: SPConfig = Field(default_factory=SPConfig)
    """Samples split along their length."""
    ep: EPConfig = Field(default_factory=EPConfig)
    """Experts spread over devices."""
    topology: AxisOrder = list(get_args(Axis))
    """Axes from the slowest (devices far apart) to the fastest (neighbours); those left out follow in this order."""
