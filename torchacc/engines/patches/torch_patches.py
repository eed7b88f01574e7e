"""Patches of PyTorch itself that hold while an engine runs; `versions.py` has the versions that each is for."""

import atexit
import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint

from torchacc.engines.patches.versions import PATCHES, is_for_installed
from torchacc.errors import EngineError


def hold_until_exit(patch: AbstractContextManager[None]) -> None:
    """Enter a patch now, and leave it when the process ends."""
    stack = ExitStack()
    stack.enter_context(patch)
    atexit.register(stack.close)


@contextmanager
def cuda_autocast_is_optional() -> Iterator[None]:
    """Patch `torch.cuda.amp.autocast(dtype=torch.bfloat16)` to do nothing but warn where there is no CUDA.

    So it is on a machine without torch_xla. With torch_xla installed, PyTorch takes CUDA's autocast for available
    (`torch/cuda/amp/common.py`), and raises that the device does not support bfloat16. The precision of a script
    comes from `config.compute`.
    """
    if not is_for_installed("cuda_autocast_is_optional"):
        yield
        return
    from torch.cuda.amp import common

    original = common.amp_definitely_not_available
    common.amp_definitely_not_available = lambda: not torch.cuda.is_available()
    try:
        yield
    finally:
        common.amp_definitely_not_available = original


def knows_clipping() -> bool:
    """Return whether this PyTorch's clipping asks for a total norm as `total_norm_over_shards()` knows it."""
    return is_for_installed("total_norm_over_shards")


@contextmanager
def total_norm_over_shards(
    total_norm: Callable[[Sequence[torch.Tensor], float], torch.Tensor | None],
) -> Iterator[None]:
    """Patch `torch.nn.utils.clip_grad_norm_()` and `get_total_norm()` to take norms of full gradients from shards.

    The latter is a closure, of which a script may have a name of its own: what it calls is replaced.

    Args:
        total_norm: Returns the norm of gradients, given them and the norm's order; None where they are not shards.
    """
    if not knows_clipping():
        raise EngineError(
            f"torch {importlib.metadata.version('torch')}: its clip_grad_norm_() would see a shard of each gradient, "
            f"which is only mended for torch {PATCHES['total_norm_over_shards'].versions}"
        )
    from torch.nn import utils
    from torch.nn.utils import clip_grad

    # torch_xla puts a copy of its own in place of this one when it is imported.
    replaced, utils.clip_grad_norm_ = utils.clip_grad_norm_, clip_grad.clip_grad_norm_
    closure: Any = clip_grad._get_total_norm
    cell = next(cell for cell in closure.__closure__ if callable(cell.cell_contents))
    original = cell.cell_contents

    def patched(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        norm = total_norm(listed, float(norm_type))
        if norm is None:
            return original(listed, norm_type, error_if_nonfinite, *args, **kwargs)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the gradients' total norm of order {norm_type} is {norm.item()}")
        return norm

    cell.cell_contents = patched
    try:
        yield
    finally:
        cell.cell_contents = original
        utils.clip_grad_norm_ = replaced


@contextmanager
def clipping_of_gradients(notice: Callable[[Sequence[torch.Tensor]], None]) -> Iterator[None]:
    """Patch PyTorch's functions that clip gradients to call a hook first, however a script has imported them.

    Each is a closure, which calls the function that it holds without gradients.

    Args:
        notice: Called with the parameters whose gradients are to be clipped.
    """
    if not is_for_installed("clipping_of_gradients"):
        yield
        return
    from torch.nn.utils import clip_grad

    functions: Any = clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_, clip_grad._clip_grads_with_norm_
    cells = [next(cell for cell in each.__closure__ if callable(cell.cell_contents)) for each in functions]
    originals = [cell.cell_contents for cell in cells]

    def noticed(original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        notice(listed)
        # PyTorch's own warns of an empty generator.
        return original(listed or (each for each in listed), *args, **kwargs)

    for cell, original in zip(cells, originals, strict=True):
        cell.cell_contents = functools.partial(noticed, original)
    try:
        yield
    finally:
        for cell, original in zip(cells, originals, strict=True):
            cell.cell_contents = original


@contextmanager
def checkpoint_through(run: Callable[..., Any]) -> Iterator[None]:
    """Replace `torch.utils.checkpoint.checkpoint()`, however a script has imported it.

    What a script has is a function that looks up, as an attribute of the one that it wraps, what to call.

    Args:
        run: Called with PyTorch's own function, and the arguments of the call.
    """
    if not is_for_installed("checkpoint_through"):
        yield
        return
    own = torch.utils.checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]
    vars(own)["__dynamo_disable"] = functools.partial(run, own)
    try:
        yield
    finally:
        del vars(own)["__dynamo_disable"]


@contextmanager
def inference_mode_is_no_grad() -> Iterator[None]:
    """Replace `torch.inference_mode()` by `torch.no_grad()`.

    In inference mode PyTorch leaves out the dispatcher's key of autograd, and with it what `xla_lowerings.py` registers
    there: such an evaluation has other numbers than training, and its tensors are lost to training.
    """
    if not is_for_installed("inference_mode_is_no_grad"):
        yield
        return
    original = torch.inference_mode.__enter__

    @functools.wraps(original)
    def enter(self: Any) -> None:
        if not self.mode:
            original(self)
            return
        self._inference_mode_context = torch.no_grad()  # which its own __exit__() leaves
        self._inference_mode_context.__enter__()

    torch.inference_mode.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.inference_mode.__enter__ = original  # type: ignore[method-assign]


@contextmanager
def ranges_while_profiling() -> Iterator[None]:
    """Patch FSDP2 to name the parts of its work only while a profiler runs that would show the names.

    Otherwise naming them takes as long as the rest of that work, where a unit has nothing to gather.
    """
    if not is_for_installed("ranges_while_profiling"):
        yield
        return
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    original = module.record_function

    def record_function(name: str, *args: Any) -> AbstractContextManager[Any]:
        return original(name, *args) if torch._C._autograd._profiler_enabled() else nullcontext()

    module.record_function = record_function
    try:
        yield
    finally:
        module.record_function = original


@contextmanager
def functions_of_dtensors(call: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Patch DTensor to route PyTorch's functions through another function.

    Args:
        call: Called with the function, its positional and its keyword arguments.
    """
    from torch.distributed.tensor import DTensor

    def __torch_function__(  # noqa: N807
        cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return call(func, args, kwargs or {})

    original = vars(DTensor)["__torch_function__"]
    DTensor.__torch_function__ = classmethod(__torch_function__)  # type: ignore[assignment]
    try:
        yield
    finally:
        DTensor.__torch_function__ = original  # type: ignore[method-assign]


@contextmanager
def runs_of_graphs(run: Callable[..., Any]) -> Iterator[None]:
    """Replace the function that runs autograd's graphs for `backward()` and `torch.autograd.grad()`.

    Args:
        run: Called with PyTorch's own function and its arguments: the outputs, their gradients, whether to keep the
            graph, whether to make one, the inputs, `allow_unreachable`, and `accumulate_grad`, which says that it is
            for `backward()`. Returns the gradients of the inputs, where it is not.
    """
    autograd: Any = torch.autograd
    original = autograd._engine_run_backward
    autograd._engine_run_backward = functools.partial(run, original)
    try:
        yield
    finally:
        autograd._engine_run_backward = original


@contextmanager
def optimizer_states(
    saved: Callable[[torch.optim.Optimizer, dict[str, Any]], dict[str, Any]],
    to_load: Callable[[torch.optim.Optimizer, dict[str, Any]], dict[str, Any]],
) -> Iterator[None]:
    """Pass the states of each optimizer, also of one made later, through functions that know shards.

    Args:
        saved: Turns what an optimizer's own `state_dict()` gave into what the caller gets.
        to_load: Turns what the caller gives into what its own `load_state_dict()` takes.
    """
    optimizer_class = torch.optim.Optimizer
    own_state_dict, own_load_state_dict = optimizer_class.state_dict, optimizer_class.load_state_dict

    @functools.wraps(own_state_dict)
    def state_dict(self: torch.optim.Optimizer) -> dict[str, Any]:
        return saved(self, own_state_dict(self))

    @functools.wraps(own_load_state_dict)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        own_load_state_dict(self, to_load(self, state_dict))

    optimizer_class.state_dict = state_dict  # type: ignore[method-assign]
    optimizer_class.load_state_dict = load_state_dict  # type: ignore[method-assign]
    try:
        yield
    finally:
        optimizer_class.state_dict = own_state_dict  # type: ignore[method-assign]
        optimizer_class.load_state_dict = own_load_state_dict  # type: ignore[method-assign]


@contextmanager
def clearing_of_gradients(notice: Callable[[torch.optim.Optimizer], None]) -> Iterator[None]:
    """Call a function before each optimizer's `zero_grad()`, also of one that has made no step."""
    optimizer_class = torch.optim.Optimizer
    own_zero_grad = optimizer_class.zero_grad

    @functools.wraps(own_zero_grad)
    def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        notice(self)
        own_zero_grad(self, *args, **kwargs)

    optimizer_class.zero_grad = zero_grad  # type: ignore[method-assign]
    try:
        yield
    finally:
        optimizer_class.zero_grad = own_zero_grad  # type: ignore[method-assign]


@contextmanager
def unscaling_of_gradients(notice: Callable[[torch.optim.Optimizer], None]) -> Iterator[None]:
    """Call a function before PyTorch's own `GradScaler` unscales the gradients of an optimizer."""
    if not is_for_installed("unscaling_of_gradients"):
        yield
        return
    from torch.amp import grad_scaler

    scaler_class: Any = grad_scaler.GradScaler
    own_unscale = scaler_class._unscale_grads_

    @functools.wraps(own_unscale)
    def unscale(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        notice(optimizer)
        return own_unscale(self, optimizer, *args, **kwargs)

    scaler_class._unscale_grads_ = unscale
    try:
        yield
    finally:
        scaler_class._unscale_grads_ = own_unscale


@contextmanager
def updates_through(run: Callable[..., None], prefixes: tuple[str, ...]) -> Iterator[None]:
    """Patch the functions with which torch.optim updates a group of parameters to run through another function.

    Args:
        run: Called with such a function and its arguments, of which the first are the parameters.
        prefixes: How their names begin: `_single_tensor_` of those that go through the parameters one by one,
            `_multi_tensor_` and `_fused_` of the others.
    """
    if not is_for_installed("updates_through"):
        yield
        return
    modules = {name: sys.modules[name] for name in list(sys.modules) if name.startswith("torch.optim.")}
    originals = {
        (module, name): function
        for module in modules.values()
        for name, function in vars(module).items()
        if name.startswith(prefixes) and callable(function)
    }
    for (module, name), function in originals.items():
        setattr(module, name, functools.wraps(function)(functools.partial(run, function)))
    try:
        yield
    finally:
        for (module, name), function in originals.items():
            setattr(module, name, function)
