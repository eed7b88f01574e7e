"""Which versions of which library each patch is for, in one table; a test compares it with what is installed."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from packaging.specifiers import SpecifierSet

from torchacc.env import installed_version


@dataclass(frozen=True)
class PatchVersions:
    """What one patch is for."""

    library: str
    versions: str
    """As a package's requirement has them."""
    changes: str
    """What it changes or reaches into."""


PATCHES: Mapping[str, PatchVersions] = {
    # torch_patches.py
    "cuda_autocast_is_optional": PatchVersions("torch", ">=2.9,<2.14", "torch.cuda.amp.common, a function of it"),
    "total_norm_over_shards": PatchVersions("torch", ">=2.9,<2.14", "torch.nn.utils.clip_grad._get_total_norm()"),
    "clipping_of_gradients": PatchVersions("torch", ">=2.9,<2.14", "closures of torch.nn.utils.clip_grad"),
    "checkpoint_through": PatchVersions("torch", ">=2.9,<2.10", "what torch.utils.checkpoint.checkpoint() looks up"),
    "updates_through": PatchVersions("torch", ">=2.9,<2.14", "functions of torch.optim that update a group"),
    "runs_of_graphs": PatchVersions("torch", ">=2.9", "torch.autograd._engine_run_backward()"),
    "inference_mode_is_no_grad": PatchVersions("torch", ">=2.9,<2.10", "torch.inference_mode"),
    "ranges_while_profiling": PatchVersions("torch", ">=2.9,<2.14", "record_function() of FSDP2's groups"),
    "functions_of_dtensors": PatchVersions("torch", ">=2.9", "DTensor.__torch_function__()"),
    "optimizer_states": PatchVersions("torch", ">=2.9", "Optimizer.state_dict() and load_state_dict()"),
    "clearing_of_gradients": PatchVersions("torch", ">=2.9", "Optimizer.zero_grad()"),
    "unscaling_of_gradients": PatchVersions("torch", ">=2.9,<2.14", "torch.amp.GradScaler._unscale_grads_()"),
    # module_states.py
    "module_states": PatchVersions("torch", ">=2.9", "what Module.state_dict() and load_state_dict() call"),
    # of FSDP2 and torchao: float8_gather.py
    "float8_gather": PatchVersions("torchao", ">=0.16,<0.17", "the class of FSDP2's parameters, and torchao's tensors"),
    # for a forward under XLA: model_patches.py, transformers_masks.py, split_heads.py, blockwise_attention.py,
    # splash_attention.py
    "model_patches": PatchVersions("torch", ">=2.9,<2.10", "scaled_dot_product_attention(), and modules of a model"),
    "blockwise_attention": PatchVersions("torch", ">=2.9,<2.10", "scaled_dot_product_attention(), by model_patches"),
    "splash_attention": PatchVersions("jax", ">=0.8,<0.9", "backward of its splash attention, a private function"),
    "transformers_masks": PatchVersions("transformers", ">=4.53,<6", "functions of transformers.masking_utils"),
    "split_heads": PatchVersions("torch", ">=2.9,<2.10", "nothing: a mode in which products keep heads apart"),
    # of torch_xla: xla_lowerings.py, those beside it, loop_seed.py and loop_counter.py
    "xla_lowerings": PatchVersions("torch_xla", ">=2.9,<2.10", "operations of the dispatcher for XLA"),
    "activation_lowerings": PatchVersions("torch_xla", ">=2.9,<2.10", "as xla_lowerings, which registers them"),
    "extreme_lowerings": PatchVersions("torch_xla", ">=2.9,<2.10", "as xla_lowerings, which registers them"),
    "loss_lowerings": PatchVersions("torch_xla", ">=2.9,<2.10", "as xla_lowerings, which registers them"),
    "picture_lowerings": PatchVersions("torch_xla", ">=2.9,<2.10", "as xla_lowerings, which registers them"),
    "random_lowerings": PatchVersions("torch_xla", ">=2.9,<2.10", "as xla_lowerings, which registers them"),
    "softmax_lowerings": PatchVersions("torch_xla", ">=2.9,<2.10", "as xla_lowerings, which registers them"),
    "counter_random": PatchVersions("torch_xla", ">=2.9,<2.10", "operations of torch_xla.core.xla_builder"),
    "iota": PatchVersions("torch_xla", ">=2.9,<2.10", "operations of torch_xla.core.xla_builder"),
    "loop_seed": PatchVersions("torch_xla", ">=2.9,<2.10", "what torch_xla's scan asks for a program's data"),
    "loop_counter": PatchVersions("torch_xla", ">=2.9,<2.10", "the type of the counter of torch_xla's scan"),
    # of safetensors: safetensors_writing.py
    "safetensors_writing": PatchVersions("safetensors", ">=0.4,<1", "safetensors.torch._find_shared_tensors()"),
    # of transformers: dense_experts.py, expert_balance.py, sequence_attention.py, transformers_attention.py
    "dense_experts": PatchVersions("transformers", ">=5,<6", "ALL_EXPERTS_FUNCTIONS, and what modules of experts have"),
    "expert_balance": PatchVersions("transformers", ">=4.53,<6", "load_balancing_loss_func(), by its parameters"),
    "sequence_attention": PatchVersions("transformers", ">=5,<6", "functions of modules of models, which make masks"),
    "transformers_attention": PatchVersions("transformers", ">=5,<6", "what AttentionInterface has of flex attention"),
}
"""By the patch's function, or its file."""


@cache
def is_for_installed(patch: str) -> bool:
    """Return whether a patch is for the version that is installed; False where its library is not."""
    wanted = PATCHES[patch]
    version = installed_version(wanted.library)
    return version is not None and version in SpecifierSet(wanted.versions)
