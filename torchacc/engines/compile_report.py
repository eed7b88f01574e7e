"""What has been compiled in this process, as plain data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CompileReport:
    """What has been compiled in this process so far, all zeros where nothing is; `str()` gives it as a few lines."""

    graphs: int = 0
    """Programs that were compiled."""
    secs: float = 0.0
    """Seconds spent on that."""
    cache_hits: int = 0
    """Runs of a program that had been compiled before."""
    persistent_cache_hits: int = 0
    """Programs that were read from the disk (`config.compute.compile_cache`) instead of being compiled."""
    notes: tuple[str, ...] = ()
    """Why a step compiles more than once, where that is known before."""
    recompiles: tuple[str, ...] = ()
    """What was compiled again, and what had changed: under XLA after the first two steps of an optimizer."""
    breaks: tuple[str, ...] = ()
    """Where a graph of `torch.compile` ends before its function does, and why (native engine)."""

    def __str__(self) -> str:
        return "\n".join(
            [
                f"compiled    {self.graphs} programs in {self.secs:.1f} s",
                f"reused      {self.cache_hits} times, and {self.persistent_cache_hits} programs from the disk",
                *(f"note        {note}" for note in self.notes),
                *(f"recompiled  {recompile}" for recompile in self.recompiles),
                *(f"broken      {place}" for place in self.breaks),
            ]
        )
