"""What the states of a model and of an optimizer do in memory and in files, on two devices of each engine."""

import copy
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
    FLAT,
    MLP,
    MULTIPROCESS,
    NATIVE,
    RANK,
    X,
    accelerate,
    adamw,
    by_rank,
    case,
    case_of_each_layout,
    check_equal,
    loss_of,
    part,
    step,
)
from torch import nn

import torchacc
from torchacc import StateDictType
from torchacc.engines.sharded_model import sharded_model


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


@case(each={f"{kind.value}-plain": (kind, {}) for kind in StateDictType})
@case([MULTIPROCESS], each={f"{kind.value}-flat": (kind, FLAT) for kind in StateDictType})
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


@case_of_each_layout
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


@case_of_each_layout
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
    with pytest.raises(torchacc.CheckpointError, match="2 (parameter )?groups, (and )?this one has 1"):
        model.optim_state_dict_to_load(optimizer, plain_moments, rank0_only=True)


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


@case_of_each_layout
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


@case_of_each_layout
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
    with pytest.raises(torchacc.CheckpointError, match="2 (parameter )?groups, (and )?this one has 1"):
        optimizer.load_state_dict(two_groups.state_dict())
    fewer = torch.optim.AdamW(list(plain.parameters())[:2])
    with pytest.raises(torchacc.CheckpointError, match="group 0 of the saved optimizer has 2 parameters"):
        optimizer.load_state_dict(fewer.state_dict())
    check_same(snapshot(model, optimizer), before)
    one_name = {name: value for name, value in state.items() if name != "second.weight"}
    assert model.load_state_dict(one_name).missing_keys == []
    assert model.load_state_dict({"one.bias": state["one.bias"]}, strict=False).unexpected_keys == []


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
def values_that_are_still_computed_are_waited_for():
    """A loss that is asked for at once: its program takes far longer than asking does."""
    torch.manual_seed(1)
    wide = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    plain = copy.deepcopy(wide)
    model, x = accelerate(wide), torch.randn(1024, 512)
    with torch.no_grad():
        (found,) = sharded_model(model).shards.fetch([model(part(x)).mean()])
        check_equal(torch.stack(by_rank(found)).mean(), plain(x).mean(), "mean")


class Converting(MLP):
    """Changes states in each way that PyTorch has for it; a state of its first version has another scale."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.num_loaded = 0
        self.register_state_dict_post_hook(_prefixed)
        self.register_load_state_dict_pre_hook(_without_prefix)
        first = next(module for module in self.modules() if isinstance(module, nn.Linear))
        first.register_state_dict_post_hook(_scaled)
        first.register_load_state_dict_pre_hook(_unscaled)
        self.register_load_state_dict_post_hook(_count)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version") is None:
            for name in [name for name in state_dict if name.endswith("bias")]:
                state_dict[name] = state_dict[name] + 1
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        state_dict.pop("made.by", None)
        return super().load_state_dict(state_dict, *args, **kwargs)


def _prefixed(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    for name in list(state):
        state[f"model.{name}"] = state.pop(name)
    state["made.by"] = torch.ones(1)


def _without_prefix(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    for name in list(state):
        state[name.removeprefix("model.")] = state.pop(name)


def _scaled(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"] * 4


def _unscaled(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"] / 4


def _count(module: Any, keys: Any) -> None:
    module.num_loaded += 1


@case()
def modules_change_states_as_in_pytorch() -> None:
    torch.manual_seed(1)
    model, plain = Converting(), Converting()
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    accelerate(model)
    full, expected = torchacc.full_state_dict(model), plain.state_dict()
    check_same(full, expected)
    assert full._metadata == expected._metadata  # type: ignore[attr-defined]
    model.load_state_dict(full)
    check_same(torchacc.full_state_dict(model), expected)
    model.load_state_dict(dict(torchacc.full_state_dict(model)))  # of an older version, as nothing says otherwise
    plain.load_state_dict(dict(plain.state_dict()))
    check_same(torchacc.full_state_dict(model), plain.state_dict())
    model.load_state_dict(torchacc.state_dict(model, StateDictType.LOCAL_STATE_DICT))
    check_same(torchacc.full_state_dict(model), plain.state_dict())
    assert model.num_loaded == 3


@case()
def files_keep_the_versions_of_modules() -> None:
    model = accelerate(Converting())
    expected = torchacc.full_state_dict(model)
    with shared_folder() as folder:
        torchacc.save(
            {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}, folder, master_only=False
        )
        model.load_state_dict(torchacc.load(folder)["model"])
        check_same(torchacc.full_state_dict(model), expected)
        torchacc.save({"model": model.state_dict()}, folder / "full.pth")
        torchacc.dist.rendezvous("saved")
        model.load_state_dict(torchacc.load(folder / "full.pth")["model"])
        check_same(torchacc.full_state_dict(model), expected)
        torchacc.checkpoint.save(folder / "checkpoint", model=model)
        torchacc.checkpoint.load(folder / "checkpoint", model=model)
    check_same(torchacc.full_state_dict(model), expected)
    assert model.num_loaded == 3


@case()
def buffers_that_come_later_are_in_the_state() -> None:
    model = accelerate(MLP())
    model.register_buffer("late", torch.ones(3))
    full = torchacc.full_state_dict(model)
    assert full["late"].tolist() == [1.0] * 3
    model.load_state_dict({**full, "late": full["late"] * 2})
    assert torchacc.full_state_dict(model)["late"].tolist() == [2.0] * 3
