"""What is saved in the background while training goes on, on two devices of each engine."""

import pytest
from casekit import RANK, X, case, part, step
from state_cases import shared_folder, trained

import torchacc
from torchacc.checkpoint import saver
from torchacc.checkpoint import snapshot as begin


def contents(folder):
    """Return the bytes of a checkpoint's tensors."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@case()
def saved_in_the_background_is_what_was_there_at_its_moment() -> None:
    model, optimizer, _, _ = trained()
    parts = {"model": model, "optimizer": optimizer}
    with shared_folder() as folder:
        for name in ("first", "again"):  # into the memory of the first
            torchacc.checkpoint.save(folder / "now", **parts)
            pending = begin(folder / name, **parts)
            for _ in range(2):
                step(model, part(X), optimizer)
            pending.write()
            torchacc.checkpoint.verify(folder / name)
            assert {"model.safetensors", "optimizer.safetensors"} <= contents(folder / name).keys()
            assert contents(folder / name) == contents(folder / "now")
            torchacc.dist.rendezvous("compared")


@case()
def too_little_memory_for_a_copy_on_one_rank_fails_the_save_of_all() -> None:
    model, optimizer, _, _ = trained()
    parts = {"model": model, "optimizer": optimizer}

    def no_room(*_: object) -> None:
        raise MemoryError("no room")

    with shared_folder() as folder:
        torchacc.checkpoint.save(folder / "saved", **parts, extra="old")
        with pytest.MonkeyPatch.context() as patch:
            if RANK == 0:
                patch.setattr(saver, "_copied", no_room)
            with pytest.raises((MemoryError, torchacc.CheckpointError), match="no room"):
                begin(folder / "saved", **parts).write()
        torchacc.dist.rendezvous("failed")
        assert [path.name for path in folder.iterdir()] == ["saved"]
        assert torchacc.checkpoint.load(folder / "saved", **parts) == "old"
