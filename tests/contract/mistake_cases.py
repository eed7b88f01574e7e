"""What a model keeps by which libraries know it, and what scripts call by mistake, on two devices of each engine."""

import copy
import functools
import io
import logging
import pickle
import tempfile
import time
import weakref
from pathlib import Path
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
    SPMD,
    XLA,
    X,
    accelerate,
    by_rank,
    case,
    check_parameters,
    check_training,
    loss_of,
    part,
    sharded_and_plain,
)
from torch import nn

import torchacc
from tests.logged import heard
from torchacc.engines import expected_calls
from torchacc.engines.native import script_reads
from torchacc.engines.sharded_model import sharded_model


@case()
def model_keeps_the_name_of_its_class_and_is_an_instance_of_it() -> None:
    model = accelerate(MLP())
    assert isinstance(model, MLP)
    assert (type(model).__name__, type(model).__qualname__) == ("MLP", "MLP")
    assert type(model).__module__ == MLP.__module__
    assert repr(model).startswith("MLP(\n")
    assert type(model.layers[:1][0]).__name__ == "Sequential"
    assert str(torchacc.describe(model)).startswith(f"engine      {sharded_model(model).engine.name}")


@case()
def a_description_says_how_many_parameters_train() -> None:
    model = MLP()
    model.layers.requires_grad_(False)
    assert " units, of which 36 train, " in str(torchacc.describe(accelerate(model)))


@case()
def gradients_from_before_the_model_is_sharded_are_dropped_with_a_warning() -> None:
    model = MLP()
    loss_of(model(X)).backward()
    with heard(logging.WARNING) as warned:
        model = accelerate(model)
    assert "'layers.0.0.weight' already has a gradient, which is dropped" in " ".join(warned)
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

        with heard(logging.WARNING) as warned:
            for _ in range(2):
                optimizer.step(evaluate)
        is_slow = each is model and ENGINE == SPMD
        assert any("LBFGS decides by numbers in the midst of its step" in line for line in warned) == is_slow
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


@case()
def model_that_came_in_half_precision_takes_inputs_in_it() -> None:
    model, plain = sharded_and_plain(lambda: MLP().to(torch.bfloat16))
    plain.float()
    x = X.to(torch.bfloat16)
    own = x if ENGINE == SPMD else x.chunk(2)[RANK]
    torch.testing.assert_close(model(part(x)).detach().cpu(), plain(own.float()))


@case([NATIVE])
def part_of_a_sharded_model_is_answered_with_all_of_it() -> None:
    model = accelerate(MLP())
    with pytest.raises(torchacc.ConfigError, match="the model that accelerate.. returned, of which this is a part"):
        torchacc.full_state_dict(model.layers)


@case([NATIVE])  # operations under XLA take both
def inputs_in_half_precision_of_a_model_in_float32_are_explained() -> None:
    with pytest.raises(torchacc.DataError, match="in bfloat16: pass float32, or let the model compute in bfloat16"):
        accelerate(MLP())(part(X.to(torch.bfloat16)))


@case(XLA)
def inputs_on_another_device_are_explained() -> None:
    with pytest.raises(torchacc.DataError, match=r"the model is on xla:0, and was called with a tensor on meta: use"):
        accelerate(MLP())(torch.ones(2, 8, device="meta"))


@case([NATIVE, MULTIPROCESS])
def model_on_the_meta_device_of_some_processes_is_refused_on_each() -> None:
    with torch.device("meta" if RANK else "cpu"):
        model = MLP()
    with pytest.raises(torchacc.ConfigError, match="is in memory on rank 0 and on the meta device on rank 1. Build it"):
        accelerate(model)
    assert by_rank(1) == [1, 1]


@case([NATIVE, MULTIPROCESS])
def call_that_only_some_processes_make_is_named_and_ends() -> None:
    model = accelerate(MLP())
    loss_of(model(part(X))).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected_calls, "_LOOK_SECS", 0.1)
        patch.setattr(expected_calls, "_WARN_SECS", 0.3)
        with pytest.raises(torchacc.EngineError, match=r"is in .*, and rank .* in .*: every process has to make this"):
            torchacc.full_state_dict(model) if RANK else model.clip_grad_norm_(1.0)
        time.sleep(2.0 * RANK)  # much longer than 0.3, also where other work takes the processors
        with heard(logging.WARNING) as warned:
            torchacc.full_state_dict(model)
        said = "rank 0 has waited 0 s in torchacc.full_state_dict(), and rank 1 has not come to it"
        assert (said in " ".join(warned)) == (RANK == 0)
        patch.setattr(expected_calls, "_CALL_SECS", 0.2)
        if RANK == 0:
            with pytest.raises(torchacc.EngineError, match="in torchacc.full_state_dict.., and rank 1 has not come"):
                torchacc.full_state_dict(model)
    if RANK:
        expected_calls._last[-1]._number += 1  # as if it had made the call that rank 0 gave up


@case([MULTIPROCESS])
def torchs_own_scaler_is_refused() -> None:
    model = accelerate(MLP())
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    loss_of(model(part(X))).backward()
    scaler.scale(torch.ones(()))
    with pytest.raises(torchacc.EngineError, match=r"torch.amp.GradScaler with one XLA process per device.*Leave it"):
        scaler.step(optimizer)
    model.zero_grad()


@case()
def outputs_in_low_precision_come_back_in_float32() -> None:
    model = accelerate(MLP(), compute={"bf16": True})
    inside: list[torch.dtype] = []
    model.layers[1].register_forward_hook(lambda module, args, output: inside.append(output.dtype))
    output = model(part(X))
    assert (inside, output.dtype) == ([torch.bfloat16], torch.float32)
    nn.functional.mse_loss(output, torch.ones_like(output)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@case(each={"layer": nn.LayerNorm, "group": functools.partial(nn.GroupNorm, 2)})
def norms_in_low_precision_take_inputs_in_float32(norm: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(norm(X.shape[1]), nn.Linear(X.shape[1], 4), nn.Tanh())
    plain = copy.deepcopy(model)
    output = accelerate(model, compute={"bf16": True})(part(X))
    output.sum().backward()
    torch.testing.assert_close(output.detach().cpu(), part(plain(X)).detach().cpu(), rtol=2e-2, atol=2e-2)


@case(XLA)
def gradients_that_another_models_backward_leaves_are_no_reason_to_warn() -> None:
    first, second = accelerate(MLP()), accelerate(MLP())
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (first, second)]
    with heard(logging.WARNING) as warned:
        for _ in range(2):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                optimizer.zero_grad()
                (loss_of(second(part(X))) + loss_of(model(part(X)))).backward()
                optimizer.step()
    assert not [line for line in warned if "zero_grad" in line]
    with heard(logging.WARNING) as warned:
        for _ in range(2):
            loss_of(first(part(X))).backward()
            optimizers[0].step()
    assert [line for line in warned if "no optimizer.zero_grad() came" in line]


@case([NATIVE])
def value_that_only_some_processes_read_is_named() -> None:
    model = accelerate(MLP())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected_calls, "_LOOK_SECS", 0.1)
        patch.setattr(script_reads._reads, "num_left", 1, raising=False)
        with pytest.raises(torchacc.EngineError, match=r"torchacc.full_state_dict\(\).*: every process"):
            torchacc.full_state_dict(model) if RANK else model.head.weight.norm().item()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class WithAnothersWeight(MLP):
    """Gives the weight of a layer to a function of its own, outside of that layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Product.apply(x, self.layers[0][0].weight))


@case()
def function_of_the_scripts_own_uses_the_weight_of_another_unit_or_is_refused() -> None:
    model, plain = sharded_and_plain(WithAnothersWeight)
    if ENGINE == MULTIPROCESS:
        with pytest.raises(torchacc.EngineError, match=r"invalid gradient at index 1.*Call the function inside of"):
            loss_of(model(part(X))).backward()
        return
    check_training(model, plain)


@case()
def safetensors_refuses_what_is_sharded() -> None:
    from safetensors.torch import save, save_file

    model = accelerate(MLP())
    with tempfile.TemporaryDirectory() as folder:
        for write in (save, lambda state: save_file(state, Path(folder) / "model.safetensors")):
            with pytest.raises(torchacc.CheckpointError, match=r"is sharded: torchacc.checkpoint.save\(folder"):
                write(model.state_dict())
            write(torchacc.full_state_dict(model))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, packed: nn.utils.rnn.PackedSequence) -> torch.Tensor:
        return self.head(self.layer(packed)[1][0])


@case()
def packed_sequence_given_to_a_model_runs_or_is_refused() -> None:
    lengths = torch.tensor([3, 2] if ENGINE != SPMD else [3, 2, 2, 1])
    model, plain = sharded_and_plain(Recurrent)
    x = part(X)
    packed, own = (
        nn.utils.rnn.pack_padded_sequence(rows[:, None].repeat(1, 3, 1), lengths, batch_first=True)
        for rows in (x, x.cpu())
    )
    if ENGINE == NATIVE:
        torch.testing.assert_close(model(packed).cpu(), plain(own))
        return
    with pytest.raises(torchacc.EngineError, match="a recurrent layer over a packed sequence does not run on XLA"):
        model(packed)


class Hiding(nn.Module):
    """Returns its output in an object that PyTorch's pytree does not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(X.shape[1], 3)

    def forward(self, x: torch.Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.head(x))


@case([NATIVE])
def output_in_which_fsdp2_finds_no_tensor_is_refused() -> None:
    model = accelerate(Hiding())
    with torch.no_grad():
        assert model(part(X)).logits.isfinite().all()
    with pytest.raises(torchacc.EngineError, match="returns a Categorical, in which FSDP2 does not find the tensors"):
        model(part(X))
