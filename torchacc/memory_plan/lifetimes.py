"""From when to when each buffer of a training step is alive, once operations are fused as XLA fuses them.

What is worth no memory of its own is computed where it is read: a chain of pointwise operations becomes part of the
operations that read it. This is a model of XLA's rules, not a copy of its code:

- Matmuls, convolutions, lookups and sums over a dimension have a result in memory, and matmuls and
  lookups also need what they read there.
- A pointwise result that several operations read gets memory where computing it again is expensive (`exp`, `tanh` …),
  or where it would keep more alive than it takes itself.
- A result is computed just before its first reader.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchacc.memory_plan.order import in_xla_order
from torchacc.memory_plan.trace import Operation, Read, Trace
from torchacc.parallel.pipeline_plan import Action, all_forwards_first

_SHAPING = {
    "alias_copy", "arange", "cat", "clone", "constant_pad_nd", "copy", "copy_", "empty_like", "expand_copy", "fill",
    "fill_", "flip", "full", "full_like", "new_empty_strided", "new_zeros", "ones", "ones_like", "repeat",
    "rand_like", "roll", "scalar_tensor", "select_backward", "slice_backward", "stack", "tril", "triu", "zeros",
    "zeros_like", "_to_copy", "_unsafe_view", "native_layer_norm", "native_layer_norm_backward",
    "native_dropout_backward", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
    "nll_loss_backward",
    "native_group_norm", "native_group_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
    "split_with_sizes_copy",
}  # fmt: skip
"""Operations beside the pointwise ones that XLA computes where their result is read."""
_EXPENSIVE = {
    "exp", "log", "tanh", "sigmoid", "gelu", "erf", "sin", "cos", "pow", "sqrt", "rsqrt", "tanh_backward",
    "gelu_backward", "native_dropout",
}  # fmt: skip
_OPERANDS_IN_MEMORY = {
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "convolution", "convolution_backward", "embedding_dense_backward",
}  # fmt: skip
"""Operations that read tensors in memory, in full and one after another, and not what is still to be computed."""
_LOOKUPS = {"embedding_dense_backward"}
"""Operations whose result is rows that are added into something."""
_SOFTMAX = {"_safe_softmax"}
"""Operations whose result has memory twice where it is recomputed in backward, or multiplied in another dtype."""
_WITH_SIGMOID = {"silu", "silu_backward"}
"""Operations that are products of what they read and its sigmoid, which has memory."""
_ROW = 32
"""What takes this many times less than a value has a number for each of its rows, and is no reason to keep that."""
_SMALL_BYTES = 1 << 10
"""Buffers below this are left out."""


@dataclass
class Buffer:
    """Memory that one value takes for a while."""

    nbytes: int
    birth: int
    """The operation that makes it."""
    death: int
    """The last one that reads it."""
    lookup_of: str | None = None
    """The parameter whose gradient it is, from a lookup: rows that are added into something."""
    joins_another: bool = False
    """Whether the parameter's gradient has another part, into which they are added."""


@dataclass(frozen=True)
class Lifetimes:
    """What is alive during a step, apart from parameters and optimizer state; times are numbers of operations."""

    num_operations: int
    num_forward: int
    buffers: tuple[Buffer, ...]
    uses: Mapping[str, tuple[int, ...]]
    """When each parameter is read."""
    gradients: Mapping[str, int]
    """When the gradient of each trained parameter is complete."""
    casts: Mapping[str, int] = field(default_factory=dict)
    """Of parameters that are only read in the dtype of products: the bytes that a full one takes there."""
    stage: int = 0
    """Of which of the device's stages it is."""
    actions: tuple[Action, ...] = tuple(all_forwards_first(0, 1))
    """The forwards and backwards of microbatches that the device runs in turn, through all of its stages."""
    adds_gradients: bool = False
    """Whether there are gradients of batches before it, not reduced yet, to which it adds its own."""

    @property
    def num_microbatches(self) -> int:
        """How often all of it runs."""
        return sum(action.stage == self.stage for action in self.actions) // 2


def fused_lifetimes(trace: Trace) -> Lifetimes:
    """Decide which values of a step get memory under XLA, and for how long."""
    return _Fusion(in_xla_order(trace)).run()


def eager_lifetimes(trace: Trace) -> Lifetimes:
    """Return how long values live where each operation is a kernel of its own: until the last one that reads them.

    Gradients of parameters are left out, as it is not an operation that ends their lives.
    """
    last: dict[int, int] = {}
    uses: dict[str, list[int]] = {}
    born: dict[int, int] = {}
    ends = {operation.step: time for time, operation in enumerate(trace.operations)}
    for time, operation in enumerate(trace.operations):
        born.update(dict.fromkeys(operation.makes, time))
        for read in operation.reads:
            last[read.value] = ends[operation.step]
            parameter = trace.values[read.value].parameter
            if parameter is not None:
                uses.setdefault(parameter, []).append(time)
    given = set(trace.gradients.values())
    buffers = tuple(
        Buffer(trace.values[value].nbytes, birth, last.get(value, birth))
        for value, birth in born.items()
        if value not in given
    )
    gradients = {name: born.get(value, len(trace.operations) - 1) for name, value in trace.gradients.items()}
    return Lifetimes(
        len(trace.operations), trace.num_forward, buffers, {k: tuple(v) for k, v in uses.items()}, gradients
    )


class _Fusion:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._sources: dict[int, tuple[int, ...]] = {}
        """For each value the buffers that are read where it is: its own, or those that it is computed from."""
        self._buffers: dict[int, Buffer] = {}
        self._reads: dict[int, list[int]] = {}
        """When each buffer is read."""
        self._inputs_of: dict[int, tuple[int, ...]] = {}
        """The buffers that a buffer is computed from."""
        self._cheaper: dict[int, tuple[int, ...]] = {}
        """What others than matrix products read of a value that is in memory for these only."""
        self._sigmoids: dict[Read, int] = {}
        self._copies: dict[tuple[int, int, int], int] = {}
        self._num_extra = 0
        self._uses: dict[str, list[int]] = {}
        self._users: dict[int, list[int]] = {}
        self._casts: dict[int, str] = {}
        """The parameters that values are in the dtype of products."""
        for time, operation in enumerate(trace.operations):
            for read in operation.reads:
                self._users.setdefault(read.value, []).append(time)
        self._depths = _depths(trace)

    def run(self) -> Lifetimes:
        for time, operation in enumerate(self._trace.operations):
            self._place(time, operation)
        times = {name: self._complete(name, value) for name, value in self._trace.gradients.items()}
        self._delay()
        for key, buffer in self._buffers.items():
            buffer.death = max([buffer.birth, *self._reads.get(key, ())])
        uses = {name: tuple(sorted(set(found))) for name, found in self._uses.items()}
        kept = tuple(buffer for buffer in self._buffers.values() if buffer.nbytes >= _SMALL_BYTES)
        casts = {name: self._trace.values[value].nbytes for value, name in self._casts.items()}
        return Lifetimes(len(self._trace.operations), self._trace.num_forward, kept, uses, times, casts)

    def _place(self, time: int, operation: Operation) -> None:
        name = _short(operation)
        cast = self._cast_of(operation)
        if cast is not None:
            self._casts[operation.makes[0]] = cast
            return
        fused = (operation.is_pointwise or name in _SHAPING) and bool(operation.makes)
        operands = [self._operand(time, name, read.value, read.nbytes, read.offset) for read in operation.reads]
        sources = tuple(dict.fromkeys(source for found in operands for source in found))
        if name in _SOFTMAX and (time >= self._trace.num_forward or self._is_cast(operation.makes[0])):
            self._make_twice(time, operation.makes[0], sources)
            return
        if name in _WITH_SIGMOID:
            sources = (*sources, self._sigmoid(time, operation, sources))
        for value in operation.makes:
            nbytes = self._trace.values[value].nbytes
            if fused and not self._needs_memory(time, name, value, nbytes, sources):
                self._sources[value] = sources
            else:
                self._make(value, nbytes, time, sources)
        if not fused or any(value in self._buffers for value in operation.makes):
            self._read(time, sources)

    def _cast_of(self, operation: Operation) -> str | None:
        """Return the parameter that an operation casts, where all that reads that parameter does the same."""
        if _short(operation) != "_to_copy":
            return None
        (read,) = operation.reads
        readers = (self._trace.operations[user] for user in self._users[read.value])
        return self._trace.values[read.value].parameter if all(_short(each) == "_to_copy" for each in readers) else None

    def _operand(self, time: int, name: str, value: int, nbytes: int, offset: int) -> tuple[int, ...]:
        """Return the buffers that are read for one operand."""
        known = self._trace.values[value]
        parameter = self._casts.get(value, known.parameter)
        if parameter is not None:
            self._uses.setdefault(parameter, []).append(time)
            return ()
        if known.is_input:
            return ()
        sources = self._sources[value]
        if name not in _OPERANDS_IN_MEMORY:
            return self._cheaper.get(value, sources)
        if nbytes >= known.nbytes:
            return sources
        key = (value, nbytes, offset)  # XLA has no views: a part is copied
        if key not in self._copies:
            self._copies[key] = self._extra()
            self._make(self._copies[key], nbytes, time, sources)
            self._read(time, sources)
        return (self._copies[key],)

    def _needs_memory(self, time: int, name: str, value: int, nbytes: int, sources: tuple[int, ...]) -> bool:
        users = self._users.get(value, [])
        operations = [self._trace.operations[user] for user in users]
        in_full = [
            operation
            for operation in operations
            if _short(operation) in _OPERANDS_IN_MEMORY
            and any(read.value == value and read.nbytes >= nbytes for read in operation.reads)
        ]
        kept = [self._buffers[source].nbytes for source in sources]
        kept_bytes = sum(size for size in kept if size * _ROW > nbytes)
        is_cheap = name not in _EXPENSIVE and kept_bytes <= nbytes
        is_cheap |= name in _WITH_SIGMOID and self._is_read_at_once(time, users)
        if in_full and is_cheap:
            self._cheaper[value] = sources
        return bool(in_full) or (len(users) > 1 and not is_cheap)

    def _is_read_at_once(self, time: int, users: Sequence[int]) -> bool:
        """Return whether nothing in memory lies between a value and any of its readers, so that all can compute it."""
        return all(self._depths[user] <= self._depths[time] for user in users)

    def _is_cast(self, value: int) -> bool:
        users = (self._trace.operations[user] for user in self._users.get(value, ()))
        return any(_short(each) == "_to_copy" for each in users)

    def _make_twice(self, time: int, value: int, sources: tuple[int, ...]) -> None:
        nbytes, key = self._trace.values[value].nbytes, self._extra()
        self._make(key, nbytes, time, sources)
        self._read(time, sources)
        self._make(value, nbytes, time, (key,))
        self._read(time, (key,))
        self._cheaper[value] = (key,)

    def _sigmoid(self, time: int, operation: Operation, sources: tuple[int, ...]) -> int:
        """Return the buffer of the sigmoid that is multiplied, which forward and backward have in common."""
        value = operation.reads[-1]  # what `silu` is of; in backward it comes after the gradient
        if value not in self._sigmoids:
            self._sigmoids[value] = self._extra()
            self._make(self._sigmoids[value], value.nbytes, time, sources)
            self._read(time, sources)
        return self._sigmoids[value]

    def _extra(self) -> int:
        self._num_extra += 1
        return len(self._trace.values) + self._num_extra

    def _make(self, key: int, nbytes: int, time: int, sources: tuple[int, ...]) -> None:
        self._sources[key] = (key,)
        self._buffers[key] = Buffer(nbytes, time, time)
        self._inputs_of[key] = sources

    def _read(self, time: int, sources: tuple[int, ...]) -> None:
        for source in sources:
            self._reads.setdefault(source, []).append(time)

    def _complete(self, name: str, value: int) -> int:
        """Record that the optimizer reads a gradient as soon as all of it is there, and return when that is."""
        sources = self._sources.get(value, ())
        for source in sources:
            buffer = self._buffers[source]
            if _short(self._trace.operations[buffer.birth]) in _LOOKUPS:
                buffer.lookup_of, buffer.joins_another = name, len(sources) > 1
        time = max((self._buffers[source].birth for source in sources), default=len(self._trace.operations) - 1)
        self._read(time, sources)
        return time

    def _delay(self) -> None:
        """Make each buffer just before its first reader, and keep its inputs until then."""
        for reads in self._reads.values():
            reads.sort()
        for key in reversed(self._buffers):
            buffer, reads = self._buffers[key], self._reads.get(key, [])
            first = reads[bisect_left(reads, buffer.birth)] if reads else buffer.birth
            if first > buffer.birth + 1:
                buffer.birth = first
                for source in self._inputs_of[key]:
                    self._reads[source].append(first)


def _depths(trace: Trace) -> list[int]:
    """Return for each operation the most results in memory on a path to it, its own not counted."""
    depths: list[int] = []
    behind: dict[int, int] = {}
    for operation in trace.operations:
        depths.append(max((behind.get(value, 0) for value in operation.needs), default=0))
        has_memory = not operation.is_pointwise and _short(operation) not in _SHAPING
        behind.update(dict.fromkeys(operation.makes, depths[-1] + has_memory))
    return depths


def _short(operation: Operation) -> str:
    """Return an operation's name without its namespace and overload."""
    return operation.name.split(".")[1]
