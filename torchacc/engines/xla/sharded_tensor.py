"""A tensor of which this process holds a shard, and which says so: a parameter, its gradient, an optimizer's state.

A script sees the unsharded tensor's shape, and PyTorch's functions do one of these:

- What goes element by element, as optimizers, clipping, averages of weights and changes in place do, runs on the shard.
- What else reads a value, such as a norm, a matmul with activations or an index, gets the unsharded tensor. That is
  collective: every process has to do the same.
- What else changes values in place is refused, as a copy would be changed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_leaves, tree_map

from torchacc.engines.tensor_functions import WITHOUT_GRADIENT
from torchacc.engines.xla.function_traits import FunctionTraits, traits_of
from torchacc.errors import EngineError
from torchacc.parallel.sharding import RowLayout

_INSTEAD = (
    "Change the parameter itself by functions that go element by element (parameter.mul_(…), "
    "parameter.data.copy_(unsharded)), or give new values to model.load_state_dict()"
)


_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data


class Reader(ABC):
    """Gathers a model's shards where a script reads a value of one."""

    num_shards: int
    shard_index: int

    @abstractmethod
    def check_same_call(self, what: str) -> None:
        """Raise unless every process reads the same now. Collective: every process.

        Raises:
            EngineError: They do not.
        """

    @abstractmethod
    def unshard(self, shard: torch.Tensor, rows: RowLayout) -> torch.Tensor:
        """Return the unsharded tensor on the device. Collective: every process."""

    @abstractmethod
    def combine_norms(self, norms: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Return the norm over all shards from this process's norms, of shape (n,). Collective: every process.

        Returns:
            A device tensor without dimensions.
        """


@dataclass(frozen=True, eq=False)
class ShardOrigin:
    """Of which tensor a shard is a part, and of which model."""

    rows: RowLayout
    reader: Reader

    def fits(self, other: "ShardOrigin") -> bool:
        """Return whether shards of both have the same places in their tensors."""
        return self is other or (
            self.rows == other.rows and self.reader.shard_index == other.reader.shard_index
        )  # the number of shards is a part of the rows

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this process's part of an operand that is broadcast against the unsharded tensor."""
        shape = self.rows.shape
        if tensor.dim() > len(shape) or any(
            size not in (1, full) for size, full in zip(reversed(tensor.shape), reversed(shape), strict=False)
        ):
            raise EngineError(
                f"a tensor of shape {tuple(tensor.shape)} beside a sharded one, whose unsharded shape is {shape}: give "
                "a number, or a tensor that fits the unsharded shape"
            )
        is_cut = tensor.dim() == len(shape) and tensor.shape[:1] == shape[:1]
        return self.rows.shard(tensor, self.reader.shard_index) if is_cut else tensor


class ShardedTensor(torch.Tensor):
    """This process's shard of a tensor, padding included, under the shape of the unsharded one."""

    _origin: ShardOrigin
    _read: Callable[[], torch.Tensor] | None = None
    """Returns the unsharded tensor, connected to this shard for autograd; only of a model's parameter."""
    _name: str = "a tensor that lies like a parameter"

    __hash__ = object.__hash__

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The unsharded tensor's shape."""
        return torch.Size(self._origin.rows.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the unsharded tensor's shape, or its size along a dimension."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The unsharded tensor's number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the unsharded tensor's number of dimensions."""
        return self.ndim

    ndimension = dim

    def numel(self) -> int:
        """Return the number of elements of the unsharded tensor."""
        return self.shape.numel()

    nelement = numel

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the unsharded tensor."""
        return self.numel() * self.element_size()

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, as a shard like this one."""
        with DisableTorchFunctionSubclass():
            gradient = _GRAD.__get__(self)
            if gradient is not None and not isinstance(gradient, ShardedTensor):
                gradient = as_shard(gradient, self._origin)  # autograd's own, once: its identity is to last
                _GRAD.__set__(self, gradient)
        return gradient  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            value = self._own_part(value, "grad")
        with DisableTorchFunctionSubclass():
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        """The same shard without autograd."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        value = self._own_part(value, "data")
        with DisableTorchFunctionSubclass():
            _DATA.__set__(self, value)

    def detach(self) -> "ShardedTensor":
        """Return the same shard without autograd."""
        with DisableTorchFunctionSubclass():
            return as_shard(super().detach(), self._origin, self._name)

    def to_local(self) -> torch.Tensor:
        """Return what this process holds, padding included, as a plain tensor."""
        with DisableTorchFunctionSubclass():
            return super().detach()

    def _own_part(self, value: torch.Tensor, attribute: str) -> torch.Tensor:
        if isinstance(value, ShardedTensor):
            if not value._origin.fits(self._origin):
                raise EngineError(f"{self._name}.{attribute} was given a shard of shape {tuple(value.shape)}")
            return value
        if tuple(value.shape) != tuple(self.shape):
            raise EngineError(
                f"{self._name}.{attribute} was given a tensor of shape {tuple(value.shape)}; the unsharded one has the "
                f"shape {tuple(self.shape)}"
            )
        return as_shard(self._origin.part_of(value.detach()).to(self.device), self._origin)

    def register_hook(self, hook: Any) -> Any:
        """Refuse a hook of the gradient, which would get the gradient that is reduced over all processes."""
        raise EngineError(
            f"a hook on the gradient of {self._name}: each process holds a shard of it, which is there once backward "
            "has ended. Change parameter.grad after backward(), or hook an output of a module"
        )

    register_post_accumulate_grad_hook = register_hook

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        index, count = self._origin.reader.shard_index, self._origin.rows.num_shards
        return f"shard {index} of {count} of {self._name}, shape {tuple(self.shape)}, {self.dtype}"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(full_tensor(self), spec) if spec else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTensor":
        if id(self) not in memo:
            with torch.no_grad():
                copied = as_shard(self.to_local().clone(), self._origin, self._name)
            copied.requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EngineError(
            f"{self._name} is pickled, as torch.save() does: the file would have this process's shard alone. "
            "torchacc.save(model.state_dict(), path) and torchacc.checkpoint.save(), called by every process, write "
            "all of it, and torchacc.full_state_dict(model) returns unsharded tensors"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of PyTorch on shards, or on unsharded tensors, or refuse it."""
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            raise EngineError(
                "torch.autograd.grad() of sharded parameters with one XLA process per device: their gradients are "
                "there once backward has ended. Call loss.backward() and read parameter.grad, or use "
                "config.dist.fsdp.use_spmd = True, or the native engine"
            )
        call = traits_of(func)
        if call.is_question:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        method = vars(ShardedTensor).get(call.name)
        if callable(method) and call.name != "__torch_function__":
            return method(*args, **kwargs)
        written = _written(args, kwargs) if call.writes else kwargs.get("out")
        if call.is_each:
            return _run_each(call, func, args, kwargs)
        if any(isinstance(leaf, ShardedTensor) for leaf in tree_leaves(written)):
            return _write(call, func, written, args, kwargs)
        if call.is_elementwise and (origin := _common_origin(args, kwargs, call)) is not None:
            return _run_on_shards(func, args, kwargs, origin)
        return _run_on_unsharded(call, func, args, kwargs)


class UnshardedCopy(torch.Tensor):
    """A view of an unsharded copy. Changing it in place is refused, as the shards would stay as they are."""

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of PyTorch, unless it changes the copy."""
        call = traits_of(func)
        if call.writes and isinstance(_written(args, kwargs or {}), UnshardedCopy):
            raise EngineError(f"{call.name}() on a part of a sharded tensor would change a copy of it. {_INSTEAD}")
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return _as_copies(result) if call.is_view or call.base in ("data", "detach") else result


def _written(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function changes: its first argument, which those of nn.init pass on by name."""
    return args[0] if args else next(iter(kwargs.values()), None)


def as_shard(local: torch.Tensor, origin: ShardOrigin, name: str | None = None) -> ShardedTensor:
    """Return what this process holds of a tensor, padding included, as a `ShardedTensor` of the same memory."""
    with DisableTorchFunctionSubclass():
        shard: ShardedTensor = torch.Tensor._make_subclass(ShardedTensor, local)
    shard._origin = origin
    if name is not None:
        shard._name = name
    return shard


def as_shard_like(other: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor that is sharded like another."""
    return as_shard(local, other._origin) if isinstance(other, ShardedTensor) else local


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor, as a plain one without autograd."""
    return tensor.to_local() if isinstance(tensor, ShardedTensor) else tensor.detach()


def without_padding(shard: ShardedTensor) -> torch.Tensor:
    """Return what this process holds of a tensor, as a plain one whose padding is zeros.

    Every process runs the same program, as collectives on devices ask for.
    """
    local, rows, index = shard.to_local(), shard._origin.rows, shard._origin.reader.shard_index
    if rows.num_rows == rows.num_shards * rows.rows_per_shard:
        return local
    held = torch.arange(rows.rows_per_shard) < len(rows.rows(index))
    mask = held.to(local.device).view(-1, *(1 for _ in rows.shape[1:]))
    return torch.where(mask, local, torch.zeros((), dtype=local.dtype, device=local.device))


def full_tensor(shard: ShardedTensor) -> torch.Tensor:
    """Return the unsharded tensor, connected to a parameter's shard for autograd. Collective: every process."""
    origin = shard._origin
    origin.reader.check_same_call(f"{shard._name}, shape {tuple(shard.shape)}")
    if shard.requires_grad and torch.is_grad_enabled():
        if shard._read is None:
            raise EngineError(
                f"{shard._name} is a copy of a shard that asks for a gradient, and would get this process's own alone: "
                "compute with the model's own parameters, or with a copy from torchacc.full_state_dict(model)"
            )
        return shard._read()
    return origin.reader.unshard(shard.to_local(), origin.rows)


def _shards_in(*trees: Any) -> Iterator[ShardedTensor]:
    return (leaf for leaf in tree_leaves(trees) if isinstance(leaf, ShardedTensor))


def _common_origin(args: Sequence[Any], kwargs: Mapping[str, Any], call: FunctionTraits) -> ShardOrigin | None:
    """Return the origin that all operands share, where they are shards of one layout, and numbers; else None.

    A gradient goes through the unsharded tensor, so that it is reduced with all others.
    """
    grad_enabled = torch.is_grad_enabled() and call.base not in WITHOUT_GRADIENT
    origin = None
    for leaf in (*args, *kwargs.values()):
        if isinstance(leaf, ShardedTensor):
            origin = origin or leaf._origin
            if not leaf._origin.fits(origin) or (grad_enabled and leaf.requires_grad):
                return None
        elif isinstance(leaf, torch.Tensor):
            if leaf.dim() or (grad_enabled and leaf.requires_grad):
                return None
        elif isinstance(leaf, list | tuple):  # of no element-wise function's arguments
            return None
    return origin


def _run_on_shards(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], origin: ShardOrigin) -> Any:
    with DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if isinstance(result, ShardedTensor) or not isinstance(result, torch.Tensor):
        return result
    if result.device.type != "xla":  # a copy on the host is one that is read
        return _run_on_unsharded(traits_of(func), func, args, kwargs)
    return as_shard(result, origin)


def _run_on_unsharded(call: FunctionTraits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if call.is_random and any(True for _ in _shards_in(args, kwargs)):
        raise EngineError(
            f"{call.name}() of a sharded tensor: each process would draw numbers of its own, also for copies of one "
            "shard. Draw them for the unsharded shape with a generator that has the same seed on every rank, on the "
            "CPU: parameter.data.add_(torch.randn(parameter.shape, generator=generator).to(parameter.device))"
        )
    found: dict[int, torch.Tensor] = {}

    def unshard(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensor):
            return leaf
        if id(leaf) not in found:
            found[id(leaf)] = full_tensor(leaf)
        return found[id(leaf)]

    args, kwargs = tree_map(unshard, (tuple(args), dict(kwargs)))
    result = func(*args, **kwargs)
    return _as_copies(result) if call.is_view else result


def _write(call: FunctionTraits, func: Any, written: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Change a shard in place, element by element."""
    if call.name == "__setitem__" and (same := _as_full_assignment(*args)) is not None:
        return getattr(written, same[0])(*same[1:])
    if not isinstance(written, ShardedTensor) or not call.is_elementwise:
        raise EngineError(
            f"{call.name}() of {getattr(written, '_name', 'sharded tensors')}: this process holds a shard of it, and "
            f"what it computes is not element by element, or random. {_INSTEAD}"
        )
    origin = written._origin

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or (isinstance(leaf, ShardedTensor) and leaf._origin.fits(origin)):
            return leaf
        full = full_tensor(leaf) if isinstance(leaf, ShardedTensor) else leaf
        return origin.part_of(full) if full.dim() else full

    args, kwargs = tree_map(part, (tuple(args), dict(kwargs)))
    with DisableTorchFunctionSubclass():
        func(*args, **kwargs)
    return written


def _as_full_assignment(target: Any, index: Any, value: Any) -> tuple[Any, ...] | None:
    """Return the method and its arguments that assign to all elements, or to those of a mask."""
    if isinstance(index, ShardedTensor) and index.dtype == torch.bool and index._origin.fits(target._origin):
        return ("masked_fill_", index, value) if not isinstance(value, torch.Tensor) or not value.dim() else None
    if index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
        return ("copy_", value) if isinstance(value, torch.Tensor) else ("fill_", value)
    return None


def _run_each(call: FunctionTraits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a function of lists: on shards where it goes element by element, and on unsharded tensors otherwise."""
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    rest = [arg for arg in args if not isinstance(arg, list | tuple)]
    if not call.is_elementwise:
        if call.writes:
            raise EngineError(f"{call.name}() of sharded tensors is not element by element. {_INSTEAD}")
        return _run_on_unsharded(call, func, args, kwargs)
    origins = [_common_origin((*each, *rest), kwargs, call) for each in zip(*lists, strict=True)]
    mixed = [index for index, origin in enumerate(origins) if origin is None and _are_sharded(lists, index)]
    if mixed and (call.writes or len(mixed) < len(origins)):
        raise EngineError(
            f"{call.name}() of sharded tensors beside others in one list: a loop over them, with one function for each "
            "tensor, gives each what belongs to it"
        )
    if mixed:
        return _run_on_unsharded(call, func, args, kwargs)
    with DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if not isinstance(result, list | tuple):
        return result
    return [
        as_shard(each, origin) if origin is not None and not isinstance(each, ShardedTensor) else each
        for each, origin in zip(result, origins, strict=True)
    ]


def _are_sharded(lists: Sequence[Sequence[Any]], index: int) -> bool:
    return any(isinstance(each[index], ShardedTensor) for each in lists)


def _as_copies(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return (
            result.as_subclass(UnshardedCopy) if result._is_view() else result
        )  # an index by a tensor gives a new one
    if isinstance(result, list | tuple):
        return [_as_copies(part) for part in result]
    return map(_as_copies, result) if isinstance(result, Iterator) else result
