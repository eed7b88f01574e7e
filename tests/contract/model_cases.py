"""Models of other kinds, and what is changed in a model, and in other libraries, for XLA."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from casekit import (
    MLP,
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
    check_still_trains,
    check_training,
    loss_of,
    part,
    plain_value,
    sharded_and_plain,
    whole_gradient,
)
from torch import nn

import torchacc
from torchacc.engines import registry


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
    with torch.backends.cudnn.flags(enabled=False):  # whose gradients on a GPU are off by 6e-4, in IEEE float32 too
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


@case([NATIVE])
def backward_inside_of_a_scripts_autocast_has_the_gradients_of_the_forward() -> None:
    model, plain = sharded_and_plain()
    with torch.autocast(registry.active_engine().device.type, dtype=torch.bfloat16):
        loss_of(model(part(X))).backward()
    loss_of(plain(X)).backward()
    check_gradients(model, plain)


def make_gpt2(layers: int = 1) -> nn.Module:
    """Return a GPT-2 whose loss depends much on where it attends to, and which looks for packed documents."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": layers, "n_head": 2}
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
def masks_of_packed_documents_are_the_same_where_layers_are_computed_again() -> None:
    check_gradients_of_packed_documents(memory={"gc": True})


@case([SPMD])
def masks_of_packed_documents_are_the_same_in_a_loop_of_layers() -> None:
    check_gradients_of_packed_documents(compute={"scan_layers": True})


def check_gradients_of_packed_documents(**how: Any) -> None:
    model, plain = sharded_and_plain(lambda: make_gpt2(layers=2), wrap_layer_cls="GPT2Block", **how)
    batch = {"input_ids": TOKENS, "labels": TOKENS, **MASKS["packed-documents"]}
    model(**{name: part(tensor) for name, tensor in batch.items()}).loss.backward()
    plain(**batch).loss.backward()
    check_gradients(model, plain)


@case(XLA)
def patches_end_with_the_forward() -> None:
    from transformers import masking_utils

    def whole() -> dict[str, Any]:
        return {**vars(masking_utils), "masks": dict(masking_utils.AttentionMaskInterface._global_mapping)}

    before = whole()
    model, _ = sharded_and_plain(make_gpt2)
    was_patched = []

    def look(module: nn.Module, args: Any) -> None:
        was_patched.append(whole() != before)
        if len(was_patched) == 2:
            raise KeyError("on purpose")

    model.lm_head.register_forward_pre_hook(look)
    model(input_ids=part(TOKENS))
    assert whole() == before
    with pytest.raises(KeyError):
        model(input_ids=part(TOKENS))
    assert whole() == before
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
