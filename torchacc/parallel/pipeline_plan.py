"""Which stage of a pipeline computes what of a model, as plain data."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from torchacc.errors import ConfigError
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torchacc.config.option_types import PipelineSchedule
    from torchacc.config.sections import PPConfig

_DEFAULT_PER_DEVICE = 2
"""How many microbatches a batch has for each device of the stages, where the config names no number."""
_DEFAULT_STAGES_PER_DEVICE = 2
"""How many stages a device has in the interleaved schedule, where the config names no number."""


class Pass(Enum):
    """A direction through a stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weights"
    """What a backward that was split has left: the gradients of weights."""


class Action(NamedTuple):
    """One pass of a microbatch through a stage."""

    kind: Pass
    stage: int
    number: int
    """That of the microbatch."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name[0]}{self.number}"


@dataclass(frozen=True)
class PipelinePlan:
    """How a model is split into stages: contiguous runs of its layers, with what comes before them in the first stage
    and what comes after them in the last one.
    """

    size: int = 1
    """Number of stages."""
    num_devices: int = 1
    """Number of devices that share them: each has that of its place, and each so many further on."""
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

    def stages_at(self, place: int) -> range:
        """Return the stages of one of the devices.

        Args:
            place: Its place among them.
        """
        return range(place, self.size, self.num_devices)

    def places_of(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the places of the devices that hold a parameter with these names, of one or two stages.

        Args:
            names: All names of the parameter.
        """
        return tuple(sorted({stage % self.num_devices for stage in self.stages_of(names)}))

    @property
    def runs_backward_early(self) -> bool:
        """Whether the model's forward runs the backwards, too."""
        return self.schedule != "gpipe"

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are computed in a pass of their own."""
        return self.schedule == "zero_bubble"

    def actions(self, place: int, count: int) -> list[Action]:
        """Return what one of the devices runs in turn.

        Args:
            place: Its place among them.
            count: The number of microbatches.
        """
        match self.schedule:
            case "gpipe":
                return all_forwards_first(place, count)
            case "1f1b":
                return one_forward_one_backward(place, self.size, count)
            case "zero_bubble":
                return zero_bubble(place, self.size, count)
            case "interleaved":
                return interleaved(self.stages_at(place), self.num_devices, count)

    def forwards(self, place: int, count: int) -> list[Action]:
        """Return what one of the devices runs in turn where there is no backward."""
        return [action for action in self.actions(place, count) if action.kind is Pass.FORWARD]

    def is_layer(self, name: str) -> bool:
        """Return whether a module is a layer, or inside of one."""
        return name.startswith(f"{self.layers}.")

    def __str__(self) -> str:
        lines = []
        for stage, (first, stop) in enumerate(pairwise(self.bounds)):
            own = f"{self.layers}.{first}" + (f" to {self.layers}.{stop - 1}" if stop - first > 1 else "")
            beside = (self.before if stage == 0 else ()) + (self.after if stage == self.size - 1 else ())
            where = (
                f" on device {stage % self.num_devices} of {self.num_devices}" if self.size > self.num_devices else ""
            )
            lines.append(f"  stage {stage}{where}: {', '.join([own, *beside])}")
        return "\n".join([*lines, f"  batches split into {self.num_microbatches} microbatches, {self.schedule}"])


def all_forwards_first(stage: int, count: int) -> list[Action]:
    """Return what a stage runs in turn in GPipe's schedule: back from the last microbatch."""
    forwards = [Action(Pass.FORWARD, stage, number) for number in range(count)]
    return [*forwards, *(action._replace(kind=Pass.BACKWARD) for action in reversed(forwards))]


def one_forward_one_backward(stage: int, num_stages: int, count: int) -> list[Action]:
    """Return what a stage runs in turn in the schedule 1F1B.

    Each stage is as many forwards ahead as there are stages behind it, so that it holds activations of no more than
    `num_stages - stage` microbatches (Narayanan et al., PipeDream-Flush, https://arxiv.org/abs/2006.09503).

    Args:
        stage: The stage.
        num_stages: How many there are.
        count: The number of microbatches.
    """
    turns = [(stage, number) for number in range(count)]
    return _alternating(turns, turns, ahead=num_stages - 1 - stage)


def zero_bubble(stage: int, num_stages: int, count: int) -> list[Action]:
    """Return what a stage runs in turn in the zero bubble schedule ZB-H1.

    It is 1F1B whose backwards compute the gradients that the stage before waits for. Those of weights follow as many
    microbatches later as there are stages before, so that no stage holds more than `num_stages` microbatches; late
    stages have them left for the end, where early ones still run backwards (Qi et al., https://arxiv.org/abs/2401.10241).

    Args:
        stage: The stage.
        num_stages: How many there are.
        count: The number of microbatches.
    """
    actions = []
    for action in one_forward_one_backward(stage, num_stages, count):
        actions.append(action)
        if action.kind is Pass.BACKWARD and action.number >= stage:
            actions.append(Action(Pass.WEIGHTS, stage, action.number - stage))
    return [*actions, *(Action(Pass.WEIGHTS, stage, number) for number in range(max(0, count - stage), count))]


def interleaved(stages: Sequence[int], num_devices: int, count: int) -> list[Action]:
    """Return what a device with several stages runs in turn in the interleaved schedule 1F1B.

    As many microbatches as there are devices, or a few more where these do not divide them, go through one of its
    stages, then through the next one. It is so many forwards ahead that its last stage begins with them, and two more
    for each device behind it, from which gradients come late (Narayanan et al., https://arxiv.org/abs/2104.04473).

    Args:
        stages: Those of the device.
        num_devices: How many there are.
        count: The number of microbatches.
    """
    rounds = _rounds(num_devices, count)
    forwards, backwards = (
        [(stage, number) for numbers in rounds for stage in order for number in numbers]
        for order in (stages, stages[::-1])
    )
    ahead = (len(stages) - 1) * len(rounds[0]) + 2 * (num_devices - 1 - stages[0])
    return _alternating(forwards, backwards, ahead)


def _rounds(num_devices: int, count: int) -> list[range]:
    """Return the numbers of the microbatches that go through a stage together, in as many parts as can be full.

    Of a part with fewer of them than there are devices, stages would wait for one another forever.
    """
    num_rounds = max(1, count // num_devices)
    smaller, larger = divmod(count, num_rounds)
    bounds = [number * smaller + min(number, larger) for number in range(num_rounds + 1)]
    return [range(*each) for each in pairwise(bounds)]


def _alternating(forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], ahead: int) -> list[Action]:
    """Return forwards and backwards in turn, of stages and microbatches, after so many forwards."""
    ahead, actions = min(ahead, len(forwards)), []
    for step in range(len(forwards) + ahead):
        if step < len(forwards):
            actions.append(Action(Pass.FORWARD, *forwards[step]))
        if step >= ahead:
            actions.append(Action(Pass.BACKWARD, *backwards[step - ahead]))
    return actions


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
    num_devices = mesh.size(Role.PIPELINE)
    if num_devices == 1:
        return PipelinePlan()
    size, asked = num_devices, f"config.dist.pp.size = {num_devices}"
    if config.schedule == "interleaved":
        each = config.stages_per_device or _DEFAULT_STAGES_PER_DEVICE
        size, asked = num_devices * each, f"{asked} with {each} stages on each device"
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
        num_devices=num_devices,
        layers=layers,
        bounds=tuple(range(size + 1)),
        before=tuple(name for name in outside if order[name] < order[layers]),
        after=tuple(name for name in outside if order[name] > order[layers]),
        num_microbatches=config.num_microbatches or _DEFAULT_PER_DEVICE * num_devices,
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
