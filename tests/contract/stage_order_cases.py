"""What a script does around the forwards and backwards of a model in stages: in any order, or refused."""

import functools
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from casekit import (
    ADAM,
    ADAM_ABSOLUTE,
    NATIVE,
    RANK,
    RELATIVE,
    case,
    check_parameters,
)
from pipeline_cases import SCHEDULES, compare, config, make
from sequence_cases import VOCAB, padded, plain
from tensor_parallel_cases import put
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchacc
from torchacc.engines.native import split_backward


@case([NATIVE])
def weights_get_their_gradients_after_a_backward_that_is_split() -> None:
    model, is_early = make("gpt2"), []
    torchacc.accelerate(model, None, config(2, microbatches=4, schedule="zero_bubble"))

    def note(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        is_early.append(torch._C._current_graph_task_id() != -1)
        add(parameter, gradient)

    add = split_backward._add
    with mock.patch.object(split_backward, "_add", note):
        model(**plain()).loss.backward()
    own_layers = len(model._torchacc.plan.pipeline.layers_of(RANK))
    # A weight and a bias of four linear layers; of one row a microbatch; the head has no bias.
    assert is_early == [False] * len(plain()["labels"]) * (8 * own_layers + RANK)


@case([NATIVE])
def split_backwards_leave_changed_layers_as_they_are() -> None:
    def scaled(module: nn.Linear, given: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(given, module.weight * 1.5, module.bias)

    class Halved(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            return made / 2 if function is nn.functional.linear else made

    how = {"pp": 2, "microbatches": 4, "schedule": "zero_bubble"}
    with mock.patch.object(nn.Linear, "forward", scaled):
        compare(make(), [plain()], **how)
    with Halved():
        compare(make(), [plain()], **how)


@case([NATIVE])
def what_a_script_draws_and_writes_into_a_model_in_stages_is_what_it_writes_into_a_full_one() -> None:
    model, unsharded = make("gpt2"), make("gpt2")
    torchacc.accelerate(model, None, config(2))
    unsharded.to(model.device)  # each kind of device has random numbers of its own
    for each in (model, unsharded):
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in each.parameters():
                nn.init.normal_(parameter, std=0.02)
                parameter.add_(torch.randn_like(parameter))
                parameter[1:3] = 2 * parameter[1:3] if each is unsharded or parameter.to_local().numel() else 0.0
            each.get_input_embeddings().weight[5] = 0.01
    check_parameters(model, unsharded, absolute=0.0)


@case([NATIVE], each={each: each for each in SCHEDULES})
def hooks_that_change_what_layers_get_and_return_run_once(schedule: str) -> None:
    model = make(layers=4)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.25, *args[1:]))
        layer.register_forward_hook(lambda module, args, output: output * 0.75)
    compare(model, [plain()], pp=2, microbatches=2, schedule=schedule)


@case([NATIVE])
def a_gradient_that_a_hook_changes_before_a_weight_needs_it_is_refused() -> None:
    model = make()
    torchacc.accelerate(model, None, config(2, microbatches=4, schedule="zero_bubble"))
    layer = model.model.layers[2 * RANK].mlp.up_proj

    def change(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept: list[torch.Tensor] = []
        output.register_hook(kept.append)
        args[0].register_hook(lambda gradient: kept[0].mul_(2)[:0].sum() * 0 + gradient)

    layer.register_forward_hook(change)
    with pytest.raises(torchacc.EngineError, match="a hook has written to a gradient"):
        model(**plain()).loss.backward()


@case([NATIVE])
def split_backwards_sum_in_the_dtype_of_the_reduction() -> None:
    gradients = []
    for schedule in ("1f1b", "zero_bubble"):
        model = make("llama")
        torchacc.accelerate(model, None, config(2, microbatches=4, schedule=schedule, compute={"bf16": True}))
        model(**plain()).loss.backward()
        gradients.append([parameter.grad.to_local() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)


class Saved:
    """What a graph has saved, whose size is noted when it is saved and when it goes."""

    def __init__(self, sizes: list[int], tensor: torch.Tensor) -> None:
        self.tensor = tensor
        sizes.append(tensor.nbytes)
        weakref.finalize(self, sizes.append, -tensor.nbytes)


@case([NATIVE])
def a_stage_with_backwards_between_forwards_holds_activations_of_few_microbatches() -> None:
    held = {}
    for schedule in ("gpipe", "1f1b"):
        model = make("gpt2")
        torchacc.accelerate(model, None, config(2, microbatches=8, schedule=schedule))
        batch, sizes = {name: value.repeat(4, 1) for name, value in plain().items()}, [0]
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(Saved, sizes), lambda saved: saved.tensor):
            model(**batch).loss.backward()
        held[schedule] = max(itertools.accumulate(sizes))
        assert sum(sizes) == 0
    assert held["1f1b"] < 0.4 * held["gpipe"], held


@case([NATIVE], each={each: each for each in SCHEDULES})
def what_a_script_does_to_the_loss_of_stages_reaches_all_gradients(schedule: str) -> None:
    model, plain_model = make("gpt2"), make("gpt2")
    torchacc.accelerate(model, None, config(2, schedule=schedule))
    batch = padded(left=False)
    for each in (model, plain_model):
        each(**batch)  # without a backward: nothing is left of it
        decay = 1e-3 * sum(parameter.square().sum() for parameter in each.parameters())
        (decay + each(**batch).loss * 3 + each(**plain()).loss.square()).backward()
    assert float(penalty(model)) == pytest.approx(float(penalty(plain_model)), rel=RELATIVE)
    norm, expected = (nn.utils.clip_grad_norm_(each.parameters(), 1e9) for each in (model, plain_model))
    assert float(norm) == pytest.approx(float(expected), rel=RELATIVE)
    for order in (1.0, float("inf")):
        norm, expected = (nn.utils.clip_grad_norm_(each.parameters(), 1e9, order) for each in (model, plain_model))
        assert float(norm) == pytest.approx(float(expected), rel=RELATIVE)


def penalty(model: nn.Module) -> Any:
    return 1e-2 * sum(parameter.square().sum() for parameter in model.parameters())


def in_a_window(model: nn.Module) -> None:
    with torchacc.accumulate(model) if hasattr(model, "_torchacc") else nullcontext():
        before = penalty(model)  # whose gradient comes last
        (before + model(**plain()).loss).backward()
    model(**plain()).loss.backward()


def between_forwards(model: nn.Module) -> None:
    first, between = model(**padded(left=False)).loss, penalty(model)
    (first + between + model(**plain()).loss).backward()


def before_two_backwards(model: nn.Module) -> None:
    first, second = model(**padded(left=False)).loss, model(**plain()).loss
    with torch.no_grad():
        model(**plain())
    first.backward()
    second.backward()


def twice(model: nn.Module) -> None:
    loss = model(**plain()).loss
    loss.backward(retain_graph=True)
    loss.backward()


class InterruptionError(Exception):
    """What a script's hook raises."""


def interrupted(model: nn.Module) -> None:
    """Raise on both stages, where neither waits for the other, with a hidden state on its way that nobody receives."""
    calls: list[None] = []
    sharded = getattr(model, "_torchacc", None)
    number = (
        1
        if sharded is None
        else 2
        if RANK
        else {"gpipe": 4, "1f1b": 3, "zero_bubble": 3}[sharded.plan.pipeline.schedule]
    )

    def interrupt(*unused: Any) -> None:
        calls.append(None)
        if len(calls) == number:
            raise InterruptionError

    hook = model.get_submodule("transformer").register_forward_pre_hook(interrupt)
    with pytest.raises(InterruptionError):
        model(**padded(left=False))
    hook.remove()
    model(**plain()).loss.backward()


ORDERS = (in_a_window, between_forwards, before_two_backwards, twice, interrupted)


@case(
    [NATIVE],
    each={f"{order.__name__}-{schedule}": (order, schedule) for order in ORDERS for schedule in SCHEDULES},
    # Each schedule has some of the orders, and each order a schedule.
    left_out={
        f"{order.__name__}-{schedule}"
        for index, order in enumerate(ORDERS)
        for schedule in SCHEDULES
        if order is not between_forwards and schedule != SCHEDULES[index % len(SCHEDULES)]
    },
)
def stages_compute_the_gradients_of(how: tuple[Callable[[nn.Module], None], str]) -> None:
    run, schedule = how
    models = [make("gpt2"), make("gpt2")]
    torchacc.accelerate(models[0], None, config(2, schedule=schedule))
    norms = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        run(model)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    assert norms[0] == pytest.approx(norms[1], rel=RELATIVE)
    check_parameters(models[0], models[1], absolute=ADAM_ABSOLUTE)


@case([NATIVE])
def norms_of_stages_are_of_all_of_them_or_refused() -> None:
    model, plain_model = make("gpt2"), make("gpt2")
    torchacc.accelerate(model, None, config(2))
    for each in (model, plain_model):
        each(**padded(left=False)).loss.backward()
    for order in (1.0, 2.0, float("inf")):
        for choose in (lambda each: each.grad, lambda each: each):
            own, expected = ([choose(each) for each in of.parameters()] for of in (model, plain_model))
            norm, expected_norm = nn.utils.get_total_norm(own, order), nn.utils.get_total_norm(expected, order)
            assert float(norm) == pytest.approx(float(expected_norm), rel=RELATIVE)
    parameters = list(model.parameters())
    for read in (
        lambda: sum(each.grad.norm() ** 2 for each in parameters),
        lambda: [each.grad.isfinite().all() for each in parameters],
        lambda: [each.norm() for each in parameters],
        lambda: torch._foreach_norm([each.grad for each in parameters]),
        lambda: nn.utils.get_total_norm([each.grad.detach() for each in parameters]),
        lambda: nn.utils.parameters_to_vector(parameters),
    ):
        with pytest.raises(torchacc.EngineError, match="of another stage"):
            read()
    with pytest.raises(torchacc.EngineError, match=r"sum\(\) along dimensions of parameters of a model in stages"):
        parameters[0].square().sum(0)


@case([NATIVE])
def sums_of_what_stages_hold_are_of_all_of_them() -> None:
    model, plain_model = make("gpt2"), make("gpt2")
    torchacc.accelerate(model, None, config(2))
    sums: list[list[float]] = []
    for each in (model, plain_model):
        each.get_submodule("transformer.wte").requires_grad_(False)
        each.get_submodule("transformer.h.0.mlp").requires_grad_(False)
        weights = list(each.parameters())
        (each(**padded(left=False)).loss + 1e-2 * sum(weight.square().sum() for weight in weights)).backward()
        found = [weight.grad.pow(2).sum() for weight in weights if weight.grad is not None]
        with torch.no_grad():
            found += [weight.sum() for weight in weights]
        sums.append([float(each) for each in found])
    assert len(sums[0]) == len(sums[1])
    assert sums[0] == pytest.approx(sums[1], rel=RELATIVE, abs=1e-6)


@case([NATIVE])
def what_backwards_between_forwards_cannot_do_is_refused() -> None:
    model, batch = make("gpt2"), plain()
    torchacc.accelerate(model, None, config(2, schedule="1f1b"))
    weight = model.lm_head.weight
    for call, expected in (
        (lambda: (model(**batch).loss * (RANK + 1)).backward(), "scale the loss differently"),
        (lambda: model(**batch).loss.backward(create_graph=True), "create_graph"),
        (lambda: torch.autograd.grad(model(**batch).loss, [weight]), "backward"),
        (lambda: checkpoint(lambda: model(**batch).loss, use_reentrant=False).backward(), "torch.utils.checkpoint"),
    ):
        with pytest.raises(torchacc.EngineError, match=expected):
            call()
        model.zero_grad()
    for parameter in model.parameters():  # of every stage, on every stage
        with pytest.raises(torchacc.EngineError, match=r"read parameter.grad after loss.backward\(\)"):
            parameter.register_hook(lambda gradient: None)
    for parameter in model.parameters():
        hook = parameter.register_post_accumulate_grad_hook(lambda parameter: None)
        break
    with pytest.raises(torchacc.EngineError, match="register_post_accumulate_grad_hook"):
        model(**batch)
    hook.remove()
    loss, bias = model(**batch).loss, model.get_parameter("transformer.ln_f.bias")
    bias.requires_grad_(False)
    loss.backward()
    assert bias.grad is None


@case([NATIVE])
def hooks_see_gradients_of_all_stages_once_in_each_backward() -> None:
    model, batch = make("gpt2"), plain()
    torchacc.accelerate(model, None, config(2))
    frozen, shared = model.get_parameter("transformer.ln_f.bias"), model.get_input_embeddings().weight
    seen: list[nn.Parameter] = []
    watched = [parameter for parameter in model.parameters() if parameter is not shared]
    for parameter in watched:
        parameter.register_post_accumulate_grad_hook(seen.append)
    frozen.requires_grad_(False)
    for _ in range(2):
        seen.clear()
        model(**batch).loss.backward()
        assert sorted(map(id, seen)) == sorted(id(each) for each in watched if each is not frozen)
        assert all(each.grad is not None for each in seen)


@case([NATIVE])
def what_stages_cannot_run_again_or_too_early_is_refused() -> None:
    model, batch = make("gpt2"), plain()
    torchacc.accelerate(model, None, config(2))
    hook = model.get_input_embeddings().weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(torchacc.EngineError, match="first and the last stage share"):
        model(**batch)
    hook.remove()
    with pytest.raises(torchacc.EngineError, match=r"torch\.utils\.checkpoint"):
        checkpoint(lambda: model(**batch).loss, use_reentrant=False)
    loss = model(**batch).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def unscale(model: nn.Module) -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)


@case([NATIVE])
def what_stages_cannot_do_is_refused() -> None:
    for options, expected in (
        ({"compute": {"fp16": True}}, "compute.fp16"),
        ({"fsdp": {"cpu_offload": True}}, "cpu_offload"),
        ({"schedule": "zero_bubble", "compute": {"compile": True}}, "compute.compile = True is not available"),
        ({"memory": {"offload_activations": True}}, "offload_activations"),
        ({"memory": {"gc": True, "gc_cls": ["GPT2Model"]}}, "which is not a layer"),
    ):
        with pytest.raises(torchacc.ConfigError, match=expected):
            torchacc.accelerate(make("gpt2"), None, config(2, **options))
    mine = type("MineForCausalLM", (transformers.LlamaForCausalLM,), {"forward": lambda self, ids: self.model(ids)})
    odd, own_loss, shared = make(), make(), make()
    odd.model.layers[0].mlp = type("Odd", (nn.Linear,), {"__module__": "odd"})(32, 32)
    own_loss.loss_function = lambda logits, labels, **kwargs: logits.mean()
    shared.model.layers[0].mlp = shared.model.layers[2].mlp
    encoder = transformers.BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=VOCAB)
    for model, expected in (
        (nn.Sequential(make()), "not a model of transformers|no list of layers"),
        (transformers.BertForMaskedLM(encoder), "'bert'"),
        (transformers.LlamaForSequenceClassification(make().config), "each next token"),
        (mine(make().config), "the script's own"),
        (odd, "Odd of odd"),
        (own_loss, "loss_function"),
        (shared, "one parameter, which several stages"),
        (make(layers=1), "choose at most 1 stages"),
    ):
        with pytest.raises(torchacc.ConfigError, match=expected):
            torchacc.accelerate(model, None, config(2))
    model, batch = make("gpt2"), plain()
    torchacc.accelerate(model, None, config(2))
    ids = batch["input_ids"]
    with pytest.raises(torchacc.DataError, match="different inputs"):
        model(input_ids=ids.roll(RANK, 0), labels=ids)
    for call, expected in (
        (lambda: model(ids), "without labels that records gradients"),
        (lambda: model(**batch, past_key_values=transformers.DynamicCache()), "'past_key_values'"),
        (lambda: model(inputs_embeds=torch.ones(4, 8, 32), labels=ids), "without input_ids"),
        (lambda: model(**batch, output_hidden_states=True), "'output_hidden_states'"),
        (lambda: model(**batch, more=1), "'more'"),
        (lambda: model.transformer(put(ids)), "called by itself"),
        (lambda: model(**batch).logits.argmax(-1), "on the last stage only"),
        (lambda: torch.autograd.grad(model(**batch).loss, [model.transformer.wpe.weight]), "backward"),
        (lambda: model(**batch).loss.backward(inputs=[model.transformer.wpe.weight]), "backward"),
        (lambda: model(**batch).loss.backward(create_graph=True), "create_graph"),
        (lambda: unscale(model), "a GradScaler"),
        (lambda: model.generate(ids, max_new_tokens=2), "To generate, load a checkpoint"),
        (lambda: model.clip_grad_norm_(1.0, 0.0), "orders above 0"),
    ):
        model(**batch).loss.backward()
        with pytest.raises((torchacc.EngineError, torchacc.ConfigError), match=expected):
            call()
        model.zero_grad()
    for form in (torchacc.StateDictType.SHARDED_STATE_DICT, torchacc.StateDictType.LOCAL_STATE_DICT):
        with pytest.raises(torchacc.CheckpointError, match=r"torchacc\.checkpoint\.save"):
            torchacc.state_dict(model, form)
    whole = torch.optim.LBFGS(model.parameters())
    model(**batch).loss.backward()
    with pytest.raises(torchacc.ConfigError, match="element-wise optimizer"):
        whole.step(lambda: 0.0)


@case([NATIVE])
def weights_that_change_before_an_early_backward_counts_are_refused() -> None:
    model = torchacc.accelerate(make("gpt2"), None, config(2, schedule="1f1b"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(**plain()).loss.backward()
    loss = model(**plain()).loss
    optimizer.step()
    with pytest.raises(torchacc.EngineError, match="weights have changed between a forward and its backward"):
        loss.backward()
    model(**plain()).loss.backward()
