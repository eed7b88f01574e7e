"""Where a training loop is in its data, as plain data that a checkpoint keeps."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from torchacc.errors import DataError


@dataclass(frozen=True)
class Position:
    """How much of which epoch the loop has received, and what that epoch's order follows from.

    It counts batches of the loader's own order, from its start, whatever number of devices they were shared out to.
    """

    epochs: int = 0
    """How many epochs are over."""
    begun: bool = False
    """Whether the next one has begun, so that its order is decided."""
    batches: int = 0
    """How many batches of it the loop has had, those included that completed its last global batch."""
    epoch: int | None = None
    """The last argument of `set_epoch()`, for the epoch that has begun; None if it was not called."""
    seed: int | None = None
    """What decides on the order together with `epoch`; None as long as it was not asked for."""
    random: tuple[str | None, ...] = ()
    """The states of the loader's generators when the epoch began; without one, those that must be put back now."""
    order: str | None = None
    """A digest of how the order begins; None where it is not known before the data is."""
    loader: dict[str, Any] = field(default_factory=dict)
    """What the loader must have in common with the one that goes on from here."""

    def to_json(self) -> dict[str, Any]:
        """Return the position as plain data."""
        return asdict(self) | {"random": list(self.random)}

    @classmethod
    def from_json(cls, state: Any, loader: Mapping[str, Any]) -> "Position":
        """Read a position that `to_json` gave.

        Args:
            state: What it gave.
            loader: What the loader that is to go on from there has, by name; None where that is not known.

        Raises:
            DataError: The state is that of another loader, or no position.
        """
        if not isinstance(state, Mapping) or state.keys() != cls.__dataclass_fields__.keys():
            raise DataError(f"this is not the state_dict() of a loader: {str(state)[:100]}")
        saved: Mapping[str, Any] = state["loader"]
        known = [name for name in loader if loader[name] is not None and saved.get(name) is not None]
        differing = [name for name in known if saved[name] != loader[name]]
        if differing:
            said = ", ".join(f"{name} {saved[name]}, here {loader[name]}" for name in differing)
            raise DataError(
                f"the data position was saved by another loader: {said}. Pass the loader of the interrupted run (the "
                "number of devices may differ), or leave the position out to start a new epoch"
            )
        return cls(**{**state, "random": tuple(state["random"]), "loader": dict(saved)})


def pack(generator: torch.Generator) -> str:
    """Return a generator's state as text."""
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def unpack(generator: torch.Generator, text: str | None) -> None:
    """Give a generator the state that `pack` returned; None leaves it alone."""
    if text is not None:
        generator.set_state(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8))


@contextmanager
def replayed(generators: Sequence[torch.Generator], states: Sequence[str | None]) -> Iterator[None]:
    """Draw again what was drawn when an epoch began.

    Afterwards the global generator is where it was: what the epoch drew from it lies in its past. A generator of the
    loader's own stays where the epoch's draws have left it.
    """
    kept = torch.default_generator.get_state()
    for generator, state in zip(generators, states, strict=False):
        unpack(generator, state)
    try:
        yield
    finally:
        torch.default_generator.set_state(kept)
