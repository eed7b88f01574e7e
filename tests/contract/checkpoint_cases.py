"""What checkpoints of a model and its optimizer hold, and what they refuse, on two devices of each engine."""

import os
import shutil
from typing import Any

import pytest
import torch
from casekit import (
    MLP,
    MULTIPROCESS,
    NATIVE,
    RANK,
    SPMD,
    XLA,
    X,
    accelerate,
    adamw,
    case,
    case_of_each_layout,
    part,
    step,
)
from state_cases import Odd, check_same, shared_folder, snapshot, trained
from torch import nn

import torchacc
from torchacc import StateDictType
from torchacc.engines.sharded_model import sharded_model
from torchacc.engines.xla import runtime

OPTIMIZERS = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}


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


@case(XLA)
def what_is_fetched_changes_no_random_numbers() -> None:
    torch.manual_seed(1)
    model = accelerate(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    seed = runtime.random_seed()
    consolidated = model.state_dict()
    sharded_model(model).shards.fetch(list(model.parameters()))
    assert runtime.random_seed() == seed
    with torchacc.accumulate(model):
        model(part(X)).sum().backward()
    seed = runtime.random_seed()
    sharded_model(model).shards.fetch(list(model.parameters()))
    assert runtime.random_seed() == seed
    assert set(consolidated) == {"0.weight", "0.bias"}


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
        with pytest.raises(torchacc.CheckpointError, match="optimizer has 1 parameter group, this one has 2. Make"):
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
        with pytest.raises(torchacc.CheckpointError, match="holds files that are not a torchacc checkpoint"):
            torchacc.checkpoint.save(folder / "mine", model=model)
        torchacc.dist.rendezvous("looked")
        assert sorted(path.name for path in folder.rglob("*")) == ["file", "mine"]
        with pytest.raises(torchacc.CheckpointError, match="no checkpoint"):
            torchacc.checkpoint.load(folder / "none", model=model)
        with pytest.raises(torchacc.CheckpointError, match="which a checkpoint does not hold|could run code"):
            torchacc.save({"what": shutil.rmtree}, folder / "code.pth")
        assert not (folder / "code.pth").exists()


@case_of_each_layout
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

    def refuse() -> None:
        if RANK == 0:
            raise torchacc.CheckpointError("the disk is full")

    with pytest.raises(torchacc.CheckpointError, match="the disk is full") as raised:
        group.call_on_all(refuse)
    assert raised.value.__cause__ is None
