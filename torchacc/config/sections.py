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
        """Look a name up that is not an option: pydantic's own, or none."""
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
    """Dtypes and kernels of the computation, and its compilation."""

    path = "compute"

    bf16: StrictBool = False
    """Compute in bfloat16."""
    fp16: StrictBool = False
    """Compute in float16, with a `torchacc.GradScaler` (native engine only)."""
    master_dtype: HighPrecision = "float32"
    """Dtype of the parameters that the optimizer steps, and of its state; `bfloat16` requires `bf16`."""
    reduce_dtype: HighPrecision = "float32"
    """Dtype in which gradients are summed over devices and micro-batches; under SPMD XLA chooses it."""
    fp8: StrictBool = False
    """Compute linear layers in float8, with torchao's float8 training. It requires `bf16`, the dtype of all other
    computation (native engine only)."""
    fp8_recipe: Float8Recipe = "tensorwise"
    """Granularity of the scales: one for each tensor (tensorwise), which also gathers weights in float8; or one for
    each row (rowwise), which is more exact and gathers weights in bfloat16."""
    fp8_layers: Patterns | None = None
    """Names of the linear layers to compute in float8, or of modules that contain them, with wildcards, such as
    `model.layers.*.mlp`; None for all linear layers except the one that computes the logits."""
    fp8_skip: Patterns | None = None
    """Names of linear layers not to compute in float8, or of modules that contain them."""
    fp8_min_features: Count | None = None
    """Minimum number of inputs and outputs of a layer to compute in float8; None for the sizes that torchao has
    measured to gain on an H100 or, with `fp8_layers`, for all of those layers."""
    fp8_emulate: StrictBool = False
    """Round to float8 and multiply in float32: slow, and runs on any device, to see the effect of float8 on a model."""
    attention: Attention = "auto"
    """Kernel of the attention: the model's own (auto); one of transformers' implementations, by its name there; or
    scaled_dot_product_attention() with a single backend of PyTorch (sdpa_flash, sdpa_efficient, sdpa_cudnn, sdpa_math).
    Under XLA: auto, eager, sdpa, and blockwise or flash, which store no value for each pair of tokens; on TPUs auto is
    blockwise."""
    acc_scaled_dot_attn: StrictBool = False
    """TorchAcc's older option for the device's own attention kernel: `attention = "sdpa"` natively, `"flash"` under
    XLA."""
    chunked_loss: StrictBool | Count = False
    """Compute the loss of a language model in chunks of tokens, so that the logits of all tokens never exist at once:
    number of tokens of a chunk on each device, or True for as many as have 64 Mi logits."""
    scan_layers: StrictBool = False
    """Run identical layers as a loop that compiles one layer, and recompute them in the backward pass (SPMD only)."""
    compile: StrictBool = False
    """Compile each unit with `torch.compile`. Identical units share their graphs (native engine only)."""
    compile_mode: CompileMode = "default"
    """Effort of the compiler: `max-autotune-no-cudagraphs` times several kernels for each product."""
    compile_dynamic: StrictBool | None = None
    """Compile once for all shapes (True), once for each shape (False), or for all shapes when a second shape occurs
    (None)."""
    compile_backend: Annotated[StrictStr, Field(min_length=1)] = "inductor"
    """Backend of `torch.compile`; `aot_eager` runs its graphs without compiling them, to debug graph breaks."""
    compile_cache: StrictStr | None = None
    """Folder that keeps compiled programs for the next start: those of XLA, except on the CPU, and natively those of
    `compile`. With None, XLA compiles at each start, and `torch.compile` uses a temporary folder of its own."""


class MemoryConfig(Section):
    """Options that trade time for device memory."""

    path = "memory"

    gc: StrictBool = False
    """Recompute the activations of each unit in the backward pass instead of keeping them (gradient checkpointing)."""
    gc_cls: ClassNames | None = None
    """Names of the module classes to recompute; None for the units of `dist.fsdp`."""
    gc_every: Count = 1
    """Recompute only one in this many of those modules, beginning with the first; 1 for all."""
    gc_cnt: Count | None = None
    """Maximum number of modules to recompute, beginning with the first; None for no limit."""
    gc_policy: RecomputePolicy = "full"
    """Operations to recompute in those modules: all (full), or all except matrix products, convolutions and fused
    attention, whose results are kept (save_matmuls; native engine only)."""
    step_in_backward: StrictBool = False
    """Step each weight as soon as the backward pass has computed its gradient, and free the gradient, so that the
    gradients of all weights never exist at once. Pass the optimizer to `accelerate()` (native engine only)."""
    offload_activations: StrictBool = False
    """Keep the tensors that the forward pass saves for the backward pass in host memory (native engine only)."""
    gpu_fraction: Share | None = None
    """Maximum share of a GPU's memory for this process, above 0 and up to 1; None for 0.75 under XLA, and for 1
    natively."""
    gpu_preallocate: StrictBool = True
    """Allocate that share when the device starts, instead of as it is needed (XLA only)."""


class DataLoaderConfig(Section):
    """Padding of batches to a few lengths, so that a step rarely recompiles, and prefetching."""

    path = "dataloader"

    buckets: Annotated[list[Count], Field(min_length=1)] | None = None
    """Lengths, in tokens, to pad batches to; a batch is padded to the shortest that fits."""
    max_length: Count | None = None
    """Length, in tokens, of the longest of evenly spaced buckets."""
    num_buckets: Count | None = None
    """Number of evenly spaced buckets up to `max_length`."""
    pad_value_dict: dict[StrictStr, Int64 | StrictFloat] | None = None
    """Padding value of each key of the batch; other keys are not padded."""
    pad_dim_dict: dict[StrictStr, Int64] | None = None
    """Dimension to pad of each key of the batch; the last dimension of other keys."""
    truncate: StrictBool = False
    """Truncate batches that are longer than the longest bucket, instead of raising an error."""
    prefetch: Natural = 2
    """Number of batches to read and move to the device ahead of the step."""


class DPConfig(Section):
    """Replicas of the model, each with its own part of the data."""

    path = "dist.dp"

    size: Count | None = None
    """Number of replicas; None for the number of devices divided by the sizes of the other axes."""


class TPConfig(Section):
    """Weights split inside of a layer."""

    path = "dist.tp"

    size: Count = 1
    """Number of devices that share a layer."""
    plan: TensorParallelRules | None = None
    """How to split parameters: regular expressions, searched for in their names, each with an axis for every dimension,
    `tp`, `fsdp` or None, such as `{"up.weight$": ["tp", None]}`. The first match applies. None for the plan of the
    model's family."""
    sequence_parallel: StrictBool = False
    """Split the activations between units along the sequence, over the same devices."""


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
    """What to shard: everything (FULL_SHARD), everything except parameters between forward and backward
    (SHARD_GRAD_OP), nothing (NO_SHARD: `size` replicas), or everything over `size` devices with `dist.dp.size` replicas
    (HYBRID_SHARD)."""
    wrap_layer_cls: ClassNames | None = None
    """Classes of the submodules that become units, or their names: one, or a collection of them."""
    min_num_params: Count | None = None
    """Make units of submodules that have at least this many parameters outside of smaller units."""
    wrap_modules: Patterns | WrapFunction | None = None
    """Names of the submodules that become units, with wildcards, such as `transformer.h.*`; or a function of a name and
    a module that returns whether the module becomes a unit."""
    flatten_parameters: StrictBool = False
    """Flatten the parameters of a unit into one tensor for its collectives, which is also what the optimizer sees."""
    sync_module_states: StrictBool = False
    """Broadcast the parameters and buffers of rank 0 before sharding."""
    use_spmd: StrictBool = False
    """Drive all devices from one process, or from one process on each TPU host (XLA only)."""
    shard_output_callable: ShardFunction | None = None
    """Function of (output, mesh) that shards the model's output under SPMD; None to shard its first tensor."""
    cpu_offload: StrictBool = False
    """Keep the shards of parameters, gradients and optimizer state in host memory, and run the optimizer there (native
    engine only)."""
    backward_prefetch: BackwardPrefetch = "BACKWARD_PRE"
    """When the backward pass gathers the next unit: before the gradients of the current one are computed
    (BACKWARD_PRE), after (BACKWARD_POST), or when it is needed (NONE)."""
    forward_prefetch: StrictBool = False
    """Gather the next unit before the current one's forward pass."""
    limit_all_gathers: StrictBool = True
    """Keep at most two gathered units in memory."""
    use_orig_params: StrictBool = True
    """Give the optimizer the model's own parameters, so that they can be in different groups."""
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
