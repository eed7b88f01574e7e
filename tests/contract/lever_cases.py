"""Cases about precision, offload and prefetch."""

import logging
from typing import Any

import pytest
import torch
from casekit import (
    ADAM_ABSOLUTE,
    MLP,
    MULTIPROCESS,
    NATIVE,
    RANK,
    X,
    adamw,
    by_rank,
    case,
    check_equal,
    check_gradients,
    check_parameters,
    check_training,
    loss_of,
    part,
    plain_value,
    sgd,
    sharded_and_plain,
    step,
)
from torch import nn

import torchacc
from tests.logged import heard
from torchacc.engines.native.activation_offload import SaveActivationsOnHost

FP16 = {"fp16": True}
SCALE = 2.0**10

# Precision


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return what this process holds of the gradients, to be changed in place."""
    return [parameter.grad.to_local() for parameter in model.parameters()]


@case([NATIVE])
def infinity_on_one_rank_skips_the_step_on_all() -> None:
    model, _ = sharded_and_plain(compute=FP16)
    optimizer, scaler = sgd(model), torchacc.GradScaler(model, init_scale=SCALE)
    before = torchacc.full_state_dict(model)
    for infinite_on in (1, 0, None):
        optimizer.zero_grad()
        scaler.scale(loss_of(model(part(X)))).backward()
        if infinite_on == RANK:
            local_gradients(model)[0].view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        after = torchacc.full_state_dict(model)
        unchanged = all(torch.equal(after[name], before[name]) for name in before)
        assert unchanged == (infinite_on is not None)
    assert by_rank(scaler.get_scale()) == [SCALE / 4] * 2


@case([NATIVE], each={"unscaled": 1.0, "scaled": SCALE})
def clipping_after_unscaling(scale: float) -> None:
    model, plain = sharded_and_plain(compute=FP16)
    optimizer, scaler = sgd(model), torchacc.GradScaler(model, init_scale=scale)
    scaler.scale(loss_of(model(part(X)))).backward()
    scaler.unscale_(optimizer)
    norm = model.clip_grad_norm_(0.01)
    loss_of(plain(X)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert plain_value(norm).item() == pytest.approx(expected.item(), rel=2e-3)
    clipped = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert plain_value(clipped).item() == pytest.approx(0.01, rel=1e-3)


@case([NATIVE], each={"with-a-scaler": True, "without": False})
def float16_asks_for_a_scaler(has_scaler: bool) -> None:
    with heard(logging.WARNING) as warned:
        model, _ = sharded_and_plain(compute=FP16)
        if has_scaler:
            torchacc.GradScaler(model)
        optimizer = sgd(model)
        for _ in range(2):
            step(model, part(X), optimizer)
    assert ["GradScaler" in line for line in warned] == [True] * (not has_scaler)


@case()
def scaler_does_nothing_in_float32() -> None:
    model, plain = sharded_and_plain()
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    scaler = torchacc.GradScaler(model)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model(part(X)))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        step(plain, X, plain_optimizer)
    assert not scaler.is_enabled()
    check_parameters(model, plain)


def is_bfloat16(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor, tensor.bfloat16().float())


@case([NATIVE, MULTIPROCESS], each={"float32": "float32", "bfloat16": "bfloat16"})
def gradients_are_summed_in(dtype: str) -> None:
    model, plain = sharded_and_plain(compute={"reduce_dtype": dtype})
    loss_of(model(part(X))).backward()
    loss_of(plain(X)).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        mine = parameter.grad.to_local().cpu()
        assert mine.dtype == torch.float32
        assert is_bfloat16(mine) == (dtype == "bfloat16"), name
        rows = expected[name].grad.tensor_split(2)[RANK]  # all have an even number of them
        torch.testing.assert_close(mine, rows, rtol=1e-2, atol=1e-3)


@case([NATIVE, MULTIPROCESS])  # under SPMD a gradient is rounded to the dtype of its product
def products_in_bfloat16_are_summed_in_float32() -> None:
    model, _ = sharded_and_plain(compute={"bf16": True})
    loss_of(model(part(X))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.dim() == 1 or not is_bfloat16(plain_value(parameter.grad)), name


class Turned(nn.Module):
    """Attention whose queries and keys are multiplied by positions, which are float32, and whose values are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.layer(x).unflatten(-1, (3, 2, 4)).unbind(-3)
        turn = torch.ones(4, device=x.device)
        return nn.functional.scaled_dot_product_attention(query * turn, key * turn, value).flatten(-2)


@case()
def attention_takes_queries_that_positions_made_float32() -> None:
    model, plain = sharded_and_plain(Turned, compute={"bf16": True})
    x = X.unflatten(0, (4, 1))
    loss_of(model(part(x))).backward()
    loss_of(plain(x)).backward()
    norms = [nn.utils.clip_grad_norm_(plain.parameters(), 1e6), plain_value(model.clip_grad_norm_(1e6))]
    assert norms[1].item() == pytest.approx(norms[0].item(), rel=2e-2)


@case([NATIVE, MULTIPROCESS])
def micro_batches_add_up_in_the_dtype_of_sums() -> None:
    """Many small gradients after a large one: each of them would be lost beside it in bfloat16."""
    model, plain = sharded_and_plain(compute={"bf16": True})
    num_small, small = 32, 2.0**-9
    with torchacc.accumulate(model):
        for share in (1.0, *[small] * (num_small - 1)):
            (share * loss_of(model(part(X)))).backward()
    (small * loss_of(model(part(X)))).backward()
    ((1 + num_small * small) * loss_of(plain(X))).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e6)
    assert plain_value(model.clip_grad_norm_(1e6)).item() == pytest.approx(expected.item(), rel=1e-2)


@case()
def masters_in_bfloat16_take_states_of_float32() -> None:
    class WithBuffer(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(8, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.shift)

    model, plain = sharded_and_plain(WithBuffer, compute={"bf16": True, "master_dtype": "bfloat16"})
    optimizer = adamw(model)
    step(model, part(X), optimizer)
    state = {name: value.float() for name, value in torchacc.full_state_dict(model).items()}
    model.load_state_dict(plain.state_dict())
    check_dtypes(model, optimizer)
    for name, value in torchacc.full_state_dict(model).items():
        check_equal(value, plain.state_dict()[name].to(value.dtype), name)
    model.load_state_dict(state)
    optimizer.load_state_dict(torchacc.optim_state_dict(model, optimizer))
    step(model, part(X), optimizer)
    check_dtypes(model, optimizer)


def check_dtypes(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert {moment.dtype for moment in moments} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()} == {torch.float32}


@case([NATIVE], each={"bfloat16": {"bf16": True}, "float16": FP16})
def batchnorm_in_low_precision(compute: dict[str, bool]) -> None:
    class Normalized(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.layers[0].append(nn.BatchNorm1d(8))

    x = X[:2].repeat(2, 1)  # each device's mean is that of the whole batch
    model, plain = sharded_and_plain(Normalized, compute=compute)
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    for _ in range(2):
        step(model, part(x), optimizer)
        step(plain, x, plain_optimizer)
    found, expected = torchacc.full_state_dict(model), plain.state_dict()
    for name in expected.keys() - {"layers.0.2.running_var"}:  # it depends on how many rows there are
        torch.testing.assert_close(found[name], expected[name], rtol=1e-2, atol=1e-2)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


# Offload


@case([NATIVE])
def shards_on_the_host_train_with_an_optimizer_that_has_state() -> None:
    model, plain = sharded_and_plain(cpu_offload=True)
    check_training(model, plain, adamw, ADAM_ABSOLUTE)
    assert {parameter.to_local().device.type for parameter in model.parameters()} == {"cpu"}


@case([NATIVE])
def activations_go_to_the_host_and_whole_weights_do_not() -> None:
    model, plain = sharded_and_plain()
    context, moved, kept = SaveActivationsOnHost(), set(), set()
    pack = context.pack_hook

    def noting_pack(tensor: torch.Tensor) -> Any:
        packed = pack(tensor)
        (kept if packed is tensor else moved).add(tuple(tensor.shape))
        return packed

    context.pack_hook = noting_pack
    with context:
        output = model(part(X))
    loss_of(output).backward()
    loss_of(plain(X)).backward()
    check_gradients(model, plain)
    assert moved == {(2, 8)}
    assert kept == {(8, 8), (8, 4)}  # as a linear layer saves them, transposed


# Prefetch: what starts in which order; F, B and G are the forward, the backward and the gather of the model or a layer

EVENTS = {"FSDP::pre_forward": "F", "FSDP::pre_backward": "B", "FSDP::all_gather": "G"}
ORDERS: dict[str, tuple[dict[str, Any], str]] = {
    "default": ({}, "F G F0 G0 F1 G1 B G1 B1 G0 B0"),
    "forward": ({"forward_prefetch": True}, "F G G0 F0 G1 F1 B G1 B1 G0 B0"),
    "none": ({"backward_prefetch": "NONE"}, "F G F0 G0 F1 G1 B B1 G1 B0 G0"),
}


@case([NATIVE], each=ORDERS)
def units_are_gathered_in_order(given: tuple[dict[str, Any], str]) -> None:
    options, expected = given
    model, plain = sharded_and_plain(**options)
    check_training(model, plain)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        loss_of(model(part(X))).backward()
    seen = []
    for event in sorted(profiled.events(), key=lambda event: event.time_range.start):
        label, _, unit = event.name.partition(" ")
        if label in EVENTS:
            seen.append(EVENTS[label] + unit.removeprefix("(layers.").removesuffix(")"))
    assert " ".join(seen) == expected
