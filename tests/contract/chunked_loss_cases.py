"""Cases about `compute.chunked_loss`: the loss and gradients of the unsharded model with all of its logits."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from casekit import ENGINE, NATIVE, SPMD, case, check_equal, check_gradients, check_parameters, part, sgd
from casekit import sharded_and_plain as make_both
from torch import nn

import torchacc
from torchacc.engines import registry
from torchacc.engines.sharded_model import sharded_model

TOKENS = 9
"""Of a chunk: 2 rows of 12 tokens on a device make three, the last one smaller."""
VOCABULARY = 37
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_implementation": "eager",
    "use_cache": False,
}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": 16}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**_SMALL, **_GPT2)),
    "untied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL)),
    "soft-cap": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**_SMALL, final_logit_softcapping=2.0, query_pre_attn_scalar=8)
    ),
    "masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_SMALL, **_BERT)),
}


def batch(seed: int = 3) -> dict[str, torch.Tensor]:
    """Return 4 rows, of which those of each device have as many labels that do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (4, 12), generator=generator)
    labels = ids.clone()
    labels[::2, 4:7] = -100
    return {"input_ids": ids, "labels": labels}


def mine(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: part(tensor) for name, tensor in whole.items()}


def both(
    make: Callable[[], nn.Module] = MODELS["untied"], tokens: bool | int = TOKENS, **options: Any
) -> tuple[nn.Module, nn.Module]:
    compute = {"chunked_loss": tokens, **options.pop("compute", {})}
    return make_both(make, compute=compute, **options)


def check_loss(model: nn.Module, plain: nn.Module, **more: Any) -> None:
    """Check the loss and the gradients of a batch."""
    output, expected = model(**mine(batch()), **more), plain(**batch(), **more)
    output.loss.backward()
    expected.loss.backward()
    check_gradients(model, plain)
    check_equal(output.loss.detach().cpu(), expected.loss.detach(), "loss")


def check_steps(model: nn.Module, plain: nn.Module) -> None:
    """Check two steps, and that there are logits without labels."""
    optimizers = sgd(model), sgd(plain)
    for seed in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, expected = model(**mine(batch(seed))).loss, plain(**batch(seed)).loss
        loss.backward()
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
        check_equal(loss.detach().cpu(), expected.detach(), "loss")
    check_parameters(model, plain)
    ids = batch()["input_ids"]
    with torch.no_grad():
        check_equal(model(part(ids)).logits.cpu(), part_of_plain(plain(ids).logits), "logits", 1e-5)


def part_of_plain(tensor: torch.Tensor) -> torch.Tensor:
    return part(tensor).cpu()


@case(each=MODELS)
def chunked_loss_is_that_of_all_logits(make: Callable[[], nn.Module]) -> None:
    check_loss(*both(make))


@case()
def chunked_loss_trains() -> None:
    check_steps(*both(MODELS["tied"]))


@case(each={"recompute": {"memory": {"gc": True}}, "head-named-as-a-unit": {"min_num_params": 300}})
def chunked_loss_goes_with(options: dict[str, Any]) -> None:
    check_steps(*both(**options))


@case([NATIVE], each={"tied": MODELS["tied"], "untied": MODELS["untied"]}, left_out=("untied",))
def chunked_loss_goes_with_compiled_layers(make: Callable[[], nn.Module]) -> None:
    before = torchacc.compile_report().graphs
    check_steps(*both(make, compute={"compile": True, "compile_backend": "aot_eager"}, memory={"gc": True}))
    assert torchacc.compile_report().graphs > before


@case([NATIVE])
def chunked_loss_of_a_model_that_is_compiled_as_a_whole_is_refused() -> None:
    options = {"compute": {"compile": True, "compile_backend": "aot_eager"}, "min_num_params": 10**8}
    with pytest.raises(torchacc.ConfigError, match="the model has no units but itself"):
        both(**options)


@case()
def chunked_loss_takes_the_number_of_items_of_a_window() -> None:
    model, plain = both(tokens=True)
    windows = [batch(seed) for seed in range(2)]
    count = sum(int((whole["labels"][:, 1:] != -100).sum()) for whole in windows)
    devices = 1 if ENGINE == SPMD else 2
    for place, whole in enumerate(windows):
        with torchacc.accumulate(model) if place == 0 else contextlib.nullcontext():
            model(**mine(whole), num_items_in_batch=torch.tensor(count / devices)).loss.backward()
        plain(**whole, num_items_in_batch=torch.tensor(count)).loss.backward()
    check_gradients(model, plain)


@case()
def chunked_loss_without_gradients() -> None:
    model, plain = both(MODELS["tied"])
    with torch.no_grad():
        output = model(**mine(batch()))
        check_equal(output.loss.cpu(), plain(**batch()).loss, "loss")
    with pytest.raises(torchacc.ConfigError, match="which were never there as a whole"):
        output.logits.argmax(-1)
    model.eval()
    check_loss(model, plain.eval())


@case(each={"weight": "lm_head.weight", "layer": "model.layers.0.mlp.up_proj.weight"})
def chunked_loss_where_only_one_is_trained(name: str) -> None:
    def make() -> nn.Module:
        model = MODELS["untied"]()
        for each, parameter in model.named_parameters():
            parameter.requires_grad = each == name
        return model

    check_loss(*both(make))


@case()
def chunked_loss_in_bfloat16_is_near() -> None:
    model, plain = both(compute={"bf16": True})
    expected = plain(**batch()).loss
    loss = model(**mine(batch())).loss
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    found = torchacc.full_state_dict(model)
    assert found["lm_head.weight"].dtype == torch.float32
    optimizer = sgd(model)
    optimizer.step()
    change = (torchacc.full_state_dict(model)["lm_head.weight"] - found["lm_head.weight"]) / -0.1
    torch.testing.assert_close(change, plain.lm_head.weight.grad, rtol=0.05, atol=2e-3)


class OwnLoss(transformers.LlamaForCausalLM):
    """Has a loss of its own."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        return hidden.square().mean() if labels is not None else self.lm_head(hidden)


@case()
def chunked_loss_of_another_kind_is_refused() -> None:
    config = transformers.LlamaConfig(**_SMALL)
    model, _ = make_both(lambda: OwnLoss(config), compute={"chunked_loss": True})
    with pytest.raises(torchacc.ConfigError, match="computes no cross entropy of what its head 'lm_head' returns"):
        model(**mine(batch()))
    with pytest.raises(torchacc.ConfigError, match="was called in training without labels"):
        model(part(batch()["input_ids"]))


@case([NATIVE, SPMD])
def chunked_loss_of_a_head_that_is_split_over_tp() -> None:
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_SMALL, "vocab_size": VOCABULARY + 1}))
    plain = copy.deepcopy(model)
    dist = {"tp": {"size": 2}, "fsdp": {"size": 1, "use_spmd": ENGINE == SPMD}}
    config = {"backend": ENGINE.partition("-")[0], "compute": {"chunked_loss": TOKENS}, "dist": dist}
    torchacc.accelerate(model, None, torchacc.Config.from_dict(config))
    assert "lm_head.weight" in sharded_model(model).plan.tensor_parallel.specs
    loss, expected = model(**registry.active_engine().to_device(batch())).loss, plain(**batch()).loss
    loss.backward()
    expected.backward()
    check_gradients(model, plain)
    check_equal(loss.detach().cpu(), expected.detach(), "loss")


@case([NATIVE])
def chunked_loss_reduces_the_gradient_of_the_head_once() -> None:
    model, _ = both()
    reductions = 0
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    original = group.foreach_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal reductions
        reductions += 1
        return original(*args, **kwargs)

    group.foreach_reduce = counted
    try:
        model(**mine(batch())).loss.backward()
    finally:
        group.foreach_reduce = original
    assert reductions == 2  # a layer, and the model itself
