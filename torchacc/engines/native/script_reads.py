"""What a script reads of sharded tensors by itself, as every process has to: the first reads look whether all do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchacc.engines.process_group import ProcessGroup
from torchacc.env import read_job

_NUM_CHECKED = 64
"""How many reads of a process are checked: what only some processes read, they mostly do from the start."""


class _Reads:
    """The reads of this process."""

    num_left = _NUM_CHECKED
    is_inside = False
    """Whether a forward or a step runs, which every process makes."""


_reads = _Reads()


def begin() -> None:
    """Note that what follows is part of a step that every process makes."""
    _reads.is_inside = True


def end() -> None:
    """Note that the script goes on."""
    _reads.is_inside = False


@contextmanager
def inside() -> Iterator[None]:
    """Hold a context for what every process makes."""
    before, _reads.is_inside = _reads.is_inside, True
    try:
        yield
    finally:
        _reads.is_inside = before


def expect_all(mesh: Any) -> None:
    """Wait until every process reads, before tensors of a mesh are gathered.

    Raises:
        EngineError: Others do something else, as `ProcessGroup.expect_all()` finds it.
    """
    is_of_script = not _reads.is_inside and torch._C._current_graph_task_id() == -1
    if not is_of_script or not _reads.num_left or mesh.ndim != 1:
        return
    job = read_job()
    if mesh.size() == job.num_processes:
        _reads.num_left -= 1
        ProcessGroup(job).expect_all("a read of a sharded parameter or gradient, as by parameter.norm()")
