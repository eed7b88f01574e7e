"""Which stage of a pipeline computes what of a model, as plain data."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from torch import nn

from torchacc.errors import ConfigError
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torchacc.config.option_types import PipelineSchedule
    from torchacc.config.sections import PPConfig

_DEFAULT_PER_STAGE = 2
"""How many microbatches a batch has for each stage, where the config names no number."""


class Pass(Enum):
    """A direction through a stage."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class PipelinePlan:
    """How a model is split into stages: contiguous runs of its layers, with what comes before them in the first stage
    and what comes after them in the last one.
    """

    size: int = 1
    """Number of stages."""
    layers: str = ""
    """The name of the list of layers."""
    bounds: tuple[int, ...] = ()
    """The first layer of each stage, by number, and how many layers there are."""
    before: tuple[str, ...] = ()
    """Names of the modules with parameters that run before the layers."""
    after: tuple[str, ...] = ()
    """Names of those that run after them."""
    num_microbatches: int = 1
    """Parts into which the rows of each batch are split, if there are as many."""
    schedule: "PipelineSchedule" = "gpipe"
    """In which order the stages run them."""

    def layers_of(self, stage: int) -> range:
        """Return the numbers of a stage's layers."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def stage_of(self, name: str) -> int:
        """Return the stage that computes with a module, or with the parameter of one, by its name."""
        if name.startswith(f"{self.layers}."):
            number = int(name.removeprefix(f"{self.layers}.").partition(".")[0])
            return bisect_right(self.bounds, number) - 1
        return 0 if _is_inside(name, self.before) else self.size - 1

    def stages_of(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the stages that hold a parameter with these names: two, where it is tied between the first and last.

        Args:
            names: All names of the parameter.
        """
        return tuple(sorted({self.stage_of(name) for name in names})) if self.size > 1 else (0,)

    def passes(self, stage: int, count: int) -> list[tuple[Pass, int]]:
        """Return what a stage runs in turn, and of which microbatch.

        Args:
            stage: The stage.
            count: The number of microbatches.
        """
        if self.schedule == "gpipe":
            return all_forwards_first(count)
        return list(one_forward_one_backward(stage, self.size, count))

    def is_layer(self, name: str) -> bool:
        """Return whether a module is a layer, or inside of one."""
        return name.startswith(f"{self.layers}.")

    def __str__(self) -> str:
        lines = []
        for stage, (first, stop) in enumerate(pairwise(self.bounds)):
            own = f"{self.layers}.{first}" + (f" to {self.layers}.{stop - 1}" if stop - first > 1 else "")
            beside = (self.before if stage == 0 else ()) + (self.after if stage == self.size - 1 else ())
            lines.append(f"  stage {stage}: {', '.join([own, *beside])}")
        return "\n".join([*lines, f"  batches split into {self.num_microbatches} microbatches, {self.schedule}"])


def all_forwards_first(count: int) -> list[tuple[Pass, int]]:
    """Return what a stage runs in turn in GPipe's schedule, and of which microbatch: back from the last."""
    forwards = [(Pass.FORWARD, number) for number in range(count)]
    return [*forwards, *((Pass.BACKWARD, number) for number in reversed(range(count)))]


def one_forward_one_backward(stage: int, num_stages: int, count: int) -> Iterator[tuple[Pass, int]]:
    """Yield what a stage runs in turn in the schedule 1F1B, and of which microbatch.

    Each stage is as many forwards ahead as there are stages behind it, so that it holds activations of no more than
    `num_stages - stage` microbatches (Narayanan et al., PipeDream-Flush, https://arxiv.org/abs/2006.09503).

    Args:
        stage: The stage.
        num_stages: How many there are.
        count: The number of microbatches.
    """
    ahead = min(num_stages - 1 - stage, count)
    for number in range(count + ahead):
        if number < count:
            yield Pass.FORWARD, number
        if number >= ahead:
            yield Pass.BACKWARD, number - ahead


def plan_pipeline(
    model: nn.Module, config: "PPConfig", mesh: Mesh, numels: Sequence[tuple[tuple[str, ...], int]]
) -> PipelinePlan:
    """Split a model's layers into stages with about as many parameters.

    Args:
        model: The model; it is only read.
        config: The options.
        mesh: The mesh.
        numels: For each parameter its names, and the number of its elements.

    Raises:
        ConfigError: There are no layers, or fewer than stages, or stages would share what is inside of a layer.
    """
    size = mesh.size(Role.PIPELINE)
    if size == 1:
        return PipelinePlan()
    asked = f"config.dist.pp.size = {size}"
    layers = _find_layers(model)
    if layers is None:
        raise ConfigError(
            f"{asked}, and {type(model).__name__} has no list of layers of one class (nn.ModuleList) to split into "
            "stages: use config.dist.fsdp.size"
        )
    num_layers = len(model.get_submodule(layers))  # type: ignore[arg-type]
    if num_layers < size:
        raise ConfigError(f"{asked}, and {layers!r} has {num_layers} layers: choose at most {num_layers} stages")
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    names = [name for name, module in model.named_modules() if module._parameters]
    outside = [name for name in names if not f"{name}.".startswith(f"{layers}.")]
    around = next((name for name in outside if not name or layers.startswith(f"{name}.")), None)
    if around is not None:
        raise ConfigError(
            f"{asked}, and {around or 'the model'!r}, which holds the layers, has parameters of its own, which belong "
            "to no stage: use config.dist.fsdp.size"
        )
    plan = PipelinePlan(
        size=size,
        layers=layers,
        bounds=tuple(range(size + 1)),
        before=tuple(name for name in outside if order[name] < order[layers]),
        after=tuple(name for name in outside if order[name] > order[layers]),
        num_microbatches=config.num_microbatches or _DEFAULT_PER_STAGE * size,
        schedule=config.schedule,
    )
    weights = _weights(asked, plan, num_layers, numels)
    return replace(plan, bounds=_balanced(weights, size))


def _weights(
    asked: str, plan: PipelinePlan, num_layers: int, numels: Sequence[tuple[tuple[str, ...], int]]
) -> list[int]:
    """Return how many elements each layer has, with what lies before the first and after the last of them."""
    layers = plan.layers
    weights = [0] * num_layers
    first = last = 0
    for own_names, numel in numels:
        inside = {int(name.removeprefix(f"{layers}.").partition(".")[0]) for name in own_names if plan.is_layer(name)}
        beside = [name for name in own_names if not plan.is_layer(name)]
        if len(inside) > 1 or (inside and beside):
            raise ConfigError(
                f"{asked}, and {' and '.join(map(repr, own_names))} are one parameter, which several stages would "
                "share: use config.dist.fsdp.size"
            )
        for number in inside:
            weights[number] += numel
        first += numel * any(_is_inside(name, plan.before) for name in beside)
        last += numel * any(not _is_inside(name, plan.before) for name in beside)
    weights[0] += first
    weights[-1] += last
    return weights


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _find_layers(model: nn.Module) -> str | None:
    """Return the name of the list with the most parameters whose modules are all of one class."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1:
            found[name] = sum(parameter.numel() for parameter in module.parameters())
    return max(found, key=lambda name: found[name], default=None)


def _balanced(weights: Sequence[int], size: int) -> tuple[int, ...]:
    """Return where each of the contiguous runs begins, and the end, whose largest sum is the smallest.

    Args:
        weights: Of the layers.
        size: The number of runs, each of one layer at least.
    """
    sums = list(accumulate(weights, initial=0))
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(0, 0): (0, (0,))}
    for run in range(1, size + 1):
        for stop in range(run, len(weights) + 1):
            best[run, stop] = min(
                (max(best[run - 1, start][0], sums[stop] - sums[start]), (*best[run - 1, start][1], stop))
                for start in range(run - 1, stop)
                if (run - 1, start) in best
            )
    return best[size, len(weights)][1]
