"""Averages the gradients of a model that each device has as a whole, while its backward goes on.

As in PyTorch's DDP, gradients are copied into buckets as they come, and each bucket is reduced as soon as it is full;
new gradients then stay where they have been reduced. A bucket's place among the reductions is always the same, so that
all processes reduce the same at the same time. What is reduced is `parameter.grad` as a whole: what earlier backwards
have averaged is the same everywhere, and its mean is itself, and so what a window holds comes to the mean with its last
backward, whatever was computed in between.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from torchacc.engines.native.gradients import AVERAGE, take_part_in_backward
from torchacc.errors import EngineError

FIRST_BUCKET_BYTES = 2**20
"""What the first bucket has at most, which is to be on its way early."""
BUCKET_BYTES = 25 * 2**20
"""What any other bucket has at most."""


class Bucket:
    """Parameters whose gradients are reduced together.

    Args:
        parameters: All of one dtype, on one device.
        num_devices: The devices over which gradients are averaged.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], num_devices: int) -> None:
        self.parameters = parameters
        self._share = 1.0 / num_devices
        self._places = {parameter: place for place, parameter in enumerate(parameters)}
        # What follows the gradients says of each parameter whether this process has a gradient, whether it is new, and
        # what the first element of the parameter is.
        self._sizes = [*(parameter.numel() for parameter in parameters), *[len(parameters)] * 3]
        self._views: list[torch.Tensor] = []
        self._flat = self._is_here = self._is_new = self._firsts = self._own = torch.empty(0)
        self._new: set[nn.Parameter] = set()
        self._had: set[nn.Parameter] = set()
        self._work: Any = None

    @property
    def is_full(self) -> bool:
        """Whether all gradients of a backward have come."""
        return len(self._new) == len(self.parameters)

    @property
    def is_reduced(self) -> bool:
        """Whether the reduction has begun."""
        return self._work is not None

    def begin(self) -> None:
        """Note which parameters have gradients from before this backward."""
        self._had = {parameter for parameter in self.parameters if parameter.grad is not None}

    def take(self, parameter: nn.Parameter) -> None:
        """Copy a gradient that has just come."""
        self._copy(parameter)
        self._new.add(parameter)

    def reduce(self) -> None:
        """Begin to sum up the gradients over the processes, with zeros where there is none. Collective."""
        missing = [parameter for parameter in self.parameters if parameter not in self._new]
        for parameter in missing:
            if parameter.grad is None:
                self._view(parameter).zero_()
            else:
                self._copy(parameter)
        if missing:
            self._is_here.copy_(torch.tensor([parameter.grad is not None for parameter in self.parameters]))
            self._is_new.copy_(torch.tensor([parameter in self._new for parameter in self.parameters]))
        else:
            self._is_here.fill_(1)
            self._is_new.fill_(1)
        self._own = torch.stack([each.detach()[(0,) * each.dim()] for each in self.parameters])
        torch.mul(self._own, self._share, out=self._firsts)
        self._work = dist.all_reduce(self._flat, async_op=True)

    def give_back(self) -> list[nn.Parameter]:
        """Wait for the means, and return the parameters that have a new gradient on any process."""
        self._work.wait()
        # A gradient from before this backward keeps its tensor, which a script may hold.
        is_somewhere = [1] * len(self.parameters) if self.is_full else self._is_here.tolist()
        for (parameter, mean), num_here in zip(self._pairs(), is_somewhere, strict=True):
            if parameter in self._had and parameter.grad is not None:
                parameter.grad.copy_(mean)
            elif num_here:
                parameter.grad = mean.detach()
        if self.is_full:
            return list(self.parameters)
        return [each for each, num_new in zip(self.parameters, self._is_new.tolist(), strict=True) if num_new > 0]

    def differing(self) -> nn.Parameter | None:
        """Return a parameter whose first element is not that of all processes, as their mean says."""
        is_alike = torch.isclose(self._own, self._firsts, rtol=1e-4, atol=1e-12, equal_nan=True).tolist()
        return next((each for each, is_same in zip(self.parameters, is_alike, strict=True) if not is_same), None)

    def clear(self) -> list[nn.Parameter]:
        """Forget a backward, once what is on its way has arrived; return the parameters with a new gradient here."""
        if self._work is not None:
            self._work.wait()
        new = list(self._new)
        self._work, self._views = None, []
        self._flat = self._is_here = self._is_new = self._firsts = self._own = torch.empty(0)
        self._new.clear()
        return new

    def _pairs(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        return zip(self.parameters, self._views, strict=True)

    def _copy(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        torch.mul(parameter.grad, self._share, out=self._view(parameter))

    def _view(self, parameter: nn.Parameter) -> torch.Tensor:
        if not self._views:
            first = self.parameters[0]
            self._flat = torch.empty(sum(self._sizes), dtype=first.dtype, device=first.device)
            *parts, self._is_here, self._is_new, self._firsts = self._flat.split(self._sizes)
            self._views = [part.view(each.shape) for part, each in zip(parts, self.parameters, strict=True)]
        return self._views[self._places[parameter]]


class AveragedGradients:
    """The gradients of one model.

    Args:
        parameters: All of the model's, each once, in its order, by name.
        num_devices: The devices that see different data.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], num_devices: int) -> None:
        self._names = {each: name for name, each in parameters.items() if each.is_floating_point()}
        self._parameters = list(self._names)
        self._num_devices = num_devices
        self._num_backwards = 0
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._num_reduced = 0
        """How many buckets are being reduced."""
        self._in_window: set[nn.Parameter] = set()
        """Parameters that may have gradients of an accumulation window, though they are not trained any more."""
        self._task: int | None = None
        """The backward that runs: autograd's number of it."""
        self._is_nested = False
        """Whether gradients come from a backward inside of this one, after which more may come."""
        self._holds = False
        self._hooks: dict[nn.Parameter, OrderedDict[int, Callable[[torch.Tensor], None]]] = {}
        for parameter in self._parameters:
            self._watch(parameter)
        take_part_in_backward(self)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold a context whose backwards leave their gradients to the first one after it."""
        self._holds = True
        self._in_window.update(self._trained())
        try:
            yield
        finally:
            self._in_window.update(self._trained())
            self._holds = False

    def drop_window(self) -> None:
        """Forget which parameters have gradients of an accumulation window."""
        self._in_window.clear()

    def begin(self) -> None:
        """Note that a backward of the model runs, and see to it that it ends with the means."""
        if self._holds or self._task is not None:
            return
        self._task = torch._C._current_graph_task_id()
        wanted = [each for each in self._parameters if each.requires_grad or each in self._in_window]
        if [id(each) for each in reversed(wanted)] != [
            id(each) for bucket in self._buckets for each in bucket.parameters
        ]:
            self._make_buckets(wanted)
        for bucket in self._buckets:
            bucket.begin()
        Variable._execution_engine.queue_callback(self._finish)

    def end_failed_backward(self) -> None:
        """Forget a backward that has raised: what it has given gradients has none now."""
        if self._task is None:
            return
        self._task = None
        for parameter in self._clear():
            parameter.grad = None
        self._in_window.clear()

    def _trained(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self._parameters if parameter.requires_grad)

    def _make_buckets(self, parameters: Sequence[nn.Parameter]) -> None:
        """Cut parameters into buckets, the last one first, as that is how gradients come."""
        self._buckets, room = [], FIRST_BUCKET_BYTES
        bucket: list[nn.Parameter] = []
        for parameter in reversed(parameters):
            is_other = bool(bucket) and (bucket[0].dtype, bucket[0].device) != (parameter.dtype, parameter.device)
            if bucket and (is_other or room < parameter.nbytes):
                self._buckets.append(Bucket(bucket, self._num_devices))
                bucket, room = [], BUCKET_BYTES
            bucket.append(parameter)
            room -= parameter.nbytes
        if bucket:
            self._buckets.append(Bucket(bucket, self._num_devices))
        self._bucket_of = {each: bucket for bucket in self._buckets for each in bucket.parameters}

    def _watch(self, parameter: nn.Parameter) -> None:
        """Be told of a parameter's gradients, and take over its hooks: they are for the mean."""
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen one may be trained later
        # Weakly, as what autograd holds the garbage collector does not look into.
        parameter.register_post_accumulate_grad_hook(partial(_tell, ref(self)))
        parameter.requires_grad_(is_trained)
        hooks = self._hooks[parameter] = OrderedDict()
        vars(parameter).update(register_post_accumulate_grad_hook=partial(_add_hook, hooks), register_hook=_refuse_hook)
        vars(parameter)[AVERAGE] = mean_over_processes

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Take a gradient that autograd has just added to a parameter."""
        if not parameter.requires_grad or parameter.grad is None:  # frozen after its forward: autograd has left it out
            return
        if parameter.grad.requires_grad:
            raise EngineError(
                "backward(create_graph=True) of a model on several devices: parameter.grad is the mean over them, "
                "which has no graph. Write gradients = torch.autograd.grad(loss, tuple(model.parameters()), "
                "create_graph=True), which gives means that have one"
            )
        if self._holds:
            return
        self.begin()
        bucket = self._bucket_of[parameter]
        if bucket.is_reduced:
            raise EngineError(
                f"a parameter of shape {tuple(parameter.shape)} has got gradients twice in one backward, the second "
                "time when the first was on its way to the other processes, as by torch.utils.checkpoint with "
                "use_reentrant=True: use use_reentrant=False"
            )
        with torch.no_grad():
            bucket.take(parameter)
            self._is_nested |= torch._C._current_graph_task_id() != self._task
            while not self._is_nested and self._num_reduced < len(self._buckets):
                if not self._buckets[self._num_reduced].is_full:
                    return
                self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._num_reduced]
        self._num_reduced += 1
        bucket.reduce()

    @torch.no_grad()
    def _finish(self) -> None:
        while self._num_reduced < len(self._buckets):
            self._reduce_next()
        new = [parameter for bucket in self._buckets for parameter in bucket.give_back()]
        self._num_backwards += 1
        # Elsewhere than on a CPU to look is to wait for the device.
        if self._parameters[0].device.type == "cpu" or self._num_backwards.bit_count() == 1:
            self._check_copies()
        self._clear()
        self._task = None
        self._in_window.clear()
        for parameter in new:
            for hook in list(self._hooks[parameter].values()):
                hook(parameter)

    def _check_copies(self) -> None:
        """Check that all processes have had the same parameters in this backward, by an element of each.

        Raises:
            EngineError: They have not.
        """
        for bucket in self._buckets:
            parameter = bucket.differing()
            if parameter is not None:
                raise EngineError(
                    f"the parameter {self._names[parameter]!r} has other values on this process than on others, which "
                    "train one model: something has written to it what differs between them, such as random numbers. "
                    "Call torch.manual_seed() with the same number on every rank before, or write the values of one "
                    "rank on all, as by model.load_state_dict()"
                )

    def _clear(self) -> list[nn.Parameter]:
        self._num_reduced, self._is_nested = 0, False
        return [parameter for bucket in self._buckets for parameter in bucket.clear()]


def mean_over_processes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean of a tensor over all processes. Collective: every process."""
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found)
    return found / dist.get_world_size()


def _tell(average: "ref[AveragedGradients]", parameter: nn.Parameter) -> None:
    found = average()
    if found is not None:
        found.on_gradient(parameter)


def _add_hook(
    hooks: OrderedDict[int, Callable[[torch.Tensor], None]], hook: Callable[[torch.Tensor], None]
) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _refuse_hook(hook: object) -> None:
    raise EngineError(
        "register_hook() on a parameter of a model on several devices: it would see this process's own gradient, and "
        "not the mean. Use parameter.register_post_accumulate_grad_hook(), which sees parameter.grad"
    )
