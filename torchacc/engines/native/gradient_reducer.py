"""Averages the gradients of a model that each device has as a whole, while its backward goes on.

As in PyTorch's DDP, gradients are copied into buckets as they come, and each bucket is reduced as soon as it is full;
new gradients then stay where they have been reduced. A bucket's place among the reductions is always the same, so that
all processes reduce the same at the same time. What is reduced is `parameter.grad` as a whole: what earlier backwards
have averaged is the same everywhere, and its mean is itself, and so what a window holds comes to the mean with its last
backward, whatever was computed in between; so does what a backward that has raised has left.
"""

import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from torchacc.engines.native.gradients import AVERAGE, take_part_in_backward
from torchacc.engines.status import ModelStatus
from torchacc.errors import EngineError

FIRST_BUCKET_BYTES = 2**20
"""What the first bucket has at most, which is to be on its way early."""
BUCKET_BYTES = 25 * 2**20
"""What any other bucket has at most."""
NUM_SAMPLES = 8
"""How many elements of a parameter are compared between the processes in each backward."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples, modulo 1, spread over all that lies between 0 and 1."""


class Bucket:
    """Parameters whose gradients are reduced together.

    Args:
        parameters: By name, all of one dtype, on one device.
        group: The processes over which gradients are averaged.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = list(parameters.values())
        # Small enough that float32 has its mean nearly exactly, however many processes there are.
        self._checksum = float(zlib.crc32("\n".join(parameters).encode()) % 4096)
        self._group = group
        self._share = 1.0 / group.size()
        self._places = {parameter: place for place, parameter in enumerate(self.parameters)}
        # What follows the gradients says of each parameter whether this process has a gradient, whether it is new, and
        # what some of its elements are; and at last which parameters these are.
        self._num_samples = [min(parameter.numel(), NUM_SAMPLES) for parameter in self.parameters]
        self._sizes = [
            *(parameter.numel() for parameter in self.parameters),
            *[len(self.parameters)] * 2,
            sum(self._num_samples) + 1,
        ]
        self._views: list[torch.Tensor] = []
        self._flat = self._is_here = self._is_new = self._means = self._own = torch.empty(0)
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
        """Record which parameters have gradients from before this backward."""
        self._had = {parameter for parameter in self.parameters if parameter.grad is not None}

    def take(self, parameter: nn.Parameter) -> None:
        """Copy a gradient that has just come."""
        self._copy(parameter)
        self._new.add(parameter)

    def reduce(self, num_backwards: int) -> None:
        """Begin to sum up the gradients over the processes, with zeros where there is none. Collective.

        Args:
            num_backwards: How many there have been before, which chooses the elements to compare.
        """
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
        samples = [_samples(parameter, num_backwards) for parameter in self.parameters]
        self._own = torch.cat([*samples, self._flat.new_full((1,), self._checksum)])
        torch.mul(self._own, self._share, out=self._means)
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def give_back(self) -> list[nn.Parameter]:
        """Wait for the means, and return the parameters that have a new gradient on any process."""
        self._work.wait()
        # A gradient from before this backward keeps its tensor, which a script may hold.
        is_somewhere = [1] * len(self.parameters) if self.is_full else self._is_here.tolist()
        for (parameter, mean), num_here in zip(self._pairs(), is_somewhere, strict=True):
            if parameter in self._had and parameter.grad is not None:
                parameter.grad.copy_(mean)
            elif num_here:
                parameter.grad = mean.data  # its changes are counted for itself, unlike those of detach()
        if self.is_full:
            return list(self.parameters)
        return [each for each, num_new in zip(self.parameters, self._is_new.tolist(), strict=True) if num_new]

    def is_same_everywhere(self) -> bool:
        """Return whether all processes have reduced these parameters, as the mean of their checksums says."""
        return bool(abs(self._means[-1].item() - self._checksum) < 0.25)

    def differing(self) -> nn.Parameter | None:
        """Return a parameter of which a sample is not that of all processes, as their mean says."""
        is_alike = torch.isclose(self._own, self._means, rtol=1e-4, atol=1e-12, equal_nan=True)
        parts = is_alike.cpu().split([*self._num_samples, 1])
        return next((each for each, part in zip(self.parameters, parts, strict=False) if not part.all()), None)

    def clear(self) -> None:
        """Forget a backward, once what is on its way has arrived."""
        if self._work is not None:
            self._work.wait()
        self._work, self._views = None, []
        self._flat = self._is_here = self._is_new = self._means = self._own = torch.empty(0)
        self._new.clear()

    def _pairs(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        return zip(self.parameters, self._views, strict=True)

    def _copy(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        torch.mul(parameter.grad, self._share, out=self._view(parameter))

    def _view(self, parameter: nn.Parameter) -> torch.Tensor:
        if not self._views:
            first = self.parameters[0]
            self._flat = torch.empty(sum(self._sizes), dtype=first.dtype, device=first.device)
            *parts, self._is_here, self._is_new, self._means = self._flat.split(self._sizes)
            self._views = [
                part.as_strided(each.shape, _strides_of_gradient(each))
                for part, each in zip(parts, self.parameters, strict=True)
            ]
        return self._views[self._places[parameter]]


def _strides_of_gradient(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return how autograd lays out a parameter's gradient: as the parameter, unless that has gaps or overlaps.

    Fused optimizers go through both as they lie in memory.
    """
    like = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    if like.stride() != parameter.stride():
        like = torch.empty(parameter.shape, device="meta")
    return like.stride()


def _samples(parameter: nn.Parameter, num_backwards: int) -> torch.Tensor:
    """Return up to `NUM_SAMPLES` elements, spread over the parameter, others in each backward."""
    as_in_memory = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)  # so that nothing is copied
    elements = parameter.detach().permute(as_in_memory).reshape(-1)
    step, rest = divmod(len(elements), NUM_SAMPLES)
    if not step:
        return elements
    first = int(num_backwards * GOLDEN % 1 * step) + (rest if num_backwards % 2 else 0)
    return elements[first::step][:NUM_SAMPLES]


class GradientReducer:
    """The gradients of one model.

    Args:
        parameters: All of the model's, each once, in its order, by name.
        status: Is told of backwards.
        group: The processes, which all see different data, in a group that nothing else uses: backwards of other models
            may reduce at the same time, in another order on each process.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], status: ModelStatus, group: dist.ProcessGroup) -> None:
        self._names = {each: name for name, each in parameters.items() if each.is_floating_point() or each.is_complex()}
        self._parameters = list(self._names)
        self._status = status
        self._group = group
        self._num_backwards = 0
        self._are_buckets_new = False
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
        _all.add(self)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Context manager whose backwards reduce nothing, as DDP's `no_sync()`; the next backward reduces the sum."""
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
        """Record that a backward of the model runs, and see to it that it ends with the means."""
        if self._holds:
            self._status.on_backward()
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

    def end_failed_backward(self, *, accumulates: bool) -> None:
        """Leave what a backward that has raised has added to the gradients to the next one, as PyTorch does.

        Nothing may use the gradients before that has averaged them.
        """
        if self._task is None:
            return
        self._task = None
        self._clear()
        self._in_window.update(self._trained())
        self._status.on_failed_backward()

    def _trained(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self._parameters if parameter.requires_grad)

    def _make_buckets(self, parameters: Sequence[nn.Parameter]) -> None:
        """Cut parameters into buckets, the last one first, as that is how gradients come."""
        cuts: list[dict[str, nn.Parameter]] = []
        room, kind = 0, None
        for parameter in reversed(parameters):
            own_kind = parameter.dtype, parameter.device
            if not cuts or own_kind != kind or room < parameter.nbytes:
                room, kind = BUCKET_BYTES if cuts else FIRST_BUCKET_BYTES, own_kind
                cuts.append({})
            cuts[-1][self._names[parameter]] = parameter
            room -= parameter.nbytes
        self._buckets = [Bucket(cut, self._group) for cut in cuts]
        self._are_buckets_new = True
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
        self.begin()
        if parameter.grad.layout is not torch.strided:
            raise EngineError(
                f"the parameter {self._names[parameter]!r} has got a sparse gradient, which cannot be averaged over "
                "devices: call torch.nn.functional.embedding() and the like with sparse=False"
            )
        if parameter.grad.requires_grad:
            raise EngineError(
                "backward(create_graph=True) of a model on several devices: parameter.grad is the mean over them, "
                "which has no graph. Write gradients = torch.autograd.grad(loss, tuple(model.parameters()), "
                "create_graph=True), which gives means that have one"
            )
        if self._holds:
            return
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
        bucket.reduce(self._num_backwards)

    @torch.no_grad()
    def _finish(self) -> None:
        # Of all models in this backward, as other processes may wait for those of another one first.
        for each in list(_all):
            if each._task == self._task:
                each._reduce_rest()
        new = [parameter for bucket in self._buckets for parameter in bucket.give_back()]
        self._num_backwards += 1
        # Elsewhere than on a CPU to look is to wait for the device.
        is_on_cpu = self._parameters[0].device.type == "cpu"
        if is_on_cpu or self._are_buckets_new:
            self._check_buckets()
        if is_on_cpu or self._num_backwards.bit_count() == 1:
            self._check_copies()
        self._are_buckets_new = False
        self._clear()
        self._task = None
        self._in_window.clear()
        self._status.on_backward()
        for parameter in new:
            for hook in list(self._hooks[parameter].values()):
                hook(parameter)

    def _reduce_rest(self) -> None:
        while self._num_reduced < len(self._buckets):
            self._reduce_next()

    def _check_buckets(self) -> None:
        """Check that all processes train the same parameters.

        Raises:
            EngineError: They do not.
        """
        if not all(bucket.is_same_everywhere() for bucket in self._buckets):
            raise EngineError(
                "the processes train other parameters than each other, so that gradients of some were averaged with "
                "those of others: call requires_grad_() for the same parameters on every rank"
            )

    def _check_copies(self) -> None:
        """Check that all processes have had the same parameters in this backward, by some elements of each.

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

    def _clear(self) -> None:
        self._num_reduced, self._is_nested = 0, False
        for bucket in self._buckets:
            bucket.clear()


_all: "WeakSet[GradientReducer]" = WeakSet()


def mean_over_processes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean of a tensor over all processes. Collective: every process."""
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found)
    return found / dist.get_world_size()


def _tell(average: "ref[GradientReducer]", parameter: nn.Parameter) -> None:
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
