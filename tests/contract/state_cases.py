"""What the states of a model and of an optimizer do in memory and in files, on two devices of each engine."""

import copy
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from casekit import (
    MLP,
    MULTIPROCESS,
    NATIVE,
    RANK,
    SPMD,
    X,
    accelerate,
    adamw,
    by_rank,
    case,
    check_equal,
    loss_of,
    part,
    step,
)
from torch import nn

import torchacc
from torchacc import StateDictType
from torchacc.engines.base import sharded_model

LAYOUTS: dict[str, dict[str, Any]] = {"plain": {}, "flat": {"flatten_parameters": True}}
OPTIMIZERS = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}


class Odd(nn.Module):
    """Rows that two do not divide, a tied weight, a frozen one, buffers of several dtypes, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.register_buffer("count", torch.arange(3))
        self.first = nn.Linear(8, 5, bias=False)
        self.second = nn.Linear(8, 5, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.linspace(0, 1, 5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.one = nn.Linear(5, 1)
        self.layers[0][0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.one(self.first(x) + self.second(x) * self.scale)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            self.scratch.zero_()


def trained(make_optimizer: Any = adamw, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, Any]:
    """Return a model and its optimizer after two steps, and the same in plain PyTorch."""
    torch.manual_seed(1)
    model = Odd()
    plain = copy.deepcopy(model)
    accelerate(model, **options)
    optimizer, plain_optimizer = make_optimizer(model), make_optimizer(plain)
    for _ in range(2):
        step(model, part(X), optimizer)
        step(plain, X, plain_optimizer)
    return model, optimizer, plain, plain_optimizer


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all tensors of both, whole, by name."""
    state = torchacc.optim_state_dict(model, optimizer)
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    of_optimizer = {f"{names[own]}/{key}": v for own, entry in state["state"].items() for key, v in entry.items()}
    return {**torchacc.full_state_dict(model), **of_optimizer}


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


@contextmanager
def shared_folder() -> Iterator[Path]:
    path = Path(by_rank(tempfile.mkdtemp() if RANK == 0 else None)[0])
    try:
        yield path
    finally:
        torchacc.dist.rendezvous("done")
        if RANK == 0:
            shutil.rmtree(path)


@case(each={f"{kind.value}-{name}": (kind, options) for kind in StateDictType for name, options in LAYOUTS.items()})
def state_comes_back(how: tuple[StateDictType, dict[str, Any]]) -> None:
    kind, options = how
    model, optimizer, plain, plain_optimizer = trained(**options)
    before = snapshot(model, optimizer)
    weights = torchacc.state_dict(model, kind)
    moments = copy.deepcopy(torchacc.optim_state_dict(model, optimizer, kind))
    step(model, part(X), optimizer)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    check_same(snapshot(model, optimizer), before)
    step(model, part(X), optimizer)
    step(plain, X, plain_optimizer)
    for name, value in torchacc.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=5e-6)


@case(each=LAYOUTS)
def states_are_those_of_the_unsharded_model(options: dict[str, Any]) -> None:
    model, optimizer, plain, plain_optimizer = trained(**options)
    assert list(torchacc.full_state_dict(model)) == list(plain.state_dict())
    full = torchacc.optim_state_dict(model, optimizer)
    expected = plain_optimizer.state_dict()
    assert full["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    assert {own: sorted(entry) for own, entry in full["state"].items()} == {
        own: sorted(entry) for own, entry in expected["state"].items()
    }
    before = snapshot(model, optimizer)
    plain_optimizer.load_state_dict(full)
    optimizer.load_state_dict(plain_optimizer.state_dict())
    check_same(snapshot(model, optimizer), before)


@case(each=LAYOUTS)
def rank0_alone_keeps_and_hands_on(options: dict[str, Any]) -> None:
    model, optimizer, _, plain_optimizer = trained(**options)
    before = snapshot(model, optimizer)
    weights = torchacc.full_state_dict(model, rank0_only=True)
    moments = model.full_optim_state_dict(optimizer, rank0_only=True)
    assert bool(weights) == bool(moments) == (RANK == 0)
    step(model, part(X), optimizer)
    optimizer.load_state_dict(model.optim_state_dict_to_load(optimizer, moments, rank0_only=True))
    after = snapshot(model, optimizer)
    check_same({k: v for k, v in after.items() if "/" in k}, {k: v for k, v in before.items() if "/" in k})
    plain_moments: dict[str, Any] = {}
    if RANK == 0:
        plain_optimizer.load_state_dict(moments)
        plain_moments = plain_optimizer.state_dict()
        for group in plain_moments["param_groups"]:
            group.pop("param_names", None)
    step(model, part(X), optimizer)
    optimizer.load_state_dict(model.optim_state_dict_to_load(optimizer, plain_moments, rank0_only=True))
    after = snapshot(model, optimizer)
    check_same({k: v for k, v in after.items() if "/" in k}, {k: v for k, v in before.items() if "/" in k})
    plain_moments["param_groups"] = plain_moments.get("param_groups", []) * 2
    with pytest.raises(torchacc.CheckpointError, match="2 groups, this one has 1"):
        model.optim_state_dict_to_load(optimizer, plain_moments, rank0_only=True)


@case(each=OPTIMIZERS)
def checkpoint_of_an_optimizer(make: Any) -> None:
    model, optimizer, _, _ = trained(lambda m: make(m.parameters()))
    with shared_folder() as folder:
        torchacc.checkpoint.save(folder / "a", model=model, optimizer=optimizer, extra={"lr": [1, (2, {3: b"4"})]})
        before = snapshot(model, optimizer)
        step(model, part(X), optimizer)
        after = snapshot(model, optimizer)
        extra = torchacc.checkpoint.load(folder / "a", model=model, optimizer=optimizer)
        assert extra == {"lr": [1, (2, {3: b"4"})]}
        check_same(snapshot(model, optimizer), before)
        step(model, part(X), optimizer)
        check_same(snapshot(model, optimizer), after)
        fresh = make(model.parameters())
        torchacc.checkpoint.load(folder / "a", model=model, optimizer=fresh)
        step(model, part(X), fresh)
        check_same(snapshot(model, fresh), after)


@case([MULTIPROCESS])
def optimizers_of_whole_weights_are_refused_on_shards() -> None:
    for make in (torch.optim.Adafactor, torch.optim.LBFGS):
        model = accelerate(MLP())
        optimizer = make(model.parameters())
        model(part(X)).square().mean().backward()
        before = snapshot(model, optimizer)
        with pytest.raises(torchacc.ConfigError, match="use_spmd = True"):
            optimizer.step(lambda: 0.0)
        check_same(snapshot(model, optimizer), before)


@case([SPMD, NATIVE])
def checkpoint_of_an_optimizer_with_states_of_other_shapes() -> None:
    checkpoint_of_an_optimizer(lambda parameters: torch.optim.Adafactor(parameters, lr=0.01))


@case([MULTIPROCESS])
def checkpoint_of_a_flat_model_by_groups() -> None:
    torch.manual_seed(1)
    model = Odd()
    groups = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]]
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=0.01)
    accelerate(model, optimizer, flatten_parameters=True)
    step(model, part(X), optimizer)
    with shared_folder() as folder:
        torchacc.checkpoint.save(folder / "a", model=model, optimizer=optimizer)
        before = snapshot(model, optimizer)
        step(model, part(X), optimizer)
        torchacc.checkpoint.load(folder / "a", model=model, optimizer=optimizer)
        check_same(snapshot(model, optimizer), before)


@case(each=LAYOUTS)
def saved_as_the_seed_does(options: dict[str, Any]) -> None:
    model, optimizer, plain, _ = trained(**options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with shared_folder() as folder:
        before = snapshot(model, optimizer)
        torchacc.dist.rendezvous("saving_model")
        torchacc.dist.mark_step()
        checkpoint = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
        torchacc.save(checkpoint, folder / "model", master_only=False)
        torchacc.dist.rendezvous("saving_optimizer_states")
        torchacc.save(optimizer.state_dict(), folder / "optimizer")
        torchacc.save(scheduler.state_dict(), folder / "scheduler")
        torchacc.save({"optimizer": optimizer.state_dict()}, folder / "shards", master_only=False)
        step(model, part(X), optimizer)

        for _ in range(2):  # the second run finds the first one's output
            if torchacc.dist.is_master_ordinal(local=False):
                torchacc.dist.fsdp.consolidate_sharded_model_checkpoints(str(folder / "model"), "*.pth")
        torchacc.dist.rendezvous("ckpt_consolidation")
        consolidated = torch.load(folder / "model" / "consolidated.pth")
        assert sorted(consolidated["model"]) == sorted(plain.state_dict())
        assert {name: value.dtype for name, value in consolidated["model"].items()} == {
            name: value.dtype for name, value in plain.state_dict().items()
        }
        model.load_state_dict(consolidated["model"])
        optimizer.load_state_dict(torch.load(folder / "optimizer"))
        scheduler.load_state_dict(torch.load(folder / "scheduler"))
        check_same(snapshot(model, optimizer), before)

        step(model, part(X), optimizer)
        model.load_state_dict(torchacc.load(folder / "model")["model"])
        optimizer.load_state_dict(torchacc.load(folder / "shards")["optimizer"])
        check_same(snapshot(model, optimizer), before)


class Keeper(nn.Linear):
    """A layer with a state of its own, beside parameters and buffers."""

    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


@case(each={"number": {"scale": (1, 2.5)}, "tensor": torch.arange(3.0)})
def what_a_module_keeps_of_its_own_comes_back(kept: Any) -> None:
    def made() -> nn.Module:
        model = MLP()
        model.layers[1][0] = Keeper(8, 8)
        accelerate(model)
        return model

    def check(model: nn.Module) -> None:
        assert type(model.layers[1][0].kept) is type(kept)
        assert repr(model.layers[1][0].kept) == repr(kept)

    model, other, last = made(), made(), made()
    model.layers[1][0].kept = kept
    with shared_folder() as folder:
        torchacc.checkpoint.save(folder / "a", model=model)
        torchacc.checkpoint.load(folder / "a", model=other)
        check(other)
        plain = MLP()
        accelerate(plain)
        with pytest.raises(torchacc.CheckpointError, match=r"get_extra_state\(\): layers.1.0._extra_state"):
            torchacc.checkpoint.load(folder / "a", model=plain)
    full = torchacc.full_state_dict(model)
    assert sorted(full) == sorted(other.state_dict())
    last.load_state_dict(full)
    check(last)
    with pytest.raises(torchacc.CheckpointError, match="1 missing: layers.1.0._extra_state"):
        last.load_state_dict({name: value for name, value in full.items() if not name.endswith("_extra_state")})


@case([NATIVE, MULTIPROCESS])
def rank_that_cannot_write_leaves_the_files_of_the_last_save() -> None:
    model, _, _, _ = trained()
    with shared_folder() as folder:
        for value in (1.0, 2.0):
            state = {name: torch.full_like(held, value) for name, held in model.state_dict().items()}
            checkpoint = {"model": state, "shard_metadata": model.get_shard_metadata()}
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            if value == 2.0 and RANK == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))  # as a disk that is full
            refused = pytest.raises(torchacc.CheckpointError, match="was not written")
            try:
                with refused if value == 2.0 else nullcontext():
                    torchacc.save(checkpoint, folder, master_only=False)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        torchacc.dist.rendezvous("failed")
        assert sorted(path.name for path in folder.iterdir()) == [f"rank-{rank}-of-2-model.pth" for rank in range(2)]
        assert all((held == 1).all() for held in torchacc.load(folder)["model"].values())


@case([NATIVE, MULTIPROCESS])
def rank_files_of_two_saves_are_not_loaded() -> None:
    model, _, _, _ = trained()
    checkpoint = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    with shared_folder() as folder:
        for name in ("a", "b"):
            torchacc.save(checkpoint, folder / name, master_only=False)
        assert torchacc.load(folder / "a")["model"].keys() == checkpoint["model"].keys()
        torchacc.dist.rendezvous("loaded")
        if RANK == 1:  # as a save that is killed when rank 1's file has got its name, and rank 0's has not
            (folder / "b" / "rank-1-of-2-model.pth").replace(folder / "a" / "rank-1-of-2-model.pth")
        torchacc.dist.rendezvous("killed")
        with pytest.raises(torchacc.CheckpointError, match="are of different saves: the last one was cut short"):
            torchacc.load(folder / "a")


@case(each=LAYOUTS)
def one_file_holds_every_shard(options: dict[str, Any]) -> None:
    model, optimizer, plain, _ = trained(**options)
    with shared_folder() as folder:
        torchacc.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, folder / "a.pth")
        found = torch.load(folder / "a.pth")
        weights = torchacc.full_state_dict(model)
        assert found["epoch"] == 3
        assert sorted(found["model"]) == sorted(weights)
        for name, value in weights.items():
            assert torch.equal(found["model"][name], value), name
        plain.load_state_dict(found["model"])
        before = snapshot(model, optimizer)
        optimizer.load_state_dict(found["optimizer"])
        check_same(snapshot(model, optimizer), before)


@case()
def what_cannot_be_loaded_is_refused() -> None:
    model, optimizer, plain, _ = trained()
    before = snapshot(model, optimizer)
    state = plain.state_dict()
    wrong = {
        "1 missing: one.bias": {k: v for k, v in state.items() if k != "one.bias"},
        "1 unexpected: more": {**state, "more": X},
        r"'one.weight' has the shape \(2, 5\), the model's is \(1, 5\)": {**state, "one.weight": torch.ones(2, 5)},
        r"'count' has the shape \(4,\)": {**state, "count": torch.arange(4)},
        "'(first|second).weight' and '(first|second).weight' are one parameter": {
            **state,
            "second.weight": state["first.weight"] + 1,
        },
    }
    for message, given in wrong.items():
        with pytest.raises(torchacc.CheckpointError, match=message):
            model.load_state_dict(given)
    with pytest.raises(torchacc.CheckpointError, match="assign=True"):
        model.load_state_dict(state, assign=True)
    two_groups = torch.optim.AdamW([{"params": [p]} for p in list(plain.parameters())[:2]])
    with pytest.raises(torchacc.CheckpointError, match="2 groups, this one has 1"):
        optimizer.load_state_dict(two_groups.state_dict())
    fewer = torch.optim.AdamW(list(plain.parameters())[:2])
    with pytest.raises(torchacc.CheckpointError, match="group 0 of the saved optimizer has 2 parameters"):
        optimizer.load_state_dict(fewer.state_dict())
    check_same(snapshot(model, optimizer), before)
    one_name = {name: value for name, value in state.items() if name != "second.weight"}
    assert model.load_state_dict(one_name).missing_keys == []
    assert model.load_state_dict({"one.bias": state["one.bias"]}, strict=False).unexpected_keys == []


@case()
def altered_checkpoint_is_refused_by_every_rank() -> None:
    model, optimizer, _, _ = trained()
    with shared_folder() as folder:
        for name in ("a", "model", "optimizer"):
            torchacc.checkpoint.save(folder / name, model=model, optimizer=optimizer)
        before = snapshot(model, optimizer)
        torchacc.dist.rendezvous("saved")
        for name in ("model", "optimizer") if RANK == 0 else ():
            with (folder / name / f"{name}.safetensors").open("r+b") as file:
                file.seek(-3, os.SEEK_END)
                byte = file.read(1)
                file.seek(-3, os.SEEK_END)
                file.write(bytes([byte[0] ^ 1]))
        torchacc.dist.rendezvous("altered")
        for name in ("model", "optimizer"):
            with pytest.raises(torchacc.CheckpointError, match=rf"{name}.safetensors is not as it was written"):
                torchacc.checkpoint.load(folder / name, model=model, optimizer=optimizer)
            with pytest.raises(torchacc.EngineError, match="the model cannot run, .*: loading .* has failed"):
                model(part(X))
        torchacc.checkpoint.load(folder / "a", model=model)  # the optimizer stays as the failed load has left it
        model(part(X))
        for use in (optimizer.step, optimizer.state_dict):
            with pytest.raises(torchacc.EngineError, match="cannot step or be saved"):
                use()
        with pytest.raises(torchacc.EngineError, match="cannot step or be saved"):
            torchacc.checkpoint.save(folder / "mixed", model=model, optimizer=optimizer)
        torchacc.checkpoint.load(folder / "a", model=model, optimizer=optimizer)
        check_same(snapshot(model, optimizer), before)
        step(model, part(X), optimizer)


@case()
def checkpoint_of_another_optimizer_changes_nothing() -> None:
    model, optimizer, _, _ = trained()
    with shared_folder() as folder:
        torchacc.checkpoint.save(folder / "a", model=model, optimizer=optimizer)
        step(model, part(X), optimizer)
        before = snapshot(model, optimizer)
        first, *others = model.parameters()
        two_groups = torch.optim.AdamW([{"params": [first]}, {"params": others}])
        with pytest.raises(torchacc.CheckpointError, match="the saved optimizer has 1 groups, this one has 2"):
            torchacc.checkpoint.load(folder / "a", model=model, optimizer=two_groups)
        check_same(snapshot(model, optimizer), before)
        step(model, part(X), optimizer)


@case()
def saving_what_cannot_be_saved_leaves_nothing() -> None:
    model, optimizer, _, _ = trained()
    with shared_folder() as folder:
        with pytest.raises(torchacc.CheckpointError, match=r"state.extra.what is a object"):
            torchacc.checkpoint.save(folder / "a", model=model, extra={"what": object()})
        if RANK == 0:
            (folder / "mine").mkdir()
            (folder / "mine" / "file").write_text("mine")
        with pytest.raises(torchacc.CheckpointError, match="holds files that are no torchacc checkpoint"):
            torchacc.checkpoint.save(folder / "mine", model=model)
        torchacc.dist.rendezvous("looked")
        assert sorted(path.name for path in folder.rglob("*")) == ["file", "mine"]
        with pytest.raises(torchacc.CheckpointError, match="no checkpoint"):
            torchacc.checkpoint.load(folder / "none", model=model)
        with pytest.raises(torchacc.CheckpointError, match="which a checkpoint does not hold|could run code"):
            torchacc.save({"what": shutil.rmtree}, folder / "code.pth")
        assert not (folder / "code.pth").exists()


@case(each=LAYOUTS)
def model_from_the_meta_device(options: dict[str, Any]) -> None:
    model, optimizer, _, _ = trained(**options)
    with shared_folder() as folder:
        torchacc.checkpoint.save(folder / "a", model=model, optimizer=optimizer)
        before = snapshot(model, optimizer)
        with torch.device("meta"):
            empty = Odd()
        accelerate(empty, **options)
        with pytest.raises(torchacc.EngineError, match="built on the meta device and has no weights yet"):
            empty(part(X))
        fresh = adamw(empty)
        torchacc.checkpoint.load(folder / "a", model=empty, optimizer=fresh)
        check_same(snapshot(empty, fresh), before)
        for each, its_optimizer in ((model, optimizer), (empty, fresh)):
            step(each, part(X), its_optimizer)
        check_same(snapshot(empty, fresh), snapshot(model, optimizer))


@case()
def states_are_copies() -> None:
    model, optimizer, _, _ = trained()
    states = [torchacc.state_dict(model, kind) for kind in StateDictType]
    kept = copy.deepcopy(states)
    loss_of(model(part(X))).backward()
    optimizer.step()
    for state, other in zip(states, kept, strict=True):
        for name, value in state.items():
            one, two = getattr(value, "data", value), getattr(other[name], "data", other[name])
            assert torch.equal(one, two), name


COPIES: dict[str, Any] = {
    "moved": lambda model: {
        name: getattr(value, "to_local", lambda value=value: value)().cpu().clone()
        for name, value in model.state_dict().items()
    },
    "with-metadata": lambda model: {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "shard_metadata": model.get_shard_metadata(),
    },
    "local": lambda model: torchacc.state_dict(model, StateDictType.LOCAL_STATE_DICT),
    "gradients": lambda model: [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
}


@case([NATIVE, MULTIPROCESS], each=COPIES)
def copies_of_shards_are_not_cut_down_to_rank0s(take: Any) -> None:
    model, _, _, _ = trained()
    loss_of(model(part(X))).backward()
    with shared_folder() as folder:
        with pytest.raises(torchacc.CheckpointError, match="rank 0 alone would keep its own"):
            torchacc.save(take(model), folder / "a.pth")
        assert not (folder / "a.pth").exists()


@case()
def parts_of_a_model_are_saved_whole() -> None:
    model, _, plain, _ = trained()
    with shared_folder() as folder:
        torchacc.save(dict(model.named_parameters()), folder / "parameters.pth")
        torchacc.save(model.layers.state_dict(), folder / "layers.pth")
        whole = torchacc.full_state_dict(model)
        for name, value in torch.load(folder / "parameters.pth").items():
            assert torch.equal(value, whole[name]), name
        layers = torch.load(folder / "layers.pth")
        assert list(layers) == list(plain.layers.state_dict())
        for name, value in layers.items():
            assert torch.equal(value, whole[f"layers.{name}"]), name


@case()
def weights_of_another_shape_are_refused() -> None:
    """Also of as many elements, or as many as this process keeps."""
    torch.manual_seed(1)
    model = accelerate(nn.Sequential(nn.Linear(8, 4), nn.Tanh()))
    optimizer = adamw(model)
    step(model, part(X), optimizer)
    state, moments = torchacc.full_state_dict(model), torchacc.optim_state_dict(model, optimizer)
    for shape in ((8, 4), (2, 8), (32,)):
        with pytest.raises(torchacc.CheckpointError, match="'0.weight' has the shape"):
            model.load_state_dict({**state, "0.weight": torch.ones(shape)})
        wrong = copy.deepcopy(moments)
        wrong["state"][0]["exp_avg"] = torch.ones(shape)
        with pytest.raises(torchacc.CheckpointError, match="'0.weight' has the shape"):
            optimizer.load_state_dict(wrong)
    check_same(torchacc.full_state_dict(model), state)


@case()
def what_has_no_weights_is_not_saved() -> None:
    with torch.device("meta"):
        model = Odd()
    accelerate(model)
    with shared_folder() as folder:
        acts = [
            lambda: torchacc.checkpoint.save(folder / "a", model=model),
            lambda: torchacc.save(model.state_dict(), folder / "a"),
            lambda: torchacc.full_state_dict(model),
            lambda: torchacc.state_dict(model, StateDictType.LOCAL_STATE_DICT),
        ]
        for act in acts:
            with pytest.raises(torchacc.EngineError, match="has no weights yet"):
                act()
        assert not list(folder.iterdir())


@case([NATIVE, MULTIPROCESS])
def checkpoint_may_be_moved_as_soon_as_it_is_saved() -> None:
    model, _, _, _ = trained()
    with shared_folder() as folder:
        for index in range(5):
            torchacc.checkpoint.save(folder / "new", model=model)
            if RANK == 0:
                (folder / "new").rename(folder / f"{index}")
            torchacc.dist.rendezvous("moved")


@case()
def checkpoint_by_any_name() -> None:
    model, _, _, _ = trained()
    with shared_folder() as folder:
        torchacc.checkpoint.save(folder / "lr[0.1]*", model=model, extra=1)
        torchacc.checkpoint.save(folder / "step1", model=model, extra=2)
        torchacc.dist.rendezvous("saved")
        if RANK == 0:
            (folder / "lr[0.1]*").rename(folder / ".lr[0.1]*.t1.replaced")
            (folder / "latest").symlink_to("step1", target_is_directory=True)
        torchacc.dist.rendezvous("moved")
        assert torchacc.checkpoint.load(folder / "lr[0.1]*", model=model) == 1
        torchacc.checkpoint.save(folder / "latest", model=model, extra=3)
        assert torchacc.checkpoint.load(folder / "step1", model=model) == 3
        assert (folder / "latest").is_symlink()


@case()
def mistakes_are_found_before_the_model_is_touched() -> None:
    model, optimizer, _, _ = trained()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5])
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with shared_folder() as folder:
        torchacc.checkpoint.save(folder / "a", model=model, optimizer=optimizer)
        torchacc.checkpoint.save(folder / "b", model=model, optimizer=optimizer, scheduler=scheduler)
        step(model, part(X), optimizer)
        before = snapshot(model, optimizer)
        with pytest.raises(torchacc.CheckpointError, match="saved without a scheduler"):
            torchacc.checkpoint.load(folder / "a", model=model, optimizer=optimizer, scheduler=scheduler)
        with pytest.raises(torchacc.CheckpointError, match="saved with AdamW, and this optimizer is SGD"):
            torchacc.checkpoint.load(folder / "a", model=model, optimizer=other)
        check_same(snapshot(model, optimizer), before)
        torchacc.checkpoint.load(folder / "b", model=model, optimizer=optimizer, scheduler=scheduler)
        scheduler.step(3)  # with a Counter of its own
        step(model, part(X), optimizer)


@case()
def error_on_one_rank_is_raised_on_all() -> None:
    model, _, _, _ = trained()
    group = model._torchacc.engine.group

    def act() -> None:
        if RANK == 0:
            raise TypeError("what")

    with pytest.raises(torchacc.CheckpointError, match="TypeError: what"):
        group.call_on_all(act)


@case()
def values_that_are_still_computed_are_waited_for():
    """A loss that is asked for at once: its program takes far longer than asking does."""
    torch.manual_seed(1)
    wide = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    plain = copy.deepcopy(wide)
    model, x = accelerate(wide), torch.randn(1024, 512)
    with torch.no_grad():
        (found,) = sharded_model(model).fetch([model(part(x)).mean()])
        check_equal(torch.stack(by_rank(found)).mean(), plain(x).mean(), "mean")
