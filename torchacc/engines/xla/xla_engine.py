"""What the two XLA engines share: they move data, and prepare models and optimizers to compile once."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchacc.config.sections import MemoryConfig
from torchacc.data import make_buckets
from torchacc.data.tree import map_tensors, tensors_in
from torchacc.engines import recompute
from torchacc.engines.attention_kernels import BLOCKWISE, FLASH, IN_BLOCKS, OWN, asked_of_xla
from torchacc.engines.base import NO_GPU, Engine
from torchacc.engines.compile_report import CompileReport
from torchacc.engines.deferred import take_values
from torchacc.engines.fused_steps import leave_out_fused
from torchacc.engines.initial_values import kept_dtype, move_buffers
from torchacc.engines.memory import Memory
from torchacc.engines.optimizers import is_of_torchao
from torchacc.engines.patches import (
    blockwise_attention,
    model_patches,
    splash_attention,
    torch_patches,
    xla_lowerings,
)
from torchacc.engines.sharded_model import HANDLE, ShardedModel
from torchacc.engines.xla import hardware, runtime
from torchacc.engines.xla.compile_watch import CompileWatch
from torchacc.engines.xla.gather import (
    EDITED_PER_PROCESS,
    Gatherer,
    UnitHooks,
    Weight,
    install_unit,
    lost_edit,
    replace_parameter,
    weight_numbers,
)
from torchacc.engines.xla.initial_state import initialize_state
from torchacc.engines.xla.refused_options import refuse_options
from torchacc.engines.xla.repeated_forward import Recompute, know_checkpoint
from torchacc.engines.xla.scalars import UpdateNumbers
from torchacc.engines.xla.tpu import PLATFORM
from torchacc.engines.xla.xla_shards import XlaShards
from torchacc.errors import ConfigError, EngineError
from torchacc.logging import get_logger
from torchacc.parallel.axes import Role
from torchacc.parallel.plan import PlannedParameter, ShardingPlan

_log = get_logger(__name__)

_watch = CompileWatch()  # of the process, as XLA's own counters are

_XLA_SCHEDULES = "XLA's own scheduler decides when weights are gathered"


class XlaEngine(Engine):
    """An engine whose devices are XLA's."""

    is_lazy: ClassVar[bool] = True
    host: ClassVar[torch.device] = torch.device("cpu")
    """Where values are made that are moved to the devices."""
    no_effect: ClassVar[dict[str, str]] = {
        "dist.fsdp.backward_prefetch": _XLA_SCHEDULES,
        "dist.fsdp.forward_prefetch": _XLA_SCHEDULES,
        "dist.fsdp.limit_all_gathers": _XLA_SCHEDULES,
        "dist.fsdp.use_orig_params": "flatten_parameters decides whether parameters keep their names",
    }

    def options_without_effect(self) -> Mapping[str, str]:
        """Return what means nothing to XLA, or not on this machine's devices."""
        return self.no_effect if runtime.runs_on_gpu() else {**self.no_effect, **NO_GPU}

    @classmethod
    def runs_on_cpu(cls) -> bool:
        """Return whether XLA's devices are the CPU."""
        return runtime.runs_on_cpu()

    @classmethod
    def find_devices(cls) -> str:
        """Return the devices that the runtime has."""
        runtime.check_versions()
        hardware.check_platform()
        # Others may use the GPU meanwhile: its memory is not taken for a look.
        runtime.use_gpu_plugin(MemoryConfig(gpu_preallocate=False), drives_all=True)
        found = runtime.count_devices()
        return "CPU" if runtime.runs_on_cpu() else f"{runtime.platform()}, {found} of them"

    @property
    def device(self) -> torch.device:
        """The XLA device; under SPMD it stands for all of them."""
        return torch.device("xla:0")

    @property
    def has_tpu_kernels(self) -> bool:
        """Whether programs may hold kernels that are written for TPUs."""
        return runtime.platform() == PLATFORM

    @property
    def attention(self) -> str:
        """What computes attention, of `attention_kernels.OF_XLA`."""
        name = asked_of_xla(self.config.compute)
        # In blocks a step for TPUs holds less and moves less, by their compiler, which could not split such blocks.
        is_in_blocks = name == OWN and self.has_tpu_kernels and self.mesh.size(Role.SEQUENCE) == 1
        return BLOCKWISE if is_in_blocks else name

    @property
    def drops_barriers(self) -> bool:
        """Whether the devices' compiler takes optimization barriers away before it merges what is equal."""
        return runtime.runs_on_cpu()

    def by_heads(
        self, function: Callable[..., Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Run a function of tensors of shape (samples, heads, …) on each device's samples and heads."""
        return function(*tensors)

    def check(self, model: nn.Module) -> None:
        """Refuse what XLA's devices cannot do."""
        refuse_options(self.config)
        super().check(model)
        if self.attention == FLASH and self.has_tpu_kernels:
            splash_attention.check_installed()
        _refuse_inference_mode()
        if self.config.compute.compile_cache is not None and runtime.runs_on_cpu():
            raise ConfigError(
                f"compute.compile_cache = {self.config.compute.compile_cache!r}: XLA's devices are this machine's CPU, "
                "whose compiled programs XLA can write and not read again: set config.compute.compile_cache = None"
            )

    def seed(self, seed: int) -> None:
        """Seed the host's generator and XLA's."""
        super().seed(seed)
        runtime.set_random_seed(seed + self.job.rank)

    def random_state(self) -> dict[str, Any]:
        """Run what has been recorded, and return the state of the host's generator and XLA's seed."""
        if self.has_recorded:
            self.sync()
        return {**super().random_state(), "xla": runtime.random_seed()}

    def check_random_state(self, state: Mapping[str, Any]) -> None:
        """Refuse what is not a state of the host's generator, or no seed of XLA's where there is one."""
        super().check_random_state(state)
        seed = state.get("xla")
        if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**64):
            raise ValueError("XLA's seed is not a number of 64 bits")

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        """Put the host's generator where it was, and XLA's, if it was XLA then, too."""
        super().set_random_state(state)
        seed = state.get("xla")
        if seed is not None:
            runtime.set_random_seed(seed)

    def to_device(self, batch: Any) -> Any:
        """Move a host batch to the device, all of its tensors in one transfer."""
        moved = iter(self.move_inputs(tensors_in(batch)))
        return map_tensors(lambda tensor: next(moved), batch)

    def copy_to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return copies of tensors on the host; None where some would have to be computed by a program first."""
        on_device = [tensor for tensor in tensors if tensor.device.type == "xla"]
        if not runtime.are_data(on_device):
            return None
        copied = iter(runtime.to_host(on_device))
        return [next(copied) if tensor.device.type == "xla" else tensor for tensor in tensors]

    @abstractmethod
    def move_inputs(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Move tensors of a batch to the device."""

    has_recorded: bool = False
    """Whether a model ran since the last sync. A sync of nothing would wait for the devices all the same."""

    def sync(self, *, wait: bool = False) -> None:
        """Compile and run what has been recorded.

        Args:
            wait: Whether to return when the devices are done.
        """
        seed = runtime.random_seed()
        runtime.sync(wait=wait)
        if not self.has_recorded:
            # torch_xla moves its seed even so: then a step's random numbers would depend on whether a checkpoint was
            # saved or loaded before it.
            runtime.set_random_seed(seed)
        self.has_recorded = False

    def end_batch(self) -> None:
        """Run what the last batch has left recorded, such as an evaluation's forward."""
        if self.has_recorded:
            self.sync()

    def compile_report(self) -> CompileReport:
        """Return what has been compiled in this process so far, by this engine and those before it."""
        return _watch.report()

    def read_scalars(self, scalars: Sequence[torch.Tensor]) -> list[float]:
        """Return the values of tensors without dimensions, without a program that would put them together."""
        return [scalar.item() for scalar in runtime.to_host([scalar.detach() for scalar in scalars])]

    def memory(self) -> Memory | None:
        """Return what PJRT says of the fullest device, or the process's where they are the CPU."""
        if runtime.runs_on_cpu():
            return super().memory()
        peak = runtime.peak_bytes()
        return None if peak is None else Memory(peak, "device")

    def device_name(self) -> str:
        """Return the kind of device, as PJRT names it."""
        return super().device_name() if runtime.runs_on_cpu() else runtime.device_kind()

    @cached_property
    def num_lengths(self) -> int:
        """How many lengths a batch may have."""
        options = self.config.dataloader
        if options.buckets is None and options.max_length is None:
            return 1
        return len(make_buckets(options.buckets, options.max_length, options.num_buckets))

    def open_compile_cache(self) -> None:
        """Keep compiled programs where the config says, each process in a folder of its own."""
        if self.config.compute.compile_cache is not None:
            mine = f"{self.name}-{self.job.rank}-of-{self.job.num_processes}"
            runtime.open_compile_cache(Path(self.config.compute.compile_cache).expanduser() / mine)


class XlaModel(ShardedModel):
    """A model whose parameters are shards on XLA devices."""

    engine: XlaEngine

    def __init__(self, engine: XlaEngine, model: nn.Module, plan: ShardingPlan) -> None:
        super().__init__(engine, model, plan)
        self._units: list[UnitHooks] = []
        self._recompute = Recompute(self._units, self.patched, drops_barriers=self.engine.drops_barriers)
        self._weight_numbers = weight_numbers(self)
        self._freed: set[torch.Tensor] = set()
        """The parameters whose gradients a step has freed since the last forward that needs gradients."""
        self._uncleared: set[torch.Tensor] = set()
        """The parameters whose gradients a step has freed, and the script has not cleared since."""
        self._warned = False
        self._open_steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._numbers: dict[torch.Tensor, UpdateNumbers] = {}
        """By the first of the parameters that are updated together."""
        _keep_numbers_on_device()
        know_checkpoint()
        _compute_alike_in_inference_mode()
        xla_lowerings.install()

    @property
    @abstractmethod
    def shards(self) -> XlaShards:
        """What this process holds of the parameters."""

    def _install_unit(self, module: nn.Module, gatherer: Gatherer) -> None:
        """Gather a unit's weights around its forward."""
        self._units.append(install_unit(module, gatherer))

    def _install_recompute(self) -> None:
        """Recompute the plan's modules in backward, once their units are installed."""
        if self.plan.recomputed:
            recompute.install(self.model, self.plan.recomputed, self._recompute)

    def _move_buffers(self) -> None:
        """Move the buffers to the device, and tensors that modules keep as plain attributes."""
        move_buffers(self.model, self.engine.device)
        _move_plain_tensors(self.model, self.engine.device)

    def _make_weights(
        self, parameters: Iterable[PlannedParameter], shard: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[tuple[nn.Parameter, Weight]]:
        """Replace parameters by their shards in the model.

        Args:
            parameters: What to replace.
            shard: Turns a full parameter into this device's shard of it.

        Yields:
            The original parameter, and the weight that stands for it.
        """
        for planned in parameters:
            owners = planned.owners(self.model)
            original = self.model.get_parameter(planned.name)
            dtype = kept_dtype(original.dtype, self.plan)
            full = take_values(original).detach().to(dtype)
            new = nn.Parameter(shard(full), requires_grad=original.requires_grad)
            replace_parameter(owners, new)
            lowered = self.plan.compute_dtype != "float32" and _is_multiplied(original, owners[0][0])
            computed = getattr(torch, self.plan.compute_dtype) if lowered else dtype
            yield original, Weight(planned.name, new, owners, planned.shape, computed, next(self._weight_numbers))

    def _run(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's forward in the compute dtype, with the patches that XLA needs."""
        if torch.is_grad_enabled():
            self._freed.clear()
        _watch.on_forward(self.model, args, kwargs, num_lengths=self.engine.num_lengths)
        self._open_steps.clear()  # of steps that raised
        self.engine.has_recorded = True
        runtime.note_random_seed()
        with ExitStack() as stack:
            stack.enter_context(self._recompute.running())
            stack.enter_context(self.patched())
            if self.plan.compute_dtype != "float32":
                stack.enter_context(torch.autocast("xla", dtype=getattr(torch, self.plan.compute_dtype)))
            try:
                return inner(*args, **kwargs)
            except (
                RuntimeError
            ) as error:  # autograd refuses it first where all weights of a unit are one tensor's parts
                if "GatherBackward is a view" in str(error):
                    raise lost_edit(None, EDITED_PER_PROCESS) from error
                raise

    def _after(self, tensor: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        """Return a tensor that waits for others, so that XLA does not hold the logits of several chunks at a time."""
        import torch_xla.core.xla_model as xm

        tensor = tensor.clone()
        xm.optimization_barrier_([tensor, *others])
        return tensor

    def patched(self) -> AbstractContextManager[None]:
        """Return a context of the patches that a forward needs, and whatever of it is recomputed in backward."""
        return model_patches.patches(self._replace_attention)

    def _replace_attention(self, original: model_patches.Attention) -> model_patches.Attention:
        """Return what computes attention in place of PyTorch's function."""
        name = self.engine.attention
        if name not in IN_BLOCKS:
            return original
        # The masks of all blocks take the compiler many minutes, which nobody has asked for who has named no kernel.
        takes_dropout = self.engine.config.compute.attention != OWN
        in_blocks = blockwise_attention.replace(original, takes_dropout=takes_dropout)
        if name == BLOCKWISE or not self.engine.has_tpu_kernels:
            return in_blocks
        return splash_attention.replace(original, in_blocks, self.engine.by_heads)

    def before_step(self, optimizer: torch.optim.Optimizer, *, makes_gradients: bool = False) -> bool:
        """Make an optimizer of this model ready for its next step, or for the step that this one inherits."""
        if is_of_torchao(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} of torchao is not available under XLA: torchao compiles its step for "
                "PyTorch's own devices. Use config.backend = 'native', or an optimizer of torch.optim"
            )
        is_among_first = super().before_step(optimizer, makes_gradients=makes_gradients)
        if leave_out_fused(optimizer):  # asked each time, as a checkpoint may be loaded between two steps
            _log.info("fused=True has no effect under XLA, which fuses the step of %s itself", type(optimizer).__name__)
        if optimizer not in self._open_steps and not makes_gradients:
            self._check_gradients_are_there(optimizer)
            self._check_gradients_were_cleared(optimizer)
        self._open_steps[optimizer] = self._open_steps.get(optimizer, 0) + 1
        reason = initialize_state(optimizer, self.shards.place_shaped, self._to_device, self.engine.host)
        if reason is not None:
            _watch.note(reason)
        _watch.before_step(optimizer, self._names)
        return is_among_first

    @cached_property
    def _names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter in self.model.named_parameters()}

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a tensor that every process has alike, which is not a batch of which each has rows."""
        return self.engine.move_inputs([tensor])[0]

    def _numbers_on_device(self, update: str, parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context in which the numbers of an update of these parameters are tensors on the device.

        Args:
            update: The name of the function of torch.optim that updates them.
            parameters: Parameters of one optimizer group.
        """
        return self._numbers.setdefault(parameters[0], UpdateNumbers(self._to_device)).on_device(update)

    def on_zero_grad(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Record that the script clears its gradients."""
        super().on_zero_grad(optimizer)
        self._freed.clear()
        if optimizer is None:
            self._uncleared.clear()
        else:
            self._uncleared.difference_update(p for group in optimizer.param_groups for p in group["params"])

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Free the gradients and run the step: a gradient that is still alive would be an output of the program."""
        left = self._open_steps.pop(optimizer, 1) - 1
        if left:  # PyTorch's hooks also run for the step that a subclass calls inside of its own
            self._open_steps[optimizer] = left
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._freed.add(parameter)
                    self._uncleared.add(parameter)
                parameter.grad = None
        self.engine.sync()
        _watch.after_step(optimizer)

    def _check_gradients_are_there(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a second step with gradients that the first, of this or another optimizer, has freed."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gone = [parameter for parameter in parameters if parameter.grad is None and parameter in self._freed]
        if gone:
            raise EngineError(
                f"the gradients that this {type(optimizer).__name__} is to step with are gone, as that of "
                f"{self._names.get(gone[0])!r}: under XLA a step frees the gradients of its optimizer's parameters. "
                "Call backward() before each step, and let only one optimizer hold a parameter"
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients, unless a step has freed them."""
        if self._freed and all(parameter.grad is None for parameter in self.model.parameters()):
            raise EngineError(
                "there are no gradients to clip any more: under XLA a step frees the gradients of its optimizer's "
                "parameters. Clip them between backward() and step()"
            )
        return super().clip_grad_norm_(max_norm, norm_type)

    def _check_gradients_were_cleared(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once of a step whose gradients would, without XLA, be added to those of the step before."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if not self._warned and any(p.grad is not None and p in self._uncleared for p in parameters):
            self._warned = True
            _log.warning(
                "no optimizer.zero_grad() came after the optimizer's step. Under XLA the step frees the gradients, so "
                "that they do not add up from one step to the next: call zero_grad() before each backward"
            )


@functools.cache
def _keep_numbers_on_device() -> None:
    torch_patches.hold_until_exit(torch_patches.updates_through(_update, ("_single_tensor_",)))


def _update(update: Callable[..., None], parameters: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    with _numbers_on_device(update.__name__, parameters):
        update(parameters, *args, **kwargs)


@functools.cache
def _compute_alike_in_inference_mode() -> None:
    torch_patches.hold_until_exit(torch_patches.inference_mode_is_no_grad())


def _numbers_on_device(update: str, parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    owner = vars(parameters[0]).get(HANDLE) if parameters else None
    return owner._numbers_on_device(update, parameters) if isinstance(owner, XlaModel) else nullcontext()


def _refuse_inference_mode() -> None:
    """Refuse the mode that PyTorch is in already; `_compute_alike_in_inference_mode()` sees to later ones."""
    if torch.is_inference_mode_enabled():
        raise EngineError(
            "accelerate() inside of torch.inference_mode(): the weights that it makes could never be trained, and XLA "
            "computes some operations wrongly there. Call accelerate() outside of it, and evaluate under "
            "torch.no_grad() or torch.inference_mode() afterwards"
        )


def _is_multiplied(parameter: torch.Tensor, owner: nn.Module) -> bool:
    """Return whether a parameter goes into matrix products, which is where a lower precision pays.

    An embedding stays in its masters' dtype: it starts the residual stream.
    """
    return parameter.dim() >= 2 and parameter.is_floating_point() and not isinstance(owner, nn.Embedding)


def _move_plain_tensors(model: nn.Module, device: torch.device) -> None:
    """Move tensors that modules keep as plain attributes, as `Module.to()` would not."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                setattr(module, name, value.to(device))
