"""Every private name of PyTorch that engines other than XLA's use, in one list: where, and why.

PyTorch may change or drop any of them in any version, and torchacc sets no upper bound on torch for the native engine.
So the engine asks here before it shards a model, and says which name is missing; a test builds what cannot be looked up
in a class, and says so for each name. (The XLA engines run with the one torch that torch_xla is built for.)
"""

import importlib
import importlib.metadata
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torchacc.errors import EngineError

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState as TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup

TESTED_WITH = ">=2.9,<2.14"
"""The versions of torch that the names are known to be in."""

_FSDP = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_FSDP}._fsdp_param_group:FSDPParamGroup"
_PARAMETER = f"{_FSDP}._fsdp_param:FSDPParam"
_STATE = f"{_FSDP}._fsdp_state:FSDPState"
_DTENSOR = "torch.distributed.tensor:DTensor"

_CLASSES = {
    "FSDPParam": _PARAMETER,
    "FSDPParamGroup": _GROUP,
    "TrainingState": f"{_FSDP}._fsdp_common:TrainingState",
    "NormBase": "torch.nn.modules.batchnorm:_NormBase",
    "SpectralNorm": "torch.nn.utils.parametrizations:_SpectralNorm",
}
"""What this module gives by import: name here -> where PyTorch has it."""


@dataclass(frozen=True)
class PrivateName:
    """One private name."""

    owner: str
    """The module, or `module:class`, that has it; of an instance, its class."""
    name: str
    """The attribute; empty for the owner itself."""
    used_in: str
    """The file, under `torchacc/engines`; of `LAUNCHER_NAMES` under `torchacc`."""
    why: str
    of_instances: bool = False
    """Whether only instances have it, so that looking it up needs one."""

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}" if self.name else self.owner

    def is_there(self, instance: Any = None) -> bool:
        """Return whether the installed torch has the name.

        Args:
            instance: One of the owner, for a name `of_instances`.
        """
        if instance is not None and hasattr(instance, self.name):
            return True
        try:
            found = look_up(self.owner)
        except (ImportError, AttributeError):
            return False
        return not self.name or hasattr(found, self.name)


def look_up(path: str) -> Any:
    """Return what is at `module` or `module:name.name`.

    Raises:
        ImportError: There is no such module.
        AttributeError: The module has no such name.
    """
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


def _of(owner: str, used_in: str, names: dict[str, str], *, of_instances: bool = False) -> list[PrivateName]:
    return [PrivateName(owner, name, used_in, why, of_instances) for name, why in names.items()]


_GROUPS = "native/fsdp_groups.py"
_UNIT = "native/fsdp_group.py"
_FULL = "native/full_shards.py"
_ARITHMETIC = "native/shard_arithmetic.py"
_FLOAT8 = "patches/float8_gather.py"
_EXPERTS = "native/expert_parallel.py"
_STEPS = "native/step_in_backward.py"

PRIVATE_NAMES: tuple[PrivateName, ...] = (
    *_of(f"{_FSDP}._fsdp_common:TrainingState", _UNIT, dict.fromkeys(
        ("IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"),
        "tells a forward from a backward where weights are gathered and freed",
    )),
    *_of(_GROUP, _UNIT, {
        "unshard": "overridden: reuses weights that wait for backward, and notes versions",
        "wait_for_unshard": "overridden: leaves inference mode",
        "reshard": "overridden: modules show their shards as soon as a forward is over",
        "post_backward": "overridden: gradients of a graph of gradients are reduced in the end",
        "finalize_backward": "frees what was gathered ahead",
        "is_sharded": "asks for the group's state",
        "is_unsharded": "asks for the group's state",
        "_to_sharded": "overridden, and called where weights are freed",
        "_to_unsharded": "modules show shards that are full weights",
        "_init_mp_dtypes": "overridden: all parameters of a group may be frozen",
    }),
    *_of(_GROUP, _UNIT, {
        "fsdp_params": "the parameters of a unit",
        "_training_state": "set to IDLE between forwards",
        "reduce_grads": "whether a backward is the last of its window",
        "all_reduce_grads": "whether a backward is the last of its window",
        "_reshard_after_forward": "whether the unit's weights are freed after its forward",
        "reshard_after_backward": "whether the unit's weights are freed after its backward",
        "_all_gather_result": "whether a gather is on its way",
        "_orig_dtype": "set where all parameters of the group are frozen",
        "_reduce_dtype": "set where all parameters of the group are frozen",
        "_partial_reduce_output": "dropped with the gradients of a window",
    }, of_instances=True),
    *_of(_PARAMETER, _UNIT, {
        "to_unsharded": "modules show the weights that waited for backward",
        "reset_sharded_param": "after a script gave a parameter other memory",
        "_setattr_on_modules": "modules show the shards while weights wait for backward",
        "accumulate_unsharded_grad_if_needed": "adds gradients of a split backward",
        "to_accumulated_grad_if_needed": "adds gradients of a split backward in the dtype of their reduction",
    }),
    *_of(_PARAMETER, _UNIT, {
        "sharded_param": "the parameter that a script sees",
        "_sharded_local_tensor": "whose version tells of changes unseen",
        "_unsharded_param": "what graphs of the forward know instead of the parameter",
        "unsharded_accumulated_grad": "dropped with the gradients of a window",
        "orig_dtype": "of a group whose parameters are all frozen",
        "reduce_dtype": "of a group whose parameters are all frozen",
        "is_dtensor": "whether layers are split, too",
    }, of_instances=True),
    *_of(_GROUP, _FULL, {
        "_all_gather_process_group": "whether other processes have parts of the weights",
        "_is_hsdp": "whether other processes have gradients of the same weights",
    }),
    *_of(_GROUP, _FULL, {
        "gradient_divide_factor": "whether gradients are scaled",
        "_all_reduce_hook": "whether gradients are scaled, as those of experts",
        "_orig_dtype": "whether gradients are cast",
        "_reduce_dtype": "whether gradients are cast",
    }, of_instances=True),
    *_of(_PARAMETER, _FULL, {
        "init_unsharded_param": "makes the tensor that modules compute with",
        "to_sharded_dtensor": "makes a gradient of the shard",
        "accumulate_unsharded_grad_if_needed": "adds up the gradients of a window",
        "unsharded_accumulated_grad_data": "the gradients of a window",
        "unsharded_grad_data": "the gradient that backward has computed",
    }),
    *_of(_PARAMETER, _FULL, {
        "all_gather_outputs": "the memory of that tensor, and what is freed after a use",
        "offload_to_cpu": "whether the shard is on the device",
        "param_dtype": "whether the shard has the dtype of products",
        "_orig_size": "whether the shard has all of the weight",
    }, of_instances=True),
    *_of(_PARAMETER, _FLOAT8, {
        "_sharded_local_tensor": "overridden: says how a weight is gathered in float8",
        "_init_extensions": "after a weight's way to be gathered has changed",
    }),
    *_of(_PARAMETER, _FLOAT8, {
        "_module_info": "the layer of a weight",
        "_sharded_param_data": "the shard that is rounded, with its padding",
        "padded_sharded_param_size": "the shape of the padded shard",
    }, of_instances=True),
    *_of(_PARAMETER, _EXPERTS, {"reset_sharded_param": "after a shard of some experts has become one of all"}),
    *_of(_GROUP, _EXPERTS, {"fsdp_params": "the parameters of a module of experts"}, of_instances=True),
    *_of(_STATE, _EXPERTS, {"_fsdp_param_group": "the group of a module of experts"}, of_instances=True),
    *_of(_STATE, _GROUPS, {
        "_root_post_backward_final_callback": "wrapped: says that no more gradients of a backward are to come",
        "_register_root_post_backward_final_callback": "sees to it that a backward with a graph ends with it",
        "_register_pre_backward_hook": "gathers a unit whose backward begins inside of it",
        "_lazy_init": "makes the model the root, also where a unit is called first",
    }),
    *_of(_STATE, _GROUPS, {
        "_fsdp_param_group": "the group of a unit",
        "_modules": "the modules of a unit",
        "_is_root": "whether the root is known",
        "_training_state": "set to IDLE between forwards",
        "_state_ctx": "reset after a backward that raised",
        "_comm_ctx": "reset after a backward that raised",
    }, of_instances=True),
    *_of(f"{_FSDP}._fsdp_state:FSDPStateContext", _GROUPS, {
        "post_backward_final_callback_queued": "tells of a backward that raised, and was never finished",
        "iter_forward_root": "reset after a backward that raised",
    }, of_instances=True),
    *_of(f"{_FSDP}._fsdp_param_group:FSDPCommContext", _GROUPS, dict.fromkeys(
        ("all_gather_state", "reduce_scatter_state", "post_forward_order"), "reset after a backward that raised"
    ), of_instances=True),
    *_of("torch._C", _GROUPS, {"_current_graph_task_id": "whether a backward runs"}),
    *_of(_DTENSOR, _ARITHMETIC, {"__torch_function__": "overridden: what a script computes with shards"}),
    *_of(_DTENSOR, _ARITHMETIC, {
        "_spec": "how a shard lies, asked in each call; `device_mesh` and `placements` go through __torch_function__",
        "_local_tensor": "the shard itself, to be set after a sum is finished",
    }, of_instances=True),
    *_of("torch.distributed.tensor.placement_types:_StridedShard", _EXPERTS, {"": "shards of what split layers hold"}),
    *_of("torch._C", _ARITHMETIC, {"DisableTorchFunctionSubclass": "calls PyTorch's own part of what is overridden"}),
    *_of("torch.autograd", "patches/torch_patches.py", {
        "_engine_run_backward": "patched: runs graphs, given other inputs, and gives other gradients",
    }),
    *_of("torch.autograd.variable:Variable", "native/gradient_reducer.py", {
        "_execution_engine": "calls back when a backward has run",
    }),
    *_of("torch.optim:Optimizer", _STEPS, {
        "_optimizer_step_pre_hooks": "tells that a script has a hook before its step",
    }, of_instances=True),
    *_of("torch._C", "native/split_backward.py", {
        "_nn": "tells that a script has another `F.linear`",
        "_len_torch_function_stack": "tells of a mode of a script's",
    }),
    *_of("torch:Tensor", "native/split_backward.py", {"_version": "whether a hook has changed it"}, of_instances=True),
    *_of("torch", "native/ring_attention.py", {"_fused_sdp_choice": "the kernel that PyTorch would choose"}),
    *_of("torch:ops.aten", "native/ring_attention.py", dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
        ),
        "a kernel of attention that returns the logarithms of its softmax's sums",
    )),
    *_of("torch._C", "native/gradients.py", {"_functorch": "tells a batch of gradients (`is_grads_batched`)"}),
    *_of("torch._C", "sharded_model.py", {"_functorch": "tells a transform of torch.func"}),
    *_of("torch._C._autograd", "native/stage_schedules.py", {
        "_top_saved_tensors_default_hooks": "tells a forward that a checkpoint of the script's will compute again",
    }),
    *_of("torch", "native/gradients.py", {"_foreach_norm": "norms of many gradients in one call"}),
    *_of("torch.nn.modules.batchnorm:_NormBase", "recompute.py", {"": "norms with running statistics"}),
    *_of("torch.nn.utils.parametrizations:_SpectralNorm", "recompute.py", {"": "writes what it reads"}),
    *_of("torch", "scaler.py", {"_amp_foreach_non_finite_check_and_unscale_": "unscales this process's gradients"}),
    *_of("torch.amp.grad_scaler:GradScaler", "scaler.py", {"_unscale_grads_": "overridden: all processes skip a step"}),
    *_of("torch._C._distributed_c10d", "process_group.py", {"HashStore": "a process group of a single process"}),
    *_of("torch.utils._pytree", "native/native_engine.py", {
        "register_dataclass": "FSDP2 finds tensors in outputs by the pytree",
        "tree_leaves": "the tensors in an output or a call",
        "tree_map": "calls with full tensors in the place of shards",
        "tree_map_only": "replays calls of a recorded initialisation",
    }),
    *_of("torch.utils._python_dispatch", "deferred.py", {"TorchDispatchMode": "records an initialisation"}),
    *_of("torch.utils._python_dispatch", "recompute.py", {"_disable_current_modes": "copies buffers unseen"}),
    *_of("torch._C", "deferred.py", {"DisableTorchFunction": "sees a deferred tensor as what it is"}),
    *_of("torch._ops:OpOverload", "deferred.py", {"": "an operation that is recorded"}),
    *_of("torch._ops:OpOverload", "deferred.py", {"_schema": "what an operation writes to"}, of_instances=True),
    *_of("torch:UntypedStorage", "deferred.py", {"_cdata": "which memory tensors share"}, of_instances=True),
    *_of("torch:Tensor", "native/activation_offload.py", {"_base": "whose view a saved tensor is"}, of_instances=True),
    *_of("torch:Tensor", _GROUPS, {"_version": "how often a shard was written to"}, of_instances=True),
    *_of("torch.nn:Module", "base.py", {"_apply": "refuses to move a sharded model"}),
    *_of("torch.nn:Module", "initial_values.py", {
        "_parameters": "puts shards in the place of parameters",
        "_buffers": "moves buffers",
        "_non_persistent_buffers_set": "which buffers no checkpoint holds",
    }, of_instances=True),
    *_of("torch.amp:GradScaler", "patches/torch_patches.py", {
        "_unscale_grads_": "patched: tells that a script has a scaler of its own",
    }),
    *_of("torch.distributed.distributed_c10d", "process_group.py", {
        "_get_default_store": "lets processes find out who has not come to a call",
    }),
    *_of("torch.nn.utils.clip_grad", "patches/torch_patches.py", {
        "_get_total_norm": "patched: the norm of shards",
        "_group_tensors_by_device_and_dtype": "patched: tells that gradients are clipped",
    }),
    *_of("torch._higher_order_ops.flex_attention", "patches/transformers_attention.py", {
        "create_fw_bw_graph": "patched: looks at changes of scores outside of recompute",
    }),
    *_of("torch.cuda.amp.common", "patches/torch_patches.py", {"amp_definitely_not_available": "patched"}),
    *_of("torch.autograd:Node", "device_losses.py", {
        "_saved_reduction": "tells a loss that is a sum",
        "_saved_self_sym_sizes": "tells a loss that is a sum",
    }, of_instances=True),
)  # fmt: skip
"""All of them."""


_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
_MULTIPROCESSING = "torch.distributed.elastic.multiprocessing"
_LAUNCHER = "launch/agent.py"

LAUNCHER_NAMES: tuple[PrivateName, ...] = (
    *_of(_AGENT, _LAUNCHER, {
        "_start_workers": "overridden: hands the processes to the launcher",
        "_monitor_workers": "overridden: the launcher says when all processes have ended",
        "_exit_barrier": "overridden: the machines have waited for one another",
    }),
    *_of(_AGENT, _LAUNCHER, {"_pcontext": "the processes that were started"}, of_instances=True),
    *_of("torch.distributed.elastic.agent.server.api:SimpleElasticAgent", _LAUNCHER, {
        "_store": "tells the machines how each has ended",
    }, of_instances=True),
    *_of(f"{_MULTIPROCESSING}.api:SubprocessContext", _LAUNCHER, {
        "subprocess_handlers": "the process of each local rank",
    }, of_instances=True),
    *_of(f"{_MULTIPROCESSING}.subprocess_handler.subprocess_handler:SubprocessHandler", _LAUNCHER, {
        "proc": "the process itself, whose end the launcher watches",
    }, of_instances=True),
)  # fmt: skip
"""Those that the launcher uses of torchrun's agent. A process that trains does not load it, and does not check them."""


@cache
def check_installed_torch() -> None:
    """Check that the installed torch has what can be looked up without a sharded model.

    Raises:
        EngineError: It has not.
    """
    missing = [each for each in PRIVATE_NAMES if not each.of_instances and not each.is_there()]
    if missing:
        raise _missing(missing[0])


def _missing(name: PrivateName) -> EngineError:
    return EngineError(
        f"torch {importlib.metadata.version('torch')} has no {name}, which engines/{name.used_in} needs ({name.why}): "
        f"torchacc knows torch {TESTED_WITH}. Install one of these, or a newer torchacc"
    )


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return look_up(_CLASSES[name])
    except (ImportError, AttributeError) as error:
        used = next(each for each in PRIVATE_NAMES if each.owner == _CLASSES[name])
        raise _missing(PrivateName(used.owner, "", used.used_in, used.why)) from error
