"""What has been compiled in this process, as plain data."""

from dataclasses import dataclass

WARM_UP_STEPS = 2
"""Steps of an optimizer in which something new may be compiled without a warning."""


@dataclass(frozen=True)
class CompileReport:
    """What this process has compiled so far; all zeros in an engine without a compiler. `str()` formats it."""

    graphs: int = 0
    """Number of programs that were compiled."""
    secs: float = 0.0
    """Seconds spent on compiling."""
    cache_hits: int = 0
    """Number of executions of programs that were already compiled."""
    persistent_cache_hits: int = 0
    """Number of programs that were read from disk (`config.compute.compile_cache`) instead of being compiled."""
    notes: tuple[str, ...] = ()
    """Known reasons for which a step compiles more than once."""
    recompiles: tuple[str, ...] = ()
    """Recompiled programs, and what had changed; under XLA those after the first two steps of an optimizer."""
    breaks: tuple[str, ...] = ()
    """Graph breaks of `torch.compile`, with the reason (native engine)."""

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
