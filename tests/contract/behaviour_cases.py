"""What scripts do beside training: random numbers, clipping, accumulation, what is refused and what is let pass."""

import copy
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

import pytest
import torch
from casekit import (
    ADAM_ABSOLUTE,
    ENGINE,
    MLP,
    MULTIPROCESS,
    NATIVE,
    RANK,
    XLA,
    X,
    accelerate,
    adamw,
    by_rank,
    case,
    check_equal,
    check_gradients,
    check_parameters,
    check_still_trains,
    check_training,
    loss_of,
    part,
    plain_value,
    sgd,
    sharded_and_plain,
)
from torch import nn

# By name and before accelerate(), as many scripts do.
from torch.nn.utils import clip_grad_norm_ as clip_imported_by_name

import torchacc

# Random numbers: the first cases, so that no other has drawn any


@case(XLA)
def second_model_draws_other_numbers_than_the_first() -> list[list[bool]]:
    masks = []
    for _ in range(2):
        model = accelerate(nn.Sequential(nn.Linear(8, 64), nn.Dropout()))
        masks.append((model(part(X)) == 0).flatten().tolist())
    assert masks[0] != masks[1]
    assert 0.3 < sum(masks[0]) / len(masks[0]) < 0.7
    if ENGINE == MULTIPROCESS:
        others = by_rank(masks)
        assert others[0] != others[1], "the ranks drop out alike"
    return masks


# Clipping


CLIPPINGS = {
    "of-the-model": lambda model, *args: model.clip_grad_norm_(*args),
    "of-torch": lambda model, *args: nn.utils.clip_grad_norm_(model.parameters(), *args),
    "of-torch-imported-by-name": lambda model, *args: clip_imported_by_name(model.parameters(), *args),
}


@case(each={f"{clip}-{norm}": (CLIPPINGS[clip], norm) for clip in CLIPPINGS for norm in (2.0, float("inf"))})
def clipping(how: tuple[Callable[..., torch.Tensor], float]) -> None:
    clip, norm_type = how
    model, plain = sharded_and_plain()
    loss_of(model(part(X))).backward()
    loss_of(plain(X)).backward()
    norm = clip(model, 0.01, norm_type)
    expected = clip_imported_by_name(plain.parameters(), 0.01, norm_type)
    assert expected > 0.01
    check_gradients(model, plain)
    check_equal(plain_value(norm), expected, "norm")


@case()
def norm_of_a_gradient_that_is_nan_on_one_device() -> None:
    model, _ = sharded_and_plain(lambda: nn.Sequential(nn.Linear(8, 4)))
    for column, norm_type in product((0, 3), (2.0, float("inf"))):
        model.zero_grad()
        y = model(part(X))
        (y.sum() + y[:, column].sum() * torch.nan).backward()
        for norm in (
            *(parameter.grad.norm(norm_type) for parameter in model.parameters()),
            *(torch.linalg.vector_norm(parameter.grad, norm_type) for parameter in model.parameters()),
            model.clip_grad_norm_(1.0, norm_type),
        ):
            assert plain_value(norm).isnan(), (column, norm_type)


@case()
def clipping_over_two_models() -> None:
    models, plains = zip(sharded_and_plain(), sharded_and_plain(lambda: nn.Sequential(nn.Linear(8, 4))), strict=True)
    for each, x in ((models, part(X)), (plains, X)):
        sum(loss_of(model(x)) for model in each).backward()
    norm = clip_imported_by_name([p for model in models for p in model.parameters()], 0.01)
    expected = clip_imported_by_name([p for plain in plains for p in plain.parameters()], 0.01)
    for model, plain in zip(models, plains, strict=True):
        check_gradients(model, plain)
    check_equal(plain_value(norm), expected, "norm")


@case(XLA)  # natively PyTorch raises that it takes DTensors or tensors, not both
def clipping_together_with_a_plain_model() -> None:
    model, plain = sharded_and_plain()
    torch.manual_seed(2)
    beside = nn.Linear(8, 4)
    plain_beside = copy.deepcopy(beside)
    beside.to(next(model.parameters()).device)
    for each, other in ((model, beside), (plain, plain_beside)):
        loss_of(each(part(X) if each is model else X)).backward()
        loss_of(other.weight).backward()
    norm = clip_imported_by_name([*model.parameters(), *beside.parameters()], 0.01)
    expected = clip_imported_by_name([*plain.parameters(), *plain_beside.parameters()], 0.01)
    check_gradients(model, plain)
    check_equal(plain_value(norm), expected, "norm")
    check_equal(beside.weight.grad.cpu(), plain_beside.weight.grad, "gradient of the plain model's weight")


# Backward


@case(XLA)  # natively FSDP2 raises at the next forward
def backward_that_raises_leaves_nothing_behind() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise KeyError("on purpose")

    model, plain = sharded_and_plain()
    handle = model.layers[0].register_forward_hook(lambda module, args, output: Failing.apply(output))
    with pytest.raises(KeyError):
        loss_of(model(part(X))).backward()
    handle.remove()
    check_still_trains(model, plain)


@case()
def two_losses_of_one_graph() -> None:
    model, plain = sharded_and_plain()
    for each, x in ((model, part(X)), (plain, X)):
        output = each(x)
        loss_of(output[:, :2]).backward(retain_graph=True)
        loss_of(output[:, 2:]).backward()
    check_gradients(model, plain)


@case()
def freezing_between_forward_and_backward() -> None:
    model, plain = sharded_and_plain()
    loss = loss_of(model(part(X)))
    model.layers.requires_grad_(False)
    loss.backward()
    model.layers.requires_grad_(True)
    check_still_trains(model, plain)


@case()
def unused_parameter_has_no_gradient() -> None:
    class WithUnused(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(4, 8))

    model, plain = sharded_and_plain(WithUnused)
    check_training(model, plain, adamw, ADAM_ABSOLUTE)
    assert torchacc.full_state_dict(model)["unused"].eq(1).all(), "weight decay has changed it"


@case([MULTIPROCESS])
def parameter_used_on_one_rank() -> None:
    class WithAdapter(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.adapter = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, *, adapt: bool) -> torch.Tensor:
            return super().forward(self.adapter(x) if adapt else x)

    model, plain = sharded_and_plain(WithAdapter)
    loss_of(model(part(X), adapt=RANK == 0)).backward()
    losses = [loss_of(plain(rows, adapt=rank == 0)) for rank, rows in enumerate(X.chunk(2))]
    (sum(losses) / 2).backward()
    check_gradients(model, plain)


# Accumulation


@case()
def window_adds_up() -> None:
    model, plain = sharded_and_plain()
    micro_batches = [X, 2 * X, X - 1]
    for index, x in enumerate(micro_batches):
        if index < 2:
            with torchacc.accumulate(model):
                loss_of(model(part(x))).backward()
        else:
            loss_of(model(part(x))).backward()
        loss_of(plain(x)).backward()
    check_gradients(model, plain)


@case()
def step_in_an_open_window_is_refused() -> None:
    model, plain = sharded_and_plain()
    optimizer = sgd(model)
    with torchacc.accumulate(model):
        loss_of(model(part(X))).backward()
    with pytest.raises(torchacc.EngineError, match="accumulate"):
        optimizer.step()
    loss_of(model(part(X))).backward()  # completes the window
    optimizer.step()
    plain_optimizer = sgd(plain)
    (2 * loss_of(plain(X))).backward()
    plain_optimizer.step()
    check_parameters(model, plain)


@case(each={"of-the-model": lambda model: model, "of-an-optimizer": sgd})
def zero_grad_drops_an_open_window(owner_of: Callable[[nn.Module], Any]) -> None:
    model, plain = sharded_and_plain()
    owner = owner_of(model)
    with torchacc.accumulate(model):
        loss_of(model(part(100 * X))).backward()
    owner.zero_grad()
    check_still_trains(model, plain)


@case()
def backward_decides_what_is_accumulated() -> None:
    model, plain = sharded_and_plain()
    with torchacc.accumulate(model):
        loss = loss_of(model(part(X)))
    loss.backward()
    loss_of(plain(X)).backward()
    check_gradients(model, plain)
    sgd(model).step()


# What a model returns


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


@dataclass(slots=True)
class SlottedOutput:
    logits: torch.Tensor
    loss: torch.Tensor


TupleOutput = namedtuple("TupleOutput", ["logits", "loss"])


@dataclass(frozen=True)
class Packing:
    """How a model returns logits and a loss, and where the loss is found."""

    pack: Callable[[torch.Tensor, torch.Tensor], Any]
    loss: Callable[[Any], torch.Tensor]


PACKINGS = {
    "list": Packing(lambda logits, loss: [logits, loss], lambda output: output[1]),
    "nested-dict": Packing(
        lambda logits, loss: {"logits": logits, "losses": {"main": loss}}, lambda output: output["losses"]["main"]
    ),
    "dataclass": Packing(Output, attrgetter("loss")),
    "slotted-dataclass": Packing(SlottedOutput, attrgetter("loss")),
    "namedtuple": Packing(TupleOutput, attrgetter("loss")),
}


@case(each=PACKINGS)
def returned_scalar_is_global(packing: Packing) -> None:
    class Returning(MLP):
        def forward(self, x: torch.Tensor) -> Any:
            logits = super().forward(x)
            return packing.pack(logits, loss_of(logits))

    # Without units, whose own outputs are tensors, this output is all that FSDP2's backward can start from.
    model, plain = sharded_and_plain(Returning, min_num_params=10**6)
    output, expected = model(part(X)), plain(X)
    assert type(output) is type(expected)
    packing.loss(output).backward()
    packing.loss(expected).backward()
    check_gradients(model, plain)
    check_equal(plain_value(packing.loss(output)), packing.loss(expected).detach(), "loss")
    sgd(model).step()
    sgd(plain).step()
    check_parameters(model, plain)


# What is refused, and what is let pass


def sharded_module_of(model: nn.Module) -> nn.Module:
    return nn.Sequential(model, nn.Linear(4, 4))


@case()
def deepcopy_is_refused() -> None:
    model, _ = sharded_and_plain()
    with pytest.raises(torchacc.EngineError, match="deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(torchacc.EngineError, match="deepcopy"):
        copy.deepcopy(sharded_module_of(model))
    with pytest.raises(torchacc.EngineError, match="deepcopy"):
        copy.deepcopy(model.layers)


MOVES = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
}
MOVES_TO_CPU = {"cpu": lambda model: model.cpu(), "to-cpu": lambda model: model.to("cpu")}


@case(each=MOVES)
def change_of_dtype_is_refused(move: Callable[[nn.Module], Any]) -> None:
    check_move_is_refused(move)


@case(XLA, each=MOVES_TO_CPU)  # natively the CPU is where the model is
def move_is_refused(move: Callable[[nn.Module], Any]) -> None:
    check_move_is_refused(move)


def check_move_is_refused(move: Callable[[nn.Module], Any]) -> None:
    model, plain = sharded_and_plain()
    with pytest.raises(torchacc.EngineError, match="stays there"):
        move(model)
    check_still_trains(model, plain)


@case()
def moves_to_where_it_is_do_nothing() -> None:
    model, plain = sharded_and_plain()
    device = next(model.parameters()).device
    parameters = list(model.parameters())
    assert model.to(device) is model
    assert model.float() is model
    assert model.to(device, torch.float32) is model
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    check_still_trains(model, plain)


@case(each={"itself": lambda model: model, "a-wrapper": sharded_module_of})
def second_accelerate_is_refused(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, plain = sharded_and_plain()
    with pytest.raises(torchacc.ConfigError, match="already sharded"):
        accelerate(wrap(model))
    check_still_trains(model, plain)


@case(
    each={
        "hook": lambda parameter: parameter.register_hook(lambda gradient: None),
        "post-accumulate-hook": lambda parameter: parameter.register_post_accumulate_grad_hook(lambda parameter: None),
    }
)
def parameter_with_a_hook_is_refused(register: Callable[[nn.Parameter], Any]) -> None:
    model = MLP()
    register(model.head.weight)
    with pytest.raises(torchacc.ConfigError, match=r"head\.weight"):
        accelerate(model)


@case()
def lazy_module_is_refused() -> None:
    with pytest.raises(torchacc.ConfigError, match="lazy"):
        accelerate(nn.Sequential(nn.LazyLinear(4)))


@case(XLA)
def module_called_by_itself_is_right() -> None:
    model, plain = sharded_and_plain()
    for module, same in ((model.head, plain.head), (model.layers[0][0], plain.layers[0][0])):
        output = torchacc.dist.all_gather(module(part(X)))
        check_equal(output.detach().cpu(), same(X), "output")
    check_still_trains(model, plain)


@case([NATIVE])
def profiler_shows_what_fsdp2_does_around_a_unit() -> None:
    model, plain = sharded_and_plain()
    check_still_trains(model, plain)
    with torch.profiler.profile() as profiled:
        loss_of(model(part(X))).backward()
    names = " ".join(event.key for event in profiled.key_averages())
    for part_of_step in ("pre_forward", "all_gather", "post_backward_reduce"):
        assert f"FSDP::{part_of_step}" in names, names
