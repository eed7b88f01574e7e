"""What scripts compute with parameters, gradients and states that are sharded natively: the numbers of whole ones."""

import copy
import io
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
import transformers
from casekit import NATIVE, RANK, case, check_equal, check_parameters, plain_value, sharded_and_plain
from torch import nn

import torchacc


class Uneven(nn.Module):
    """Rows that two devices cannot share evenly, and a parameter of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(15.0).view(5, 3).sub(6.3).cos())
        self.bias = nn.Parameter(torch.tensor([0.7, -0.2, 0.3]))
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.t()).tanh().mean() * self.scale + self.bias.sum()


class WithARow(Uneven):
    """With a matrix of one row, of which an average over rows has the shape of the matrix itself."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.tensor([[0.3, -0.4, 0.9]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.row)


Computed = Callable[[torch.Tensor], Any]
VALUES: dict[str, Computed] = {
    "norm-plus-number": lambda w: w.norm() + 1,
    "norm-times-norm": lambda w: w.norm() * w.norm(),
    "norm-of-order-1": lambda w: w.norm(1),
    "norm-of-order-3": lambda w: w.norm(3),
    "norm-inf": lambda w: w.norm(float("inf")).sqrt(),
    "norm-of-rows": lambda w: w.norm(dim=-1) + 1,
    "sum-squared": lambda w: w.sum() ** 2,
    "sum-of-rows": lambda w: w.sum(0).exp(),
    "mean": lambda w: w.mean(),
    "mean-of-columns": lambda w: w.mean(0),
    "mean-of-rows": lambda w: w.mean(-1, keepdim=True),
    "std": lambda w: w.std(),
    "variance": lambda w: torch.var_mean(w)[0],
    "variance-of-columns": lambda w: w.var(0),
    "largest": lambda w: w.max() + 1,
    "largest-of-columns": lambda w: w.max(0).indices,
    "least": lambda w: w.amin(0),
    "both-ends": lambda w: torch.stack(list(torch.aminmax(w))),
    "argmax": lambda w: w.argmax(),
    "topk": lambda w: w.view(-1).topk(4).values,
    "topk-of-columns": lambda w: w.topk(2, dim=0).indices,
    "sorted": lambda w: w.sort(0).values,
    "product": lambda w: w.prod(),
    "running-sum": lambda w: w.cumsum(0),
    "median": lambda w: w.median(),
    "quantile": lambda w: w.quantile(0.3),
    "item": lambda w: w.sum().item() + w.norm().item(),
    "as-float": lambda w: float(w.norm() * 2) + float(w.abs().max()),
    "as-bool": lambda w: bool(w.norm() > 2.7) + 2 * bool((w > 0).any()),
    "as-text": lambda w: float(f"{w.norm():.4f}"),
    "as-list": lambda w: sum(w.flatten().tolist()),
    "as-array": lambda w: torch.from_numpy(w.detach().cpu().numpy().copy()),
    "compared": lambda w: (w > w.mean()).sum(),
    "all-close": lambda w: torch.allclose(w, w + 1e-9),
    "equal": lambda w: torch.equal(w, w.clone()),
    "row": lambda w: w[3],
    "last-row": lambda w: w[-1],
    "rows-by-mask": lambda w: w[w[:, 0] > 0],
    "rows-by-index": lambda w: w.index_select(0, torch.tensor([4, 0], device=w.device)),
    "flat-part": lambda w: w.view(-1)[7:9],
    "transposed": lambda w: w.t() @ w,
    "product-with-plain": lambda w: torch.ones(2, 5, device=w.device) @ w,
    "sum-with-plain": lambda w: w + torch.ones(5, 3, device=w.device),
    "sum-with-plain-row": lambda w: torch.arange(3.0, device=w.device) + w,
    "scaled-by-plain-number": lambda w: w * torch.tensor(2.0),
    "scaled-by-plain-element": lambda w: w * torch.tensor([2.0], device=w.device),
    "divided-number": lambda w: 1 / (w.abs() + 1),
    "number-minus": lambda w: 1 - w,
    "power": lambda w: 2**w,
    "by-norm": lambda w: w / w.norm(),
    "by-norms-of-rows": lambda w: w / w.norm(dim=1, keepdim=True),
    "normalized": lambda w: nn.functional.normalize(w, dim=0),
    "softmax": lambda w: w.softmax(0),
    "logsumexp": lambda w: w.logsumexp((0, 1)),
    "clamped-norm": lambda w: w.norm().clamp(max=1.0).sqrt().exp(),
    "dot": lambda w: torch.dot(w.view(-1), w.reshape(-1)),
    "inner": lambda w: (w * w).sum().sqrt(),
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "joined": lambda w: torch.cat([w, w * 2]).sum(1),
    "joined-flat": lambda w: torch.cat([w.view(-1), w.flatten()]).norm(),
    "stacked": lambda w: torch.stack([w, w]).mean(0),
    "norms-together": lambda w: torch.stack([g.norm() for g in (w, w * 2)]).norm() + 1,
    "norms-by-foreach": lambda w: torch.stack(torch._foreach_norm([w, w * 2])).sum() + 1,
    "foreach": lambda w: torch._foreach_add([w, w], 1.0)[1],
    "foreach-by-plain": lambda w: torch._foreach_mul([w, w], torch.tensor(3.0))[0],
    "foreach-maxima": lambda w: torch.stack(torch._foreach_max([w, w * 2])),
    "count": lambda w: torch.count_nonzero(w > 0),
    "nonzero": lambda w: (w > 0.5).nonzero(),
    "where": lambda w: torch.where(w > 0, w, torch.zeros(())),
    "where-plain": lambda w: torch.where(torch.ones(5, 3, device=w.device).bool(), w, -w),
    "rolled": lambda w: w.roll(1, 0),
    "flipped": lambda w: w.flip(0),
    "triangle": lambda w: w.tril(),
    "singular-values": lambda w: torch.linalg.svdvals(w),
    "rank-of-one": lambda w: torch.outer(w.norm(dim=1), w.norm(dim=0)),
    "cosine": lambda w: nn.functional.cosine_similarity(w, w.flip(0), dim=-1),
    "linear": lambda w: nn.functional.linear(torch.ones(2, 3, device=w.device), w),
    "iterated": lambda w: sum(row.sum() for row in w),
    "split": lambda w: w.split([2, 3])[1] * 1,
    "length": lambda w: len(w) + w.numel() + w.shape[0],
    "finite": lambda w: torch.isfinite(w).all(),
    "distance": lambda w: torch.dist(w, w + 1),
    "mean-of-squares": lambda w: w.square().mean().sqrt() + 1,
    "new-zeros": lambda w: w.new_zeros(2, 2) + 1,
    "in-another-dtype": lambda w: w.double().mean(),
    "lerp": lambda w: torch.lerp(w, w * 2, 0.3),
    "clamped-by-mean": lambda w: w.clamp(max=w.mean()),
    "sign-of-sum": lambda w: w.sum().sign() * w,
}


@case([NATIVE], each={"evenly": 6, "unevenly": 5, "fewer-than-devices": 1})
def values_of_shards_are_those_of_whole_weights(num_rows: int) -> None:
    """Of parameters, of what hangs on autograd, of gradients; also where a device has no row."""

    class Net(Uneven):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(18.0).view(6, 3)[:num_rows].sub(6.3).cos())

    model, plain = sharded_and_plain(Net)
    wrong = []
    for name, computed in VALUES.items():
        for state in ("detached", "parameter", "computed"):
            ways = {
                "detached": lambda w: w.detach().clone(),
                "parameter": lambda w: w,
                "computed": lambda w: w * 1.5,
            }
            try:
                expected = computed(ways[state](plain.weight))
            except (RuntimeError, IndexError, TypeError, ValueError):  # of a shape that it is not for
                continue
            try:
                found = computed(ways[state](model.weight))
                if isinstance(expected, torch.Tensor):
                    found, expected = plain_value(found).nan_to_num(7.0), expected.detach().nan_to_num(7.0)
                check_equal(found, expected, name)
            except Exception as error:
                wrong.append(f"{name} of {state}: {type(error).__name__}: {error}"[:300])
    assert not wrong, "\n".join(wrong)


def _index(w: torch.Tensor) -> None:
    w[1:4, 0] = 5.0


def _mask(w: torch.Tensor) -> None:
    w[w > 0] = -1.0


Edit = Callable[[torch.Tensor], Any]
EDITS: dict[str, Edit] = {
    "index": _index,
    "mask": _mask,
    "plain": lambda w: w.add_(torch.arange(15.0, device=w.device).view(5, 3)),
    "plain-row": lambda w: w.mul_(torch.arange(3.0, device=w.device)),
    "own-mean": lambda w: w.sub_(w.mean()),
    "mean-of-rows": lambda w: w.sub_(w.mean(dim=1, keepdim=True)),
    "own-norm": lambda w: w.div_(w.norm()),
    "norms-of-rows": lambda w: w.copy_(w / w.norm(dim=1, keepdim=True)),
    "whole": lambda w: w.copy_(torch.linspace(0, 1, 15, device=w.device).view(5, 3)),
    "renormalized": lambda w: w.renorm_(2, 0, 0.5),
    "running-sum": lambda w: w.cumsum_(0),
    "filled-by-index": lambda w: w.index_fill_(0, torch.tensor([0, 4], device=w.device), 2.0),
    "triangle": lambda w: w.tril_(),
    "masked": lambda w: w.masked_fill_(w > 0.5, 0.0),
    "masked-by-plain": lambda w: w.masked_fill_(torch.eye(5, 3, device=w.device).bool(), 0.0),
    "out": lambda w: torch.add(w, 1.0, out=w),
    "foreach": lambda w: torch._foreach_sub_([w], [w.mean()]),
    "addcmul": lambda w: w.addcmul_(w, w, value=0.5),
    "lerp": lambda w: w.lerp_(torch.ones(5, 3, device=w.device), 0.5),
    "assigned": lambda w: setattr(w, "data", w.data * 3),
    "assigned-whole": lambda w: setattr(w, "data", torch.linspace(0, 1, 15, device=w.device).view(5, 3)),
    "sum-of-partials": lambda w: w.mul_(w.norm().add_(1.0)),
}


@case([NATIVE], each=EDITS)
def edit_of_a_shard_is_that_of_the_whole_weight(edit: Edit) -> None:
    model, plain = sharded_and_plain(Uneven)
    x = torch.ones(2, 3)
    model(x).backward()
    plain(x).backward()
    for each in (model, plain):
        with torch.no_grad():
            edit(each.weight)
    check_parameters(model, plain)
    check_equal(model(x).detach(), plain(x).detach(), "output")
    model(x).backward()
    plain(x).backward()
    check_equal(plain_value(model.weight.grad), plain.weight.grad, "gradient")


@case([NATIVE])
def what_would_be_lost_is_refused() -> None:
    model, _ = sharded_and_plain(Uneven)
    for take in (lambda w: w[0], lambda w: w.view(-1), lambda w: w.t(), lambda w: next(iter(w)), lambda w: w.T[0]):
        with torch.no_grad(), pytest.raises(torchacc.EngineError, match="that is a copy here"):
            take(model.weight).zero_()
        with pytest.raises(torchacc.EngineError, match="that is a copy here"):
            take(model.weight.data).detach().add_(1.0)
    with torch.no_grad():
        model.weight.t().clone().zero_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        model.weight[0] = 1.0
    with pytest.raises(torchacc.EngineError, match="shape"):
        model.weight.data = torch.zeros(5, 4)
    with pytest.raises(torchacc.EngineError, match="register_post_accumulate_grad_hook"):
        model.weight.register_hook(lambda gradient: gradient)


@case([NATIVE])
def data_is_swapped_and_put_back() -> None:
    model, plain = sharded_and_plain(Uneven)
    x = torch.ones(2, 3)
    outputs = []
    for each in (model, plain):
        kept = {name: parameter.data for name, parameter in each.named_parameters()}
        for parameter in each.parameters():
            parameter.data = parameter.data * 0.5
        outputs.append(each(x).detach())
        for name, parameter in each.named_parameters():
            parameter.data = kept[name]
    check_equal(*outputs, "output")
    check_parameters(model, plain)
    check_equal(model(x).detach(), plain(x).detach(), "output")


PENALTIES: dict[str, Callable[[nn.Module], Any]] = {
    "norms": lambda model: sum(p.norm() for p in model.parameters()),
    "squares": lambda model: sum(p.pow(2).sum() for p in model.parameters()),
    "sizes": lambda model: sum(p.abs().mean() for p in model.parameters()),
    "joined": lambda model: torch.cat([p.view(-1) for p in model.parameters()]).norm(),
    "scale": lambda model: 1.0 * model.scale.exp().sum(),
    "orthogonal": lambda model: (
        (model.weight.t() @ model.weight - torch.eye(3, device=model.weight.device)).square().sum()
    ),
}


@case([NATIVE], each=PENALTIES)
def penalty_in_the_script_has_its_gradient(penalty: Callable[[nn.Module], Any]) -> None:
    model, plain = sharded_and_plain(Uneven)
    x = torch.arange(12.0).view(4, 3) / 10
    for each in (model, plain):
        own = x if each is plain else x.chunk(2)[RANK]
        (each(own).sum() + 0.5 * penalty(each)).backward()
        (each(own).sum() * each.scale.exp() + penalty(each)).backward()
    for name, parameter in plain.named_parameters():
        check_equal(plain_value(model.get_parameter(name).grad), parameter.grad, name)


class Lamb(torch.optim.Optimizer):
    """Norms of whole weights, means of rows, and a state that is not a distributed tensor."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    state["rows"] = torch.zeros(p.shape[:1], device=p.device)
                    state["plain"] = torch.zeros(p.shape, device=p.device)
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["rows"].mul_(0.9).add_(p.grad.square().view(len(p), -1).mean(1), alpha=0.1)
                state["plain"].mul_(0.9).add_(p.grad)
                centred = p.grad - p.grad.mean()
                update = state["mean"] + centred + state["plain"]
                update = update / (state["rows"].mean().sqrt() + update.norm() + 1e-3)
                trust = (p.norm() + 1) / (update.norm() + 1)
                p.sub_(group["lr"] * trust * update)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lamb": Lamb,
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "adafactor-foreach": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1, foreach=True),
    "adafactor-transformers": lambda parameters: transformers.Adafactor(
        parameters, lr=0.1, beta1=0.9, scale_parameter=True, relative_step=False
    ),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.01),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=0.01),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.01),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    "sgd-foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True),
    "adamw-amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, amsgrad=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, fused=True),
}


@case([NATIVE], each=OPTIMIZERS)
def optimizer_steps_as_on_whole_weights(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model, plain = sharded_and_plain(WithARow)
    x = torch.arange(12.0).view(4, 3) / 10
    for each in (model, plain):
        optimizer = make(each.parameters())
        own = x if each is plain else x.chunk(2)[RANK]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = each(own).sum()  # noqa: B023
            loss.backward()
            return loss

        for _ in range(3):
            closure()
            optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)
    check_parameters(model, plain, 5e-6)


@case([NATIVE])
def muon_steps_as_on_whole_weights() -> None:
    """It rounds to bfloat16, and writes over the transpose of what it has rounded where there are more rows."""
    sizes = ((3, 5), (5, 5), (5, 2))
    model, plain = sharded_and_plain(lambda: nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes)))
    x = torch.arange(12.0).view(4, 3) / 10  # the same on both devices, as gradients that differ may be rounded apart
    for each in (model, plain):
        optimizer = torch.optim.Muon(each.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    check_parameters(model, plain, 5e-6)


@case([NATIVE])
def views_are_written_to_as_soon_as_nobody_has_the_rest() -> None:
    """Also while a thread of gloo's has what has been gathered for the view, as it does for a moment."""
    model, plain = sharded_and_plain(lambda: nn.Linear(48, 64, bias=False))
    for _ in range(40):
        rows, expected = (each.weight.detach().bfloat16() for each in (model, plain))
        rows = rows.t()
        rows.div_(rows.norm())
        assert rows.float().equal(expected.t().div(expected.norm()).float())


@case([NATIVE])
def views_of_what_nobody_has_any_more_are_written_to() -> None:
    """While somebody has it, it would stay as it is: then that is refused."""
    model, plain = sharded_and_plain(WithARow)
    with torch.no_grad():
        for each in (model, plain):
            doubled = each.weight * 2
            rows = doubled.t()
            if each is model:
                with pytest.raises(torchacc.EngineError, match="would write to a part of a sharded tensor"):
                    rows.mul_(3)
                with pytest.raises(torchacc.EngineError, match="would write to a part of a sharded tensor"):
                    each.weight.detach().t().mul_(3)
            del doubled
            each.weight.copy_(rows.mul_(3).t())
    check_parameters(model, plain, 5e-6)


@case([NATIVE], each={name: OPTIMIZERS[name] for name in OPTIMIZERS if name.startswith(("lamb", "adafactor"))})
def state_that_is_no_distributed_tensor_is_saved_whole(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model, plain = sharded_and_plain(WithARow)
    x = torch.arange(12.0).view(4, 3) / 10
    folder = torchacc.dist.rendezvous("folder", tempfile.mkdtemp().encode())[0].decode() + "/saved"
    optimizers = make(model.parameters()), make(plain.parameters())

    def train() -> None:
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(x if each is plain else x.chunk(2)[RANK]).sum().backward()
            optimizer.step()

    train()
    torchacc.checkpoint.save(folder, model=model, optimizer=optimizers[0])
    full = torchacc.optim_state_dict(model, optimizers[0])
    for index, entries in optimizers[1].state_dict()["state"].items():
        for key, value in entries.items():
            check_equal(full["state"][index][key], value, f"{key} of {index}")
    optimizers = make(model.parameters()), optimizers[1]
    torchacc.checkpoint.load(folder, model=model, optimizer=optimizers[0])
    train()
    check_parameters(model, plain, 5e-6)


@case([NATIVE])
def pickled_shards_are_refused() -> None:
    """Also inside of a state; copies of a state are made, and PyTorch's own distributed checkpoints."""
    model, _ = sharded_and_plain(Uneven)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).backward()
    optimizer.step()
    for state in (model.state_dict(), optimizer.state_dict(), model.weight, [model.weight.grad]):
        with pytest.raises(torchacc.CheckpointError, match=r"torchacc.full_state_dict\(model\)"):
            torch.save(state, io.BytesIO())
        copied = copy.deepcopy(state)
        assert type(copied) is type(state)
    torch.save(torchacc.full_state_dict(model), io.BytesIO())
    folder = torchacc.dist.rendezvous("folder", tempfile.mkdtemp().encode())[0].decode() + "/saved"
    torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=folder)
    with torch.no_grad():
        before = plain_value(model.weight).clone()
        model.weight.zero_()
    state = model.state_dict()
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    check_equal(plain_value(model.weight), before, "weight")
