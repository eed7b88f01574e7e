"""Record a model's initialisation instead of running it, so that each parameter is made when it is sharded.

`deferred_init()` watches what a constructor does to large tensors. These lie on the meta device and need no memory;
each knows the steps that give it its values, and the state of the generator before every draw among them. Carried out
again later, in any order, they give the very numbers of a model that was built on the CPU.
"""

import hashlib
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torchacc.errors import ConfigError

_RECIPE = "_torchacc_recipe"
_SMALLEST_BYTES = 4096
"""Smaller tensors are made at once: they need no memory worth saving, and constructors look at their values."""
_MAPPED_BYTES = 1 << 17
"""From this size on memory is asked of the system; it is where malloc() begins to do so, too."""

_aten = torch.ops.aten
_OVERWRITES = {_aten.fill_, _aten.zero_, _aten.normal_, _aten.uniform_, _aten.copy_}
"""Operations after which nothing is left of what their first argument held."""


def deferred_init(build: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Build a model without memory for its parameters, which `accelerate()` initialises unit by unit as it shards them.

    The sharded model has the same values, bit for bit, as `build()` on the CPU after the same `torch.manual_seed()`.
    The random generator is left in the same state. For this each random number is drawn twice. Any code that changes
    the values of parameters must be part of `build`. Use the same seed on all processes.

    Args:
        build: A function that builds the model, for example its class.
        *args: Positional arguments of `build`.
        **kwargs: Keyword arguments of `build`.

    Returns:
        The model, with its large floating-point tensors on the meta device.

    Raises:
        ConfigError: The default device is the meta device, on which transformers skips initialisation.

    Example:
        >>> torch.manual_seed(0)
        >>> model = torchacc.deferred_init(GPT2LMHeadModel, config)
        >>> model = torchacc.accelerate(model, config=torchacc.Config())
    """
    if torch.get_default_device().type == "meta":
        raise ConfigError(
            "deferred_init() with the meta device as the default device: models leave their initialisation out there. "
            "Call it without torch.device('meta')"
        )
    recording = _Recording()
    with recording, _SeenOnTheCpu(recording):
        model = build(*args, **kwargs)
    recording.leave_recipes(model)
    return model


def is_recorded(tensor: torch.Tensor) -> bool:
    """Return whether the initialisation of a tensor on the meta device was recorded."""
    return _RECIPE in vars(tensor)


def take_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that a recorded initialisation gives a tensor, on the host, once; else the tensor."""
    recipe: _Recipe | None = vars(tensor).pop(_RECIPE, None)
    return tensor if recipe is None else recipe.values().to(tensor.dtype)


def forget_values(tensor: torch.Tensor) -> None:
    """Forget how a tensor's values are initialised, where another process has them."""
    vars(tensor).pop(_RECIPE, None)


def check_unchanged(model: nn.Module) -> None:
    """Refuse a model that was changed after `deferred_init()`, in a way that was not recorded.

    Raises:
        ConfigError: It was.
    """
    for name, tensor in _tensors_of(model):
        if is_recorded(tensor) and not vars(tensor)[_RECIPE].is_of(tensor):
            raise ConfigError(
                f"{name!r} was changed after deferred_init(), where it has no values yet: do that inside of the "
                "function that deferred_init() calls"
            )


def fingerprints(model: nn.Module) -> dict[str, str]:
    """Return a digest of each recorded initialisation: name -> digest."""
    return {name: vars(tensor)[_RECIPE].fingerprint() for name, tensor in _tensors_of(model) if is_recorded(tensor)}


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@dataclass(eq=False)
class _Place:
    """The memory of a deferred tensor, which its views share."""

    key: int
    storage: torch.UntypedStorage
    """The one on the meta device; held so that no other takes its address."""
    last: "_RecordedCall | None" = None
    """What wrote to it last."""


@dataclass(frozen=True)
class _View:
    """A tensor by the place where it lies."""

    key: int
    num_bytes: int
    """Of the whole place."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def in_memory(self, memory: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """Return the tensor on the host, in memory that is made when it is first asked for."""
        if self.key not in memory:
            memory[self.key] = _allocate(self.num_bytes)
        return torch.empty(0, dtype=self.dtype).set_(memory[self.key], self.offset, self.shape, self.stride)


def _allocate(num_bytes: int) -> torch.UntypedStorage:
    """Return memory on the host, which goes back to the system when it is free again.

    malloc() would put the states of the generator, which stay, into the holes that large tensors leave, so that the
    next one needs memory of its own: in the end as much as the whole model.
    """
    if num_bytes < _MAPPED_BYTES:
        return torch.UntypedStorage(num_bytes)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).untyped_storage()


@dataclass(frozen=True, eq=False)
class _RecordedCall:
    """One operation, with views in place of deferred tensors."""

    index: int
    """Its place in the order of all steps."""
    function: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    after: "tuple[_RecordedCall, ...]"
    """The last steps before it that wrote what it reads."""
    draws: tuple[torch.Generator, torch.Tensor] | None
    """The generator that it draws from, and that one's state before it; None where it draws nothing."""
    made: dict[int, _View]
    """Those of its outputs that are new, by their position among all."""

    def act(self, memory: dict[int, torch.UntypedStorage]) -> None:
        """Carry it out with the generator as it is."""
        args, kwargs = tree_map_only(_View, lambda view: view.in_memory(memory), (self.args, self.kwargs))
        outputs = tree_leaves(self.function(*args, **kwargs))
        for position, view in self.made.items():
            view.in_memory(memory).copy_(outputs[position])

    def act_again(self, memory: dict[int, torch.UntypedStorage]) -> None:
        """Carry it out with the generator as it was, and leave it as it is."""
        if self.draws is None:
            self.act(memory)
            return
        generator, state = self.draws
        now = generator.get_state()
        generator.set_state(state)
        try:
            self.act(memory)
        finally:
            generator.set_state(now)


def _replay(*last: _RecordedCall) -> dict[int, torch.UntypedStorage]:
    """Carry out steps and all that they come after, in their order; return the memory that they wrote."""
    memory: dict[int, torch.UntypedStorage] = {}
    for step in _with_all_before(*last):
        step.act_again(memory)
    return memory


def _with_all_before(*last: _RecordedCall) -> list[_RecordedCall]:
    found: dict[int, _RecordedCall] = {}
    waiting = [*last]
    while waiting:
        step = waiting.pop()
        if step.index not in found:
            found[step.index] = step
            waiting += step.after
    return [found[index] for index in sorted(found)]


@dataclass(frozen=True)
class _Recipe:
    """How a tensor gets its values."""

    view: _View
    last: _RecordedCall | None
    storage: torch.UntypedStorage
    version: int

    @torch.no_grad()
    def values(self) -> torch.Tensor:
        return self.view.in_memory({} if self.last is None else _replay(self.last))

    def is_of(self, tensor: torch.Tensor) -> bool:
        same = tensor.untyped_storage()._cdata == self.storage._cdata
        return same and tensor._version == self.version

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(repr(self.view).encode(), digest_size=16)
        for step in _with_all_before(self.last) if self.last is not None else ():
            digest.update(str(step.function).encode())
            for leaf in tree_leaves((step.args, step.kwargs, step.draws)):
                if isinstance(leaf, torch.Tensor):
                    digest.update(leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
                elif not isinstance(leaf, torch.Generator):  # its state says it all
                    digest.update(repr(leaf).encode())
        return digest.hexdigest()


class _Recording(TorchDispatchMode):
    """Lets large tensors be made on the meta device, and notes all that is done to them."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, _Place] = {}
        self._num_steps = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record what is done to a deferred tensor, and let all else be done at once."""
        with DisableTorchFunction():  # here a deferred tensor is seen as what it is
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _device_type(kwargs) == "meta":  # PyTorch's own code asks for the device of a deferred tensor
            kwargs["device"] = torch.device("cpu")
        tensors = _tensors_in((args, kwargs))
        if any(self.knows(tensor) for tensor in tensors):
            if self._needs_values(func, args, kwargs):
                return func(*self._real(args), **self._real(kwargs))
            return self._record(func, args, kwargs)
        if not tensors and _makes_a_large_one(func, args, kwargs):
            return self._record(func, args, kwargs)
        return func(*args, **kwargs)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is deferred."""
        return self._place(tensor) is not None

    def leave_recipes(self, model: nn.Module) -> None:
        """Attach recipes to parameters and buffers, and make the other tensors that modules hold."""
        for _, tensor in _tensors_of(model):
            place = self._place(tensor)
            if place is not None:
                recipe = _Recipe(_view(place, tensor), place.last, place.storage, tensor._version)
                vars(tensor)[_RECIPE] = recipe
        for module in model.modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    vars(module)[name] = self._real(value)

    def _place(self, tensor: torch.Tensor) -> _Place | None:
        return self._places.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None

    def _needs_values(self, func: OpOverload, args: Any, kwargs: Any) -> bool:
        """Return whether an operation on deferred tensors cannot wait, as something comes out that is not deferred."""
        asks = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        writes_elsewhere = not all(self.knows(tensor) for tensor in _written(func, args, kwargs))
        return bool(asks) or writes_elsewhere or _device_type(kwargs) != "cpu"

    def _record(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        output = func(*_on_meta(args), **_on_meta(_for_meta(func, kwargs)))
        made = {
            position: tensor
            for position, tensor in enumerate(tree_leaves(output))
            if isinstance(tensor, torch.Tensor) and not self.knows(tensor)
        }
        written = _written(func, args, kwargs)
        if made or written:  # else it is a view
            self._note(func, args, kwargs, made, written)
        return output

    def _note(
        self, func: OpOverload, args: Any, kwargs: Any, made: dict[int, torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        inputs = _tensors_in((args, kwargs))
        read = inputs[1:] if _overwrites(func, inputs) else inputs
        if not inputs and _takes(func, "dtype"):
            kwargs["dtype"] = made[0].dtype  # the default may be another one later
        generator = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator") or torch.default_generator
        step = _RecordedCall(
            index=self._num_steps,
            function=func,
            args=self._views(args),
            kwargs=self._views(kwargs),
            after=self._last_steps(read),
            draws=None if generator is None else (generator, generator.get_state()),
            made={position: _view(self._new_place(tensor), tensor) for position, tensor in made.items()},
        )
        self._num_steps += 1
        for tensor in [*made.values(), *written]:
            place = self._place(tensor)
            assert place is not None
            place.last = step
        if generator is not None:
            step.act(_replay(*step.after))  # so that the generator goes on to where it would be

    def _new_place(self, tensor: torch.Tensor) -> _Place:
        storage = tensor.untyped_storage()
        return self._places.setdefault(storage._cdata, _Place(len(self._places), storage))

    def _last_steps(self, tensors: list[torch.Tensor]) -> tuple[_RecordedCall, ...]:
        places = [self._place(tensor) for tensor in tensors]
        return tuple(dict.fromkeys(place.last for place in places if place is not None and place.last is not None))

    def _views(self, tree: Any) -> Any:
        """Return a tree with views for deferred tensors, and copies of the others as they are now."""

        def view(tensor: torch.Tensor) -> Any:
            place = self._place(tensor)
            return tensor.detach().clone() if place is None else _view(place, tensor)

        return tree_map_only(torch.Tensor, view, tree)

    def _real(self, tree: Any) -> Any:
        """Return a tree with the values of deferred tensors."""

        def real(tensor: torch.Tensor) -> torch.Tensor:
            place = self._place(tensor)
            return tensor if place is None else _view(place, tensor).in_memory(_replay(*self._last_steps([tensor])))

        return tree_map_only(torch.Tensor, real, tree)


class _SeenOnTheCpu(TorchFunctionMode):
    """Lets constructors see deferred tensors on the CPU: some leave their initialisation out on the meta device."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer the questions about a deferred tensor's device, and let all else be done."""
        if func in _ANSWERS and self._recording.knows(args[0]):
            return _ANSWERS[func]
        return func(*args, **(kwargs or {}))


_ANSWERS: dict[Callable[..., Any], Any] = {
    torch.Tensor.device.__get__: torch.device("cpu"),
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
}


def _view(place: _Place, tensor: torch.Tensor) -> _View:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return _View(place.key, place.storage.nbytes(), tensor.dtype, shape, stride, int(tensor.storage_offset()))


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _takes(func: OpOverload, name: str) -> bool:
    return any(argument.name == name for argument in func._schema.arguments)


def _device_type(kwargs: dict[str, Any]) -> str:
    return torch.device(kwargs["device"]).type if kwargs.get("device") is not None else "cpu"


def _written(func: OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that an operation writes to."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    changed = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    return _tensors_in([value for name, value in given.items() if name in changed])


def _overwrites(func: OpOverload, inputs: list[torch.Tensor]) -> bool:
    """Return whether nothing of what lay where the first input lies is left after an operation."""
    if func.overloadpacket not in _OVERWRITES:
        return False
    target = inputs[0]
    return target.is_contiguous() and target.nbytes == target.untyped_storage().nbytes()


def _makes_a_large_one(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Return whether an operation without inputs makes a tensor on the CPU that is worth deferring."""
    if not _takes(func, "device") or _device_type(kwargs) != "cpu":
        return False
    made = func(*args, **_for_meta(func, kwargs))
    return isinstance(made, torch.Tensor) and made.is_floating_point() and made.nbytes >= _SMALLEST_BYTES


def _for_meta(func: OpOverload, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that let an operation find out shapes only."""
    known = {"device": torch.device("meta"), "generator": None}
    return {**kwargs, **{name: value for name, value in known.items() if _takes(func, name)}}


def _on_meta(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), tree)
