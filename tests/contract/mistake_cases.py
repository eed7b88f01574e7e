"""What a model keeps by which libraries know it, and what scripts call by mistake, on two devices of each engine."""

import copy
import io
import logging
import pickle
import weakref

import pytest
import torch
from casekit import ADAM_ABSOLUTE, MLP, NATIVE, SPMD, X, accelerate, case, check_parameters, loss_of, part
from torch import nn

import torchacc
from torchacc.engines.base import sharded_model


@case()
def model_keeps_the_name_of_its_class_and_is_an_instance_of_it() -> None:
    model = accelerate(MLP())
    assert isinstance(model, MLP)
    assert (type(model).__name__, type(model).__qualname__) == ("MLP", "MLP")
    assert type(model).__module__ == MLP.__module__
    assert repr(model).startswith("MLP(\n")
    assert type(model.layers[:1][0]).__name__ == "Sequential"
    assert str(torchacc.describe(model)).startswith(f"engine      {sharded_model(model).engine.kind}")


@case()
def gradients_from_before_the_model_is_sharded_are_dropped_with_a_warning() -> None:
    model = MLP()
    loss_of(model(X)).backward()
    heard: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchacc").addHandler(listener)
    try:
        model = accelerate(model)
    finally:
        logging.getLogger("torchacc").removeHandler(listener)
    assert "'layers.0.0.weight' already has a gradient, which is dropped" in " ".join(heard)
    assert all(parameter.grad is None for parameter in model.parameters())


class Resizable(MLP):
    """With the method of transformers' models."""

    def resize_token_embeddings(self, size: int) -> None:
        self.head = nn.Linear(8, size)


@case()
def pickling_the_model_is_refused() -> None:
    model = accelerate(MLP())
    for held in (model, [model], nn.Sequential(model)):
        for write in (pickle.dumps, lambda held: torch.save(held, io.BytesIO())):
            with pytest.raises(torchacc.CheckpointError, match=r"pickling this MLP, as torch\.save\(model\) does"):
                write(held)


@case()
def resizing_embeddings_is_refused() -> None:
    with pytest.raises(torchacc.EngineError, match=r"resize_token_embeddings\(\) of a sharded model"):
        accelerate(Resizable()).resize_token_embeddings(16)


@case()
def wrapping_the_model_is_refused_and_holding_it_is_not() -> None:
    model = accelerate(MLP())
    wrappers = [nn.DataParallel, torch.compile]
    if torch.distributed.is_initialized():
        wrappers.append(nn.parallel.DistributedDataParallel)
    for wrap in wrappers:
        with pytest.raises(torchacc.ConfigError, match=r"around a model of accelerate\(\)"):
            wrap(model)
    held = nn.Sequential(model)
    assert held[0] is model


@case()
def optimizer_of_parameters_that_shards_have_replaced_is_refused_before_it_trains() -> None:
    model = MLP()
    before = list(model.parameters())
    made_before, handed_in = torch.optim.SGD(before, lr=0.1), torch.optim.SGD(before, lr=0.1)
    accelerate(model, handed_in)
    from_a_list_of_then = torch.optim.SGD(before, lr=0.1)
    for stale in (made_before, from_a_list_of_then):
        for call in (stale.zero_grad, stale.step):
            with pytest.raises(torchacc.ConfigError, match=r"listed before accelerate\(\).*optimizer=optimizer"):
                call()
    for fine in (handed_in, torch.optim.SGD(model.parameters(), lr=0.1)):
        fine.zero_grad()
        loss_of(model(part(torch.ones(4, 8)))).backward()
        fine.step()


@case([SPMD, NATIVE])
def optimizer_with_a_closure_that_was_made_before_and_handed_in_trains() -> None:
    torch.manual_seed(1)
    model = MLP()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.LBFGS(each.parameters(), lr=0.1, max_iter=2) for each in (model, plain)]
    accelerate(model, optimizers[0])
    for each, optimizer, x in ((model, optimizers[0], part(X)), (plain, optimizers[1], X)):

        def evaluate(each: nn.Module = each, x: torch.Tensor = x) -> torch.Tensor:
            each.zero_grad()
            loss = loss_of(each(x))
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(evaluate)
    check_parameters(model, plain, ADAM_ABSOLUTE)


@case()
def parameters_in_half_precision_are_kept_in_float32_one_unit_at_a_time() -> None:
    model = MLP().to(torch.bfloat16)
    own = [weakref.ref(parameter) for parameter in model.parameters()]
    held = list(model.parameters())
    accelerate(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in held} == {torch.bfloat16}
    del held
    assert not any(each() is not None for each in own)
