"""What a script reads of sharded tensors by itself, as every process has to: the first reads look whether all do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torchacc.engines.process_group import ProcessGroup
from torchacc.env import read_job
from torchacc.errors import EngineError

if TYPE_CHECKING:
    from torchacc.engines.native.stage_collectives import StageLink

_NUM_CHECKED = 64
"""How many reads of a process are checked: what only some processes read, they mostly do from the start."""


class _Reads:
    """The reads of this process."""

    num_left = _NUM_CHECKED
    is_inside = False
    """Whether a forward or a step runs, which every process makes."""


_reads = _Reads()


def begin() -> None:
    """Record that what follows is part of a step that every process makes."""
    _reads.is_inside = True


def end() -> None:
    """Record that the script goes on."""
    _reads.is_inside = False


@contextmanager
def inside() -> Iterator[None]:
    """Context manager for what every process makes."""
    before, _reads.is_inside = _reads.is_inside, True
    try:
        yield
    finally:
        _reads.is_inside = before


def expect_all(spec: Any) -> None:
    """Wait until every process reads, before a distributed tensor of which all have another part is gathered.

    Raises:
        EngineError: Others do something else, as `ProcessGroup.expect_all()` finds it.
    """
    if not _reads.num_left or not _is_of_script() or any(placement.is_replicate() for placement in spec.placements):
        return
    if spec.mesh.size() == read_job().num_processes:
        _expect("a read of a sharded parameter or gradient, as by parameter.norm()")


def _expect(read: str) -> None:
    if _reads.num_left:
        _reads.num_left -= 1
        ProcessGroup(read_job()).expect_all(read)


def _is_of_script() -> bool:
    return not _reads.is_inside and torch._C._current_graph_task_id() == -1


_SUM = "sum"
_SHAPE = "_torchacc_shape"
"""The attribute of a tensor of another stage with its shape there."""
_stages: "dict[Any, StageLink]" = {}
"""The connections of stages, by the mesh of their parameters."""


def note_stages(mesh: Any, link: "StageLink") -> None:
    """Record that parameters without elements on a mesh are those of other stages."""
    _stages[mesh] = link


def is_of_other_stage(shard: Any) -> bool:
    """Return whether a distributed tensor is another stage's, of which this one has no elements."""
    return 0 in shard._spec.shape and shard._spec.mesh in _stages


def note_other_stage(shard: Any, shape: Sequence[int]) -> None:
    """Record the shape that another stage's tensor has there."""
    vars(shard)[_SHAPE] = tuple(shape)


def full_shape(shard: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, of another stage's that which it has there."""
    return tuple(vars(shard).get(_SHAPE, shard.shape))


def total_of_stages(name: str, shards: Sequence[Any], own: Any) -> Any:
    """Return what a script computes: a sum as all stages have it, and anything else as it is.

    Collective: all stages, for sums of what a model in stages holds. In backward each stage has the gradients of its
    own parameters.

    Args:
        name: The function's.
        shards: The distributed tensors that it is given.
        own: What it returns here, nothing of other stages.

    Raises:
        EngineError: It is no sum of all elements, or others do something else, as `expect_all()` finds it.
    """
    link = _link_of(shards)
    if link is None or name != _SUM or not _is_of_script():
        return own
    if own.dim():
        raise EngineError(
            "sum() along dimensions of parameters of a model in stages (config.dist.pp.size), which a stage alone has: "
            "only a sum of all elements is the same on all, parameter.square().sum(). Leave out the dimensions, or "
            "set config.dist.pp.size = 1"
        )
    _expect("a sum over a parameter of a model in stages, as by parameter.square().sum()")
    return link.total(own, is_held=not any(map(is_of_other_stage, shards)))


def _link_of(shards: Sequence[Any]) -> "StageLink | None":
    """Return the connection of the stages that hold these; None where a model is in no stages."""
    return next((_stages[each._spec.mesh] for each in shards if each._spec.mesh in _stages), None)


def refuse_other_stages(name: str, shards: Sequence[Any]) -> None:
    """Refuse what a script computes from tensors of other stages, of which this one has no elements.

    But for `total_of_stages()`.

    Args:
        name: The function's.
        shards: The distributed tensors that it is given.

    Raises:
        EngineError: One of them is another stage's.
    """
    if not _stages or name == _SUM or not _is_of_script():
        return
    if any(map(is_of_other_stage, shards)):
        raise EngineError(
            f"{name}() of a parameter or gradient of another stage (config.dist.pp.size), which has no elements here: "
            "the stages would get different numbers. For a norm of all gradients, "
            'model.clip_grad_norm_(float("inf")); of all weights, '
            "torch.nn.utils.get_total_norm(model.parameters()); for their values, "
            "torchacc.full_state_dict(model) on every process; to write to a part of one, "
            "parameter.data[index] = values"
        )
