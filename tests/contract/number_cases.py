"""Parameters without dimensions, as CLIP's logit scale: trained, clipped, saved and loaded as any other."""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from casekit import (
    ADAM_ABSOLUTE,
    ENGINE,
    FLAT,
    MULTIPROCESS,
    NATIVE,
    RANK,
    SPMD,
    X,
    adamw,
    case,
    case_of_each_layout,
    check_equal,
    check_parameters,
    loss_of,
    part,
    plain_value,
    sgd,
    sharded_and_plain,
)
from state_cases import shared_folder
from torch import nn

import torchacc


class Gated(nn.Module):
    """Layers with a gate each, which is a number; one stands before all other parameters, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.6))
        self.shift = nn.Parameter(torch.tensor(0.1), requires_grad=False)
        self.layers = nn.ModuleList([Layer(0.5 + i) for i in range(2)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale.exp() + self.shift


class Layer(nn.Module):
    def __init__(self, gate: float) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(gate))
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.norm(self.linear(x)).tanh()


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"sharding_strategy": "SHARD_GRAD_OP", "memory": {"gc": True}},
}


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def run(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, *, sharded: bool, steps: int = 2) -> list[float]:
    """Make steps of two micro-batches each, clipped; return the norms."""
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        if sharded:
            with torchacc.accumulate(model):
                loss_of(model(x)).backward()
        else:
            loss_of(model(x)).backward()
        loss_of(model(-x)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return norms


@case(each=VARIANTS)
@case([MULTIPROCESS], each={"flat": FLAT})
def number_trains(options: dict[str, Any]) -> None:
    model, plain = sharded_and_plain(Gated, **options)
    if not options.get("flatten_parameters"):
        assert shapes(model) == shapes(plain)
        loss_of(model(part(X))).backward()
        loss_of(plain(X)).backward()
        torchacc.sync()
        check_equal(plain_value(model.scale.grad), plain.scale.grad, "gradient")
        check_equal(plain_value(model.layers[0].gate.grad), plain.layers[0].gate.grad, "gradient")
        assert model.scale.dim() == model.scale.ndim == 0
        assert model.shift.grad is None
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    norms = run(model, optimizer, part(X), sharded=True)
    expected = run(plain, plain_optimizer, X, sharded=False)
    # As float32, which they are: numbers of Python's are held to less than the last bit of one.
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected))
    check_parameters(model, plain, ADAM_ABSOLUTE)
    whole = model.full_optim_state_dict(optimizer, rank0_only=False)["state"]
    for own, entry in plain_optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            check_equal(whole[own][key], value, f"{own} {key}", ADAM_ABSOLUTE)


@case_of_each_layout
def number_is_saved_and_loaded(options: dict[str, Any]) -> None:
    model, plain = sharded_and_plain(Gated, **options)
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    run(model, optimizer, part(X), sharded=True)
    run(plain, plain_optimizer, X, sharded=False)
    with shared_folder() as folder:
        check_saves(folder, model, plain, optimizer, plain_optimizer, options)


def check_saves(
    folder: Path,
    model: nn.Module,
    plain: nn.Module,
    optimizer: torch.optim.Optimizer,
    plain_optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
) -> None:
    """Load what was saved in each way into a new model, and go on."""
    torchacc.checkpoint.save(folder / "checkpoint", model=model, optimizer=optimizer)
    full = torchacc.full_state_dict(model)
    state = model.full_optim_state_dict(optimizer, rank0_only=False)
    ways: dict[str, Any] = {
        "folder": lambda other, own: torchacc.checkpoint.load(folder / "checkpoint", model=other, optimizer=own),
        "memory": lambda other, own: (
            other.load_state_dict(full),
            own.load_state_dict(other.optim_state_dict_to_load(own, state)),
        ),
        "local": lambda other, own: (
            other.load_state_dict(model.state_dict()),
            own.load_state_dict(optimizer.state_dict()),
        ),
    }
    for load in ways.values():
        other, _ = sharded_and_plain(Gated, **options)
        own = adamw(other)
        load(other, own)
        check_parameters(other, plain, ADAM_ABSOLUTE)
        plain_again = copy.deepcopy(plain)
        plain_own = adamw(plain_again)
        plain_own.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
        run(other, own, part(X), sharded=True, steps=1)
        run(plain_again, plain_own, X, sharded=False, steps=1)
        check_parameters(other, plain_again, ADAM_ABSOLUTE)
    if ENGINE != SPMD:
        rank_files_hold_numbers(folder, model, optimizer, full)


def rank_files_hold_numbers(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, full: dict[str, Any]
) -> None:
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "shard_metadata": model.get_shard_metadata(),
    }
    torchacc.save(saved, folder / "ranks", master_only=False)
    torchacc.dist.rendezvous("saved")
    if RANK == 0:
        torchacc.dist.fsdp.consolidate_sharded_model_checkpoints(str(folder / "ranks"), "*.pth")
        consolidated = torch.load(folder / "ranks/consolidated.pth")["model"]
        for name, value in full.items():
            check_equal(consolidated[name], value, f"consolidated {name}")
    torchacc.dist.rendezvous("consolidated")


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def make_clip() -> nn.Module:
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**SIZES, "vocab_size": 31, "max_position_embeddings": 8, "eos_token_id": 30},
            vision_config={**SIZES, "image_size": 8, "patch_size": 4},
            projection_dim=8,
        )
    )


@case()
def clip_of_transformers_trains() -> None:
    model, plain = sharded_and_plain(make_clip)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 30, (4, 6), generator=generator)
    images = torch.randn(4, 3, 8, 8, generator=generator)
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    for _ in range(2):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        loss = model(input_ids=part(ids), pixel_values=part(images), return_loss=True).loss
        loss.backward()
        parts = [slice(0, 4)] if ENGINE == SPMD else [slice(0, 2), slice(2, 4)]  # negatives are a process's own
        losses = [plain(input_ids=ids[rows], pixel_values=images[rows], return_loss=True).loss for rows in parts]
        expected = torch.stack(losses).mean()
        expected.backward()
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, plain)]
        optimizer.step()
        plain_optimizer.step()
        check_equal(plain_value(loss), expected.detach(), "loss", ADAM_ABSOLUTE)
        check_equal(plain_value(norms[0]), norms[1], "norm", 1e-4)
    check_parameters(model, plain, 2e-5)


@case()
def number_is_used_by_the_script() -> None:
    model, plain = sharded_and_plain(Gated)
    for each, x in ((model, part(X)), (plain, X)):
        (loss_of(each(x)) * each.scale.exp() + each.scale.square()).backward()
    check_equal(plain_value(model.scale.grad), plain.scale.grad, "gradient of the scale")
    check_equal(model.scale.item(), plain.scale.item(), "value")
    for each in (model, plain):
        with torch.no_grad():
            each.scale.clamp_(max=1.5)
            each.shift.fill_(0.25)
            each.layers[0].gate.data = torch.tensor(0.75, device=each.scale.device)
            each.layers[1].gate.mul_(each.scale)
    check_parameters(model, plain)
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    run(model, optimizer, part(X), sharded=True)
    run(plain, plain_optimizer, X, sharded=False)
    check_parameters(model, plain, ADAM_ABSOLUTE)


class Doubled(torch.autograd.Function):
    """Takes a parameter as it is, which PyTorch does not let a tensor's own functions see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, number)
        return x * number * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, number = ctx.saved_tensors
        return gradient * number * 2, (gradient * x * 2).sum()


class Returned(nn.Module):
    """Uses numbers in ways in which what comes of them would be a process's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.other, self.third, self.fourth = (nn.Parameter(torch.tensor(0.5 + i)) for i in range(4))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.linear(x)
        features *= self.third
        return {
            "features": Doubled.apply(features, self.fourth),
            "scale": self.scale.exp(),
            "loss": self.other * x.square().mean(),
        }


@case()
def number_that_the_model_returns_trains() -> None:
    model, plain = sharded_and_plain(Returned)
    optimizers = sgd(model), sgd(plain)
    for _ in range(2):
        for each, optimizer, x in ((model, optimizers[0], part(X)), (plain, optimizers[1], X)):
            optimizer.zero_grad()
            output = each(x)
            (loss_of(output["features"]) * output["scale"] * 0.1 + output["loss"]).backward()
        torchacc.sync()
        for name, parameter in plain.named_parameters():
            check_equal(plain_value(model.get_parameter(name).grad), parameter.grad, f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
    check_parameters(model, plain)


LISTED = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-4, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-4, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=3e-3, eps=1e-4),
    "asgd": lambda p: torch.optim.ASGD(p, lr=3e-3),
}


@case((NATIVE,), each=LISTED)
def number_is_updated_in_a_list(make: Any) -> None:
    model, plain = sharded_and_plain(Gated)
    optimizer, plain_optimizer = make(model.parameters()), make(plain.parameters())
    run(model, optimizer, part(X), sharded=True)
    run(plain, plain_optimizer, X, sharded=False)
    check_parameters(model, plain, ADAM_ABSOLUTE)
    whole = model.full_optim_state_dict(optimizer, rank0_only=False)
    other, _ = sharded_and_plain(Gated)
    own = make(other.parameters())
    own.load_state_dict(other.optim_state_dict_to_load(own, whole))
    other.load_state_dict(torchacc.full_state_dict(model))
    run(other, own, part(X), sharded=True, steps=1)
    run(plain, plain_optimizer, X, sharded=False, steps=1)
    check_parameters(other, plain, ADAM_ABSOLUTE)


@case((NATIVE,))
def gradient_of_a_number_is_asked_for() -> None:
    model, plain = sharded_and_plain(Gated)
    (found,) = torch.autograd.grad(loss_of(model(part(X))), model.scale)
    (expected,) = torch.autograd.grad(loss_of(plain(X)), plain.scale)
    check_equal(plain_value(found), expected, "gradient")
    x, whole = part(X).requires_grad_(), X.clone().requires_grad_()
    for each, given in ((model, x), (plain, whole)):
        (slope,) = torch.autograd.grad(each(given).sum(), given, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
    check_equal(plain_value(model.scale.grad), plain.scale.grad, "gradient of a penalty")
