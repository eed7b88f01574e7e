"""Turn the user's config into a frozen, complete copy; refuse contradictions."""

from collections.abc import Iterable
from copy import deepcopy
from math import prod

from torchacc.config.root import Config
from torchacc.config.sections import PPConfig, Section
from torchacc.env import Job
from torchacc.errors import ConfigError, shown

_WRAP_OPTIONS = ("wrap_layer_cls", "wrap_modules", "min_num_params")
_COMPILE_OPTIONS = ("compile_mode", "compile_dynamic", "compile_backend")
_FLOAT8_OPTIONS = ("fp8_recipe", "fp8_layers", "fp8_skip", "fp8_min_features", "fp8_emulate")
_NO_OTHER_KERNEL = ("auto", "sdpa")
"""Values of `compute.attention` that say nothing else than `compute.acc_scaled_dot_attn`."""
_RECOMPUTE_OPTIONS = ("gc_cls", "gc_every", "gc_cnt", "gc_policy")


def resolve(config: Config, job: Job, *, num_devices: int) -> Config:
    """Return a frozen copy with every axis sized; the config itself stays as it is.

    Args:
        config: The user's config.
        job: The processes of the job.
        num_devices: Devices of the whole job: its processes where each drives one device, otherwise what they drive
            together.

    Raises:
        ConfigError: The config contradicts itself or the job.
    """
    _refuse_contradictions(config)
    resolved = deepcopy(config)
    resolved.dist.dp.size = _dp_size(config, job, num_devices)
    resolved.memory.gc = config.memory.gc or config.dist.fsdp.activation_checkpointing
    if config.compute.acc_scaled_dot_attn:
        resolved.compute.attention = "sdpa"
    _refuse_lone_hybrid(resolved)
    _refuse_split_samples_of_replicas(resolved)
    _refuse_uneven_rings(resolved)
    _refuse_spread_experts_of_replicas(resolved)
    resolved.freeze()
    return resolved


def requested_devices(config: Config) -> int:
    """Return the number of devices that the axes ask for, where a `dp` that is left open asks for one."""
    return prod(_sizes(config).values())


def _sizes(config: Config) -> dict[str, int]:
    """Return the size of each axis, in the order of the sections of `config.dist`."""
    return {name: section.size or 1 for name, section in config.dist if name in config.dist.topology}


def _refuse_contradictions(config: Config) -> None:
    if config.compute.fp16 and config.compute.bf16:
        raise ConfigError("compute.fp16 and compute.bf16 are both True: devices compute in one of them; keep bf16")
    if config.compute.fp16 and config.compute.chunked_loss:
        raise ConfigError(
            f"compute.chunked_loss = {shown(config.compute.chunked_loss)} with compute.fp16 = True: its gradients are "
            "computed before a scaler has scaled the loss, and small ones would become zero: use config.compute.bf16, "
            "or set config.compute.chunked_loss = False"
        )
    if config.compute.master_dtype == "bfloat16" and not config.compute.bf16:
        raise ConfigError(
            "compute.master_dtype = 'bfloat16' keeps parameters in less precision than they are computed with: set "
            "config.compute.bf16 = True, or leave master_dtype at 'float32'"
        )
    given = [f"dist.fsdp.{name}" for name in _WRAP_OPTIONS if getattr(config.dist.fsdp, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} each choose the units: keep one, and set the other to None")
    _refuse_choice_without_recompute(config)
    _refuse_choice_without_compile(config)
    _refuse_choice_without_float8(config)
    _refuse_two_kernels(config)
    for name, default in (("num_microbatches", None), ("schedule", "gpipe"), ("stages_per_device", None)):
        value = getattr(config.dist.pp, name)
        if config.dist.pp.size == 1 and value != default:
            raise ConfigError(
                f"dist.pp.{name} = {value!r} with dist.pp.size = 1, so that there are no stages to keep busy: leave it "
                "out, or set config.dist.pp.size"
            )
    _refuse_stages_of_a_device(config.dist.pp)
    if config.memory.gc_policy != "full" and config.memory.offload_activations:
        raise ConfigError(
            f"memory.gc_policy = {config.memory.gc_policy!r} with memory.offload_activations = True: the results that "
            "are kept would stay on the device. Leave gc_policy at 'full', or offload_activations at False"
        )


def _refuse_stages_of_a_device(pp: PPConfig) -> None:
    given = f"dist.pp.stages_per_device = {pp.stages_per_device} with dist.pp.schedule = {pp.schedule!r}"
    if pp.stages_per_device is not None and pp.schedule != "interleaved":
        raise ConfigError(f"{given}, in which each device has one stage: leave it out, or set schedule = 'interleaved'")
    if pp.stages_per_device == 1:
        raise ConfigError(f"{given}, which is for several: set it to 2 or more, or schedule = '1f1b'")


def _refuse_options(section: Section, names: Iterable[str], why: str, switch: str) -> None:
    """Refuse options that mean nothing, as what they are for is switched off."""
    for name in names:
        value = getattr(section, name)
        if value != type(section).model_fields[name].default:
            raise ConfigError(
                f"{section.path}.{name} = {shown(value)} {why}: set config.{section.path}.{switch} = True, or leave "
                f"config.{section.path}.{name} out"
            )


def _refuse_choice_without_recompute(config: Config) -> None:
    if config.memory.gc or config.dist.fsdp.activation_checkpointing:
        return
    why = "chooses what is recomputed, and memory.gc is False, so that nothing is"
    _refuse_options(config.memory, _RECOMPUTE_OPTIONS, why, "gc")


def _refuse_choice_without_compile(config: Config) -> None:
    compute = config.compute
    if not compute.compile:
        why = "says how units are compiled, and compute.compile is False, so that none is"
        _refuse_options(compute, _COMPILE_OPTIONS, why, "compile")
    if compute.compile_mode != "default" and compute.compile_backend != "inductor":
        raise ConfigError(
            f"compute.compile_mode = {shown(compute.compile_mode)} is one of the backend 'inductor', and "
            f"compute.compile_backend is {shown(compute.compile_backend)}: leave one of them out"
        )


def _refuse_choice_without_float8(config: Config) -> None:
    compute = config.compute
    if compute.fp8 and not compute.bf16:
        raise ConfigError(
            "compute.fp8 = True with compute.bf16 = False: float8 is for the products of linear layers, and all around "
            "them would be in float32, or in float16, for which its kernels are not made: set config.compute.bf16 = "
            "True too"
        )
    if not compute.fp8:
        why = "says how layers compute in float8, and compute.fp8 is False, so that none does"
        _refuse_options(compute, _FLOAT8_OPTIONS, why, "fp8")


def _refuse_two_kernels(config: Config) -> None:
    compute = config.compute
    if compute.acc_scaled_dot_attn and compute.attention not in _NO_OTHER_KERNEL:
        raise ConfigError(
            f"compute.acc_scaled_dot_attn = True with compute.attention = {compute.attention!r}: the first is an older "
            "name of attention = 'sdpa'. Leave acc_scaled_dot_attn out"
        )


def _refuse_lone_hybrid(config: Config) -> None:
    dp, fsdp = config.dist.dp.size, config.dist.fsdp.size * config.dist.ep.size
    if config.dist.fsdp.sharding_strategy == "HYBRID_SHARD" and 1 in (dp, fsdp):
        raise ConfigError(
            f"dist.fsdp.sharding_strategy = 'HYBRID_SHARD' shards inside of groups and replicates across them, but "
            f"dp({dp}) * fsdp({fsdp}) has a single {'group' if dp == 1 else 'device in a group'}: make both larger "
            f"than 1, or use {'FULL_SHARD' if dp == 1 or config.dist.sp.size > 1 else 'NO_SHARD'!r}"
        )


def _refuse_split_samples_of_replicas(config: Config) -> None:
    if config.dist.sp.size > 1 and config.dist.fsdp.sharding_strategy == "NO_SHARD":
        raise ConfigError(
            f"config.dist.sp.size = {config.dist.sp.size} with config.dist.fsdp.sharding_strategy = 'NO_SHARD': "
            "parameters are sharded over the devices that share samples: leave the strategy at 'FULL_SHARD'"
        )


def _refuse_uneven_rings(config: Config) -> None:
    sp = config.dist.sp
    if sp.ring_size is not None and sp.size % sp.ring_size:
        raise ConfigError(
            f"config.dist.sp.ring_size = {sp.ring_size} with config.dist.sp.size = {sp.size}: each of the devices that "
            f"share a sample is in a ring of as many: choose a divisor of {sp.size}, or leave ring_size out"
        )


def _refuse_spread_experts_of_replicas(config: Config) -> None:
    if config.dist.ep.size > 1 and config.dist.fsdp.sharding_strategy == "NO_SHARD":
        raise ConfigError(
            f"config.dist.ep.size = {config.dist.ep.size} with config.dist.fsdp.sharding_strategy = 'NO_SHARD': "
            "experts are sharded over the devices that they are spread over: leave the strategy at 'FULL_SHARD'"
        )


def _dp_size(config: Config, job: Job, num_devices: int) -> int:
    """Return the size of `dp`, given or left over, once the axes are known to fill the job's devices."""
    sizes = _sizes(config)
    asked = prod(sizes.values())
    if config.dist.dp.size is None and num_devices % asked == 0:
        return num_devices // asked
    if asked == num_devices:
        return sizes["dp"]
    larger = [axis for axis, size in sizes.items() if size > 1] or ["fsdp"]
    arithmetic = f"config.dist.{larger[0]}.size = {asked}"
    if len(larger) > 1:
        arithmetic = f"config.dist: {' * '.join(f'{axis}({sizes[axis]})' for axis in larger)} = {asked}"
    raise ConfigError(f"{arithmetic}, but the job has {_count(num_devices)}. {_way_out(config, job, num_devices)}")


def _way_out(config: Config, job: Job, num_devices: int) -> str:
    asked = requested_devices(config)
    launch = f"`torchrun --nproc_per_node={asked} your_script.py`"
    if job.local_num_processes < job.num_processes:
        launch = f"{asked} processes on all machines together"
    if asked > num_devices == job.num_processes == 1 and not config.dist.fsdp.use_spmd:
        return (
            f"Either start one process per device: {launch}, or let this process drive all of them: "
            "`config.dist.fsdp.use_spmd = True`"
        )
    if asked > num_devices:
        others = asked // config.dist.fsdp.size
        fewer = "ask for fewer devices"
        if num_devices % others == 0:
            fewer = f"set `config.dist.fsdp.size = {num_devices // others}`"
        return f"Start one process per device: {launch}, or {fewer}"
    if num_devices % asked:
        return f"{asked} does not divide {num_devices}: choose sizes whose product does"
    return "Leave `config.dist.dp.size = None` to have it sized, or start fewer"


def _count(num_devices: int) -> str:
    return f"{num_devices} device" if num_devices == 1 else f"{num_devices} devices"
