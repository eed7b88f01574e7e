"""What scripts do beside training: clipping, optimizers, models of other kinds, and what is changed for XLA."""

import copy
import gc
import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

import pytest
import torch
from casekit import (
    ADAM,
    ADAM_ABSOLUTE,
    ENGINE,
    MLP,
    MULTIPROCESS,
    NATIVE,
    RANK,
    SPMD,
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
    step,
    whole_gradient,
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
    check_equal(plain_value(norm), expected, "norm")
    check_gradients(model, plain)


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
    check_equal(plain_value(norm), expected, "norm")
    for model, plain in zip(models, plains, strict=True):
        check_gradients(model, plain)


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
    check_equal(plain_value(norm), expected, "norm")
    check_gradients(model, plain)
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
    check_equal(plain_value(packing.loss(output)), packing.loss(expected).detach(), "loss")
    packing.loss(output).backward()
    packing.loss(expected).backward()
    check_gradients(model, plain)
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


# Optimizers


class Lamb(torch.optim.Optimizer):
    """Scales each update by the norms of the whole weight and of its gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                trust = parameter.norm() / parameter.grad.norm()
                parameter.sub_(0.1 * trust * parameter.grad)


WHOLE_WEIGHT_OPTIMIZERS = {"lamb": Lamb, "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)}


@case([MULTIPROCESS], each=WHOLE_WEIGHT_OPTIMIZERS)
def optimizer_of_whole_weights_is_refused(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model, _ = sharded_and_plain()
    optimizer = make(model.parameters())
    loss_of(model(part(X))).backward()
    with pytest.raises(torchacc.ConfigError, match="full weights"):
        optimizer.step(lambda: None)


@case([SPMD, NATIVE])
def lamb_trains() -> None:
    model, plain = sharded_and_plain()
    check_training(model, plain, lambda each: Lamb(each.parameters()), ADAM_ABSOLUTE)


@case([SPMD])
def lbfgs_trains() -> None:
    model, plain = sharded_and_plain()
    for each, x in ((model, part(X)), (plain, X)):
        optimizer = WHOLE_WEIGHT_OPTIMIZERS["lbfgs"](each.parameters())

        def evaluate(each: nn.Module = each, x: torch.Tensor = x) -> torch.Tensor:
            each.zero_grad()
            loss = loss_of(each(x))
            loss.backward()
            return loss

        optimizer.step(evaluate)
    check_parameters(model, plain, ADAM_ABSOLUTE)


class RememberingAdamW(torch.optim.AdamW):
    """Adds a running mean of the gradients to AdamW's own state, and a part of it to each step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        gradients = {p: p.grad for group in self.param_groups for p in group["params"]}
        super().step(closure)
        for parameter, gradient in gradients.items():
            state = self.state[parameter]
            if "mean" not in state:
                state["mean"] = torch.zeros_like(parameter)
            state["mean"].lerp_(gradient, 0.5)
            parameter.sub_(state["mean"], alpha=0.1)


@case()
def subclass_of_adamw_keeps_its_own_state() -> None:
    model, plain = sharded_and_plain()
    check_training(model, plain, lambda each: RememberingAdamW(each.parameters(), **ADAM), ADAM_ABSOLUTE)


class LateReadingAdamW(torch.optim.AdamW):
    """Reads the gradients after the step that it inherits."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=0.1)


@case()
def subclass_of_adamw_reads_gradients_after_the_inherited_step() -> None:
    model, plain = sharded_and_plain()
    adamw(plain)  # PyTorch wraps the steps of a class when it is made: now that of AdamW is wrapped by itself
    check_training(model, plain, lambda each: LateReadingAdamW(each.parameters(), **ADAM), ADAM_ABSOLUTE)


@case(each={"adamw": adamw, "sgd-momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)})
def optimizer_handed_in_with_state(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    torch.manual_seed(1)
    model, plain = MLP(), MLP()
    plain.load_state_dict(model.state_dict())
    optimizer, plain_optimizer = make(model), make(plain)
    step(model, X, optimizer)
    step(plain, X, plain_optimizer)
    accelerate(model, optimizer)
    for _ in range(2):
        step(model, part(X), optimizer)
        step(plain, X, plain_optimizer)
    check_parameters(model, plain, ADAM_ABSOLUTE)


@case()
def two_optimizers_over_halves_of_a_model() -> None:
    model, plain = sharded_and_plain()
    before = copy.deepcopy(plain.state_dict())
    for each, x in ((model, part(X)), (plain, X)):
        first, second = adamw(each.layers), sgd(each.head)
        for _ in range(3):
            first.zero_grad()
            second.zero_grad()
            loss_of(each(x)).backward()
            first.step()
            second.step()
    assert not any(torch.equal(tensor, before[name]) for name, tensor in plain.state_dict().items())
    check_parameters(model, plain, ADAM_ABSOLUTE)


@case()
def two_models_train_against_each_other() -> None:
    generator, plain_generator = sharded_and_plain(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    critic, plain_critic = sharded_and_plain()
    for make, judge, x in ((generator, critic, part(X)), (plain_generator, plain_critic, X)):
        maker_optimizer, judge_optimizer = adamw(make), adamw(judge)
        for _ in range(2):
            judge_optimizer.zero_grad()
            (loss_of(judge(make(x).detach())) - loss_of(judge(x))).backward()
            judge_optimizer.step()
            maker_optimizer.zero_grad()
            (-loss_of(judge(make(x)))).backward()
            maker_optimizer.step()
    check_parameters(generator, plain_generator, ADAM_ABSOLUTE)
    check_parameters(critic, plain_critic, ADAM_ABSOLUTE)


@case([MULTIPROCESS])
def flattened_groups_made_after_are_refused() -> None:
    torch.manual_seed(1)
    model = MLP()
    model.head.bias.requires_grad_(False)
    accelerate(model, flatten_parameters=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decays = [parameter for parameter in trained if parameter.dim() >= 2]
    rest = [parameter for parameter in trained if parameter.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decays}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
    loss_of(model(part(X))).backward()
    with pytest.raises(torchacc.ConfigError, match="flatten_parameters"):
        optimizer.step()


# Models of other kinds


class NonContiguous(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.rand(6, 16)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.extra.sum(0))


class FewRows(MLP):
    """Has weights of one row, and of three, over two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.rand(1, 8))
        self.three = nn.Parameter(torch.rand(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.one + self.three.sum(0))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.view(-1, 2, 4))[0])


class Repeating(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return self.head(x)


@case(each={"non-contiguous": NonContiguous, "few-rows": FewRows, "module-used-twice": Repeating})
def model_trains(make: Callable[[], nn.Module]) -> None:
    check_training(*sharded_and_plain(make))


@case()
def lstm_trains() -> None:
    check_training(*sharded_and_plain(Recurrent, wrap_modules=["lstm"]))


@case()
def float64_model_trains() -> None:
    model, plain = sharded_and_plain(lambda: MLP().double())
    double = X.double()
    loss, expected = loss_of(model(part(double))), loss_of(plain(double))
    loss.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        gradient = plain.get_parameter(name).grad
        found = whole_gradient(parameter, len(gradient))
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-14)


class Buffered(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(8))
        self.register_buffer("offset", torch.rand(8), persistent=False)
        self.head.register_buffer("shared", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale + self.offset + self.head.shared)


@case(each={"when-they-differ": False, "always": True})
def buffers_are_those_of_rank_0(sync_module_states: bool) -> None:
    torch.manual_seed(RANK)
    model = Buffered()
    own = {"state": copy.deepcopy(model.state_dict()), "offset": model.offset.clone()}
    first = by_rank(own)[0]
    accelerate(model, sync_module_states=sync_module_states)
    for name, tensor in torchacc.full_state_dict(model).items():
        assert torch.equal(tensor, first["state"][name]), f"rank {RANK}: {name}"
    assert torch.equal(model.offset.cpu(), first["offset"])
    assert model.scale is model.head.shared

    plain = Buffered()
    plain.load_state_dict(first["state"])
    plain.offset.copy_(first["offset"])
    check_still_trains(model, plain)


@case()
def deleted_model_is_freed() -> None:
    model, _ = sharded_and_plain()
    optimizer = adamw(model)
    loss_of(model(part(X))).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    held = weakref.ref(model), weakref.ref(model.head.weight)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in held] == [None, None]


# What is changed in a model, and in other libraries, for XLA


class Normalized(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=dtype, bias=bias)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


NORMS = {
    "float32": (Normalized, torch.float32, 1e-6),
    "float64": (partial(Normalized, torch.float64), torch.float64, 1e-14),
    "no-bias": (partial(Normalized, bias=False), torch.float32, 1e-6),
    "bfloat16-input": (Normalized, torch.bfloat16, 2e-2),  # two units of bfloat16 at the size of the outputs
}


@case([SPMD], each=NORMS)
def layer_norm_is_that_of_torch(given: tuple[Callable[[], nn.Module], torch.dtype, float]) -> None:
    make, dtype, absolute = given
    model, plain = sharded_and_plain(make)
    x = (10 * X + 30).to(dtype)
    found, expected = model(part(x)), plain(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(plain_value(found), expected.detach(), rtol=absolute, atol=absolute)
    found.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in plain.named_parameters():
        gradient = plain_value(model.get_parameter(name).grad)
        torch.testing.assert_close(gradient, parameter.grad, rtol=10 * absolute, atol=10 * absolute)


@case([SPMD])
def layer_norm_of_bfloat16_computation_is_float32() -> None:
    model, plain = sharded_and_plain(Normalized, compute={"bf16": True})
    x = X.bfloat16()
    found = model(part(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain.norm(x.float())
    assert found.dtype == expected.dtype == torch.float32
    check_equal(plain_value(found), expected.detach(), "output")


def make_gpt2() -> nn.Module:
    """Return a GPT-2 whose loss depends much on where it attends to, and which looks for packed documents."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, **tokens, initializer_range=0.5, use_cache=False))


TOKENS = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(3))
MASKS = {
    "none": {},
    "all-kept": {"attention_mask": torch.ones_like(TOKENS)},
    "padded-right": {"attention_mask": (torch.arange(8) < torch.tensor([[8], [5], [8], [3]])).long()},
    "padded-left": {"attention_mask": (torch.arange(8) >= torch.tensor([[0], [2], [5], [0]])).long()},
    "one-document": {"position_ids": torch.arange(8).expand(4, 8)},
    "packed-documents": {"position_ids": torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]).expand(4, 8)},
}


@case(XLA, each=MASKS)
def masks_are_those_of_transformers(given: dict[str, torch.Tensor]) -> None:
    model, plain = sharded_and_plain(make_gpt2)
    batch = {"input_ids": TOKENS, "labels": TOKENS, **given}
    found = model(**{name: part(tensor) for name, tensor in batch.items()}).loss
    check_equal(plain_value(found), plain(**batch).loss.detach(), "loss")


@case(XLA)
def patches_end_with_the_forward() -> None:
    from transformers import masking_utils

    before = dict(vars(masking_utils))
    model, _ = sharded_and_plain(make_gpt2)
    was_patched = []

    def look(module: nn.Module, args: Any) -> None:
        was_patched.append(dict(vars(masking_utils)) != before)
        if len(was_patched) == 2:
            raise KeyError("on purpose")

    model.lm_head.register_forward_pre_hook(look)
    model(input_ids=part(TOKENS))
    assert dict(vars(masking_utils)) == before
    with pytest.raises(KeyError):
        model(input_ids=part(TOKENS))
    assert dict(vars(masking_utils)) == before
    assert was_patched == [True, True]


@case(XLA)
def forward_that_raises_leaves_no_whole_weights() -> None:
    model, plain = sharded_and_plain()

    def fail(module: nn.Module, args: Any) -> None:
        raise KeyError("on purpose")

    handle = model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(part(X))
    handle.remove()
    assert not any("weight" in vars(module) for module in model.modules())
    check_still_trains(model, plain)


@case([SPMD])
def shard_output_callable_is_called() -> None:
    calls = []
    model, plain = sharded_and_plain(shard_output_callable=lambda output, mesh: calls.append((output, mesh)))
    output = model(part(X))
    assert any(given is output for given, _ in calls), "not called with the model's output"
    assert all(mesh.get_logical_mesh().size == 2 and "fsdp" in mesh.axis_names for _, mesh in calls)
    check_still_trains(model, plain)
