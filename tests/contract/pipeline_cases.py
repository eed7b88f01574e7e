"""Layers in stages over two and four devices, beside the unsharded model on the whole batch."""

import copy
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tensor_parallel_cases
import torch
import transformers
from casekit import (
    ADAM,
    ADAM_ABSOLUTE,
    ENGINE,
    NATIVE,
    NUM_DEVICES,
    RANK,
    RELATIVE,
    SPMD,
    case,
    check_parameters,
)
from sequence_cases import VOCAB, Batch, labelled_unevenly, masked_by_hand, packed, padded, part_of, plain, step
from tensor_parallel_cases import IDS, put
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils.checkpoint import checkpoint

import torchacc
from torchacc.engines.native import split_backward


def make(family: str = "llama", layers: int = 3, **options: Any) -> nn.Module:
    """Return a tiny model of a family, the same on each rank."""
    torch.manual_seed(1)
    names = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 1}
    if family == "gpt2":
        size = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 32}
        dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**names, **size, **{**dropouts, **options}))
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model(family, **names, **size, **{**heads, **options})
    return transformers.AutoModelForCausalLM.from_config(config)


def config(
    pp: int,
    *,
    dp: int = 1,
    tp: int = 1,
    sp: int = 1,
    microbatches: int | None = None,
    schedule: str = "gpipe",
    each: int | None = None,
    **options: Any,
) -> torchacc.Config:
    fsdp = {"size": NUM_DEVICES // pp // dp // tp // sp, **options.pop("fsdp", {})}
    stages = {"size": pp, "num_microbatches": microbatches, "schedule": schedule, "stages_per_device": each}
    dist = {"dp": {"size": dp}, "fsdp": fsdp, "pp": stages, "tp": {"size": tp}, "sp": {"size": sp}}
    return torchacc.Config.from_dict({"backend": "native", "dist": dist, **options})


def compare(model: nn.Module, batches: list[Batch], steps: int = 2, in_windows: bool = False, **how: Any) -> None:
    """Train a model and its unsharded copy; compare losses, norms and parameters, and an evaluation between."""
    plain_model = copy.deepcopy(model)
    torchacc.accelerate(model, None, config(**how))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), **ADAM)
    for _ in range(steps):
        own = [part_of(model, batch) for batch in batches]
        whole = [batch | {"num_items_in_batch": batch["labels"][:, 1:].ne(-100).sum()} for batch in batches]
        found = step(model, own, optimizer, in_windows=in_windows)
        expected = step(plain_model, whole, plain_optimizer)
        assert found == pytest.approx(expected, rel=RELATIVE), f"loss and norm: {found} {expected}"
        with torch.no_grad():
            inputs = own[0]
            if how.get("compute", {}).get("chunked_loss"):  # with labels the loss in chunks has no logits
                with pytest.raises(torchacc.EngineError, match="never there as a whole"):
                    model(**inputs).logits[0]
                inputs.pop("labels")
            logits, own_rows = model(**inputs).logits, plain_model(**inputs).logits
            torch.testing.assert_close(logits.cpu(), own_rows, rtol=1e-4, atol=ADAM_ABSOLUTE * 10)
    check_parameters(model, plain_model, absolute=ADAM_ABSOLUTE)


MORE_FAMILIES: Mapping[str, dict[str, Any]] = {
    "gemma": {"family": "gemma", "head_dim": 8, "num_key_value_heads": 1},
    "gemma3": {
        "family": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "granite": {"family": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "olmo2": {"family": "olmo2"},
    "phi3": {"family": "phi3", "pad_token_id": 0},
    "smollm3": {"family": "smollm3", "pad_token_id": 0},
}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2"},
    "gpt2-untied": {"family": "gpt2", "tie_word_embeddings": False},
    "llama": {"family": "llama"},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "mistral": {"family": "mistral", "sliding_window": 5},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    **MORE_FAMILIES,
}


@case([NATIVE], each=FAMILIES)
def a_family_in_two_stages_trains_as_the_unsharded_model(options: dict[str, Any]) -> None:
    compare(make(**options), [padded(14, left=True)], pp=2)


SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
BATCHES: Mapping[str, Callable[[], Batch]] = {
    "uneven-labels": labelled_unevenly,
    "packed": packed,
    "masked-by-hand": masked_by_hand,
}


@case([NATIVE], each=BATCHES)
def stages_train_the_same_with_a_batch(make_batch: Callable[[], Batch]) -> None:
    compare(make("gpt2"), [make_batch()], pp=2, steps=1, microbatches=3)


WINDOW = [labelled_unevenly(), padded(left=True)]


@case([NATIVE], each={"windows": True, "sums": False})
def stages_accumulate_in(in_windows: bool) -> None:
    compare(make("gpt2"), WINDOW, pp=2, in_windows=in_windows)


@case(
    [NATIVE],
    num_devices=4,
    each={
        "shards": {"pp": 2},
        "shards-recomputed": {"pp": 2, "memory": {"gc": True}},
        "kept-weights": {"pp": 2, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}},
        "copies": {"pp": 2, "fsdp": {"sharding_strategy": "NO_SHARD"}},
        "replicas": {"pp": 2, "dp": 2},
        "nothing": {"pp": 4, "microbatches": 3},
    },
)
def stages_of_four_devices_accumulate_with(how: dict[str, Any]) -> None:
    compare(make("gpt2", layers=5), WINDOW, in_windows=True, **how)


SPLIT: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (FAMILIES["llama"], {}),
    "llama-one-head": ({"num_key_value_heads": 1}, {"memory": {"gc": True}}),
    "llama-tied": (FAMILIES["llama-tied"], {}),
    "mistral": (FAMILIES["mistral"], {}),
    "qwen2": (FAMILIES["qwen2"], {}),
    "qwen3": (FAMILIES["qwen3"], {}),
    "gpt2": (FAMILIES["gpt2"], {}),
}


@case([NATIVE], num_devices=4, each=SPLIT, left_out=("llama-tied", "mistral", "qwen2"))
def stages_of_split_layers_train_as_the_unsharded_model(how: tuple[dict[str, Any], dict[str, Any]]) -> None:
    options, more = how
    compare(make(**options), [packed(), padded(left=True)], in_windows=True, pp=2, tp=2, **more)


@case(
    [NATIVE],
    num_devices=4,
    each={
        **{family: {"model": FAMILIES[family], "schedule": "1f1b"} for family in FAMILIES},
        "gpipe": {"memory": {"gc": True}},
        "interleaved": {"schedule": "interleaved", "model": {"family": "llama", "layers": 4}},
        "one-head": {"model": {"num_key_value_heads": 1}},
        "mixtral": {"model": {"family": "mixtral", "num_local_experts": 4}, "memory": {"gc": True}},
    },
    left_out=("gpt2-untied", "qwen2", *MORE_FAMILIES),
)
def stages_of_split_samples_train_as_the_unsharded_model(how: dict[str, Any]) -> None:
    model = make(**how.pop("model", {}))
    compare(model, [packed(), padded(left=True), labelled_unevenly()], in_windows=True, pp=2, sp=2, **how)


@case(
    [NATIVE],
    num_devices=4,
    each={"stages": {"pp": 2, "schedule": "interleaved", "each": 2}, "split-layers": {"pp": 1, "tp": 2}},
)
def a_checkpoint_of_stages_of_split_samples_loads_in(after: dict[str, Any]) -> None:
    make_model = functools.partial(make, layers=4, tie_word_embeddings=True)
    trained = torchacc.accelerate(make_model(), None, config(pp=2, sp=2, schedule="1f1b"))
    optimizer = torch.optim.AdamW(trained.parameters(), **ADAM)
    step(trained, [part_of(trained, packed())], optimizer)
    folder = Path(sys.argv[2]) / f"pp-sp-saved-{after['pp']}"
    torchacc.checkpoint.save(folder, model=trained, optimizer=optimizer)
    loaded = torchacc.accelerate(torchacc.deferred_init(make_model), None, config(**after))
    new_optimizer = torch.optim.AdamW(loaded.parameters(), lr=1.0)
    torchacc.checkpoint.load(folder, model=loaded, optimizer=new_optimizer)
    expected, found = (torchacc.full_state_dict(each) for each in (trained, loaded))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    pairs = ((trained, optimizer), (loaded, new_optimizer))
    before, now = (step(each, [part_of(each, packed())], its) for each, its in pairs)
    assert now == pytest.approx(before, rel=RELATIVE)


@case(
    [NATIVE],
    num_devices=4,
    each={
        "gpipe": {"pp": 2, "model": {"family": "gpt2"}},
        "1f1b": {"pp": 2, "schedule": "1f1b", "model": {"tie_word_embeddings": True}},
        "interleaved": {"pp": 2, "schedule": "interleaved", "microbatches": 3, "model": {"layers": 4}},
        "split-layers": {"pp": 2, "tp": 2, "model": {}},
        "split-samples": {"pp": 2, "sp": 2, "schedule": "1f1b", "model": {"family": "gpt2"}},
    },
)
def stages_train_with_the_loss_in_chunks(how: dict[str, Any]) -> None:
    model = make(**how.pop("model"))
    compare(model, WINDOW, in_windows=True, compute={"chunked_loss": 3}, **how)


COMPILED: Mapping[str, dict[str, Any]] = {
    "gpipe": {"model": {"family": "gpt2"}},
    "1f1b-recomputed": {"schedule": "1f1b", "memory": {"gc": True}, "model": {"tie_word_embeddings": True}},
    "interleaved": {"schedule": "interleaved", "microbatches": 3, "model": {"layers": 4}},
    "split-layers": {"tp": 2, "model": {}},
    "split-samples": {"sp": 2, "schedule": "1f1b", "model": {"family": "gpt2"}},
    "chunks": {"compute": {"chunked_loss": 3}, "model": {}},
}


@case([NATIVE], num_devices=4, each=COMPILED)
def compiled_stages_train_as_the_unsharded_model(how: dict[str, Any]) -> None:
    model = make(**how.pop("model"))
    compute = {"compile": True, "compile_backend": "aot_eager", **how.pop("compute", {})}
    compare(model, WINDOW, in_windows=True, pp=2, compute=compute, **how)
    assert torchacc.compile_report().graphs


class Saved:
    """What a graph has saved, whose size is noted when it is saved and when it goes."""

    def __init__(self, sizes: list[int], tensor: torch.Tensor) -> None:
        self.tensor = tensor
        sizes.append(tensor.nbytes)
        weakref.finalize(self, sizes.append, -tensor.nbytes)


@case([NATIVE], each=BATCHES)
def backwards_between_forwards_train_the_same_with_a_batch(make_batch: Callable[[], Batch]) -> None:
    compare(make("gpt2"), [make_batch(), padded(left=True)], pp=2, microbatches=3, schedule="1f1b", in_windows=True)


@case(
    [NATIVE],
    each={
        "uneven-labels": (labelled_unevenly, {"family": "gpt2"}, {"microbatches": 3}),
        "packed": (packed, {"family": "llama", "layers": 6, "tie_word_embeddings": True}, {"each": 3}),
        "masked-by-hand": (masked_by_hand, {"family": "gpt2", "tie_word_embeddings": False}, {"microbatches": 4}),
        "padded": (functools.partial(padded, left=False), {"family": "qwen3", "head_dim": 8}, {"memory": {"gc": True}}),
    },
)
def interleaved_stages_train_the_same_with_a_batch(how: tuple[Callable[..., Batch], Any, Any]) -> None:
    make_batch, model, more = how
    compare(
        make(**{"layers": 4, **model}), [make_batch(), plain()], pp=2, schedule="interleaved", in_windows=True, **more
    )


@case(
    [NATIVE],
    num_devices=4,
    each={
        "shards-recomputed": {"pp": 2, "each": 3, "microbatches": 3, "memory": {"gc": True}},
        "kept-weights": {"pp": 2, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}},
        "copies": {"pp": 2, "fsdp": {"sharding_strategy": "NO_SHARD"}},
        "replicas": {"pp": 2, "dp": 2, "each": 3},
        "split-layers": {"pp": 2, "tp": 2, "model": {"family": "llama", "tie_word_embeddings": True}},
        "four": {"pp": 4, "microbatches": 7},
        "four-with-few": {"pp": 4, "microbatches": 2, "model": {"family": "llama"}},
    },
)
def interleaved_stages_of_four_devices_train_with(how: dict[str, Any]) -> None:
    model = {"family": "gpt2", "layers": 8, **how.pop("model", {})}
    compare(make(**model), WINDOW, in_windows=True, schedule="interleaved", **how)


@case(
    [NATIVE],
    num_devices=4,
    each={
        "shards-recomputed": {"pp": 2, "memory": {"gc": True}},
        "kept-weights": {"pp": 2, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}},
        "copies": {"pp": 2, "fsdp": {"sharding_strategy": "NO_SHARD"}},
        "replicas": {"pp": 2, "dp": 2},
        "split-layers": {"pp": 2, "tp": 2, "family": "llama"},
        "four": {"pp": 4, "microbatches": 3},
        "four-with-few": {"pp": 4, "microbatches": 2},
    },
)
def backwards_between_forwards_of_four_devices_train_with(how: dict[str, Any]) -> None:
    family = how.pop("family", "gpt2")
    compare(make(family, layers=5), WINDOW, in_windows=True, schedule="1f1b", **how)


@case(
    [NATIVE],
    each={
        "packed": (packed, {}, {}),
        "uneven-labels-recomputed": (labelled_unevenly, {"tie_word_embeddings": False}, {"memory": {"gc": True}}),
        "kept-weights": (plain, {"family": "qwen2"}, {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}),
        "chunks": (plain, {"family": "llama", "tie_word_embeddings": True}, {"compute": {"chunked_loss": 3}}),
    },
)
def stages_that_split_backwards_train_the_same_with(how: tuple[Callable[..., Batch], Any, Any]) -> None:
    make_batch, model, more = how
    window = [make_batch(), plain()]
    compare(make(**{"family": "gpt2", **model}), window, pp=2, schedule="zero_bubble", in_windows=True, **more)


@case(
    [NATIVE],
    num_devices=4,
    each={
        "shards-recomputed": {"pp": 2, "memory": {"gc": True}, "family": "llama"},
        "replicas": {"pp": 2, "dp": 2},
        "split-layers": {"pp": 2, "tp": 2, "family": "llama"},
        "split-samples": {"pp": 2, "sp": 2},
        "four": {"pp": 4, "microbatches": 7},
        "four-with-few": {"pp": 4, "microbatches": 2},
    },
)
def stages_of_four_devices_that_split_backwards_train_with(how: dict[str, Any]) -> None:
    family = how.pop("family", "gpt2")
    compare(make(family, layers=5), WINDOW, in_windows=True, schedule="zero_bubble", **how)


def with_adapters(model: nn.Module, *, layers: list[int] | None = None) -> nn.Module:
    """Return a model that trains adapters of LoRA alone, which begin as something else than zero."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    names = ["c_attn"] if hasattr(model, "transformer") else ["q_proj", "down_proj"]
    options = {"target_modules": names, "layers_to_transform": layers, "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options))


@case(
    [NATIVE],
    each={
        "gpipe": ({"family": "gpt2"}, {"compute": {"chunked_loss": 3}}),
        "1f1b-recomputed": ({}, {"schedule": "1f1b", "memory": {"gc": True}}),
        "interleaved": ({"layers": 4}, {"schedule": "interleaved"}),
        "zero-bubble": ({"family": "qwen3", "head_dim": 8}, {"schedule": "zero_bubble"}),
    },
)
def stages_train_adapters(how: tuple[dict[str, Any], dict[str, Any]]) -> None:
    options, more = how
    model = with_adapters(make(**options), layers=None if "family" in options else [0])  # or in the first stage alone
    compare(model, WINDOW, in_windows=True, pp=2, **more)


@case(
    [NATIVE],
    num_devices=4,
    each={"shards": {"schedule": "1f1b"}, "split-layers": {"tp": 2}, "split-samples": {"sp": 2}},
)
def stages_train_adapters_and_keep_them_in_a_checkpoint(how: dict[str, Any]) -> None:
    model = with_adapters(make(tie_word_embeddings=True))
    compare(model, WINDOW, pp=2, **how)
    folder = Path(sys.argv[2]) / f"pp-adapters-{'-'.join(how)}"
    torchacc.checkpoint.save(folder, model=model)
    loaded = with_adapters(make(tie_word_embeddings=True))
    torchacc.accelerate(loaded, None, config(1))
    torchacc.checkpoint.load(folder, model=loaded)
    expected, found = (torchacc.full_state_dict(each) for each in (model, loaded))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@case([NATIVE])
def adapters_that_stages_cannot_train_are_refused() -> None:
    peft = pytest.importorskip("peft")
    head = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"])
    for kind, expected in (
        (head, "'base_model.model.lm_head' has an adapter of peft, and is no part of a layer"),
        (peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]), "these are IA3"),
    ):
        with pytest.raises(torchacc.ConfigError, match=expected):
            torchacc.accelerate(peft.get_peft_model(make(), kind), None, config(2))


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


@case(
    [NATIVE],
    each={
        f"{order.__name__}-{schedule}": (order, schedule)
        for order in (in_a_window, between_forwards, before_two_backwards, twice, interrupted)
        for schedule in SCHEDULES
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
        lambda: [each.grad.pow(2).sum() for each in parameters],
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
def stages_hold_their_own_layers_and_start_from_the_deferred_initialisation() -> None:
    model, plain_model = torchacc.deferred_init(make, "gpt2", 4), make("gpt2", 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = [{name: value[0] for name, value in plain().items()}] * 8
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, loader, optimizer = torchacc.accelerate(model, loader, config(2), optimizer)
    check_parameters(model, plain_model, absolute=0.0)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert held == torchacc.describe(model).num_parameters_per_device < 0.6 * 13_000 * 4
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain_model.named_parameters()]
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), lr=0.1)
    for batch in loader:
        on_cpu = {name: tensor.cpu() for name, tensor in batch.items()}
        for each, own, given in ((model, optimizer, batch), (plain_model, plain_optimizer, on_cpu)):
            each(**given).loss.backward()
            own.step()
            own.zero_grad()
    assert len(loader) == 2, "all stages see the same batches"
    model.eval(), plain_model.eval()
    with torch.no_grad():
        found, expected = model(**plain()), plain_model(**plain())
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-4)


@case([NATIVE], num_devices=4)
def four_stages_hold_at_most_three_tenths_of_parameters_and_states_each() -> None:
    model = make(layers=8)
    whole = 3 * sum(parameter.nbytes for parameter in model.parameters())  # with two moments of each
    torchacc.accelerate(model, None, config(4))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    step(model, [plain()], optimizer)
    states = (value for state in optimizer.state.values() for key, value in state.items() if key != "step")
    held = sum(each.to_local().untyped_storage().nbytes() for each in (*model.parameters(), *states))
    assert 0.2 * whole < held <= 0.3 * whole, held / whole


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    full = torchacc.optim_state_dict(
        model, optimizer, torchacc.StateDictType.FULL_STATE_DICT, torchacc.FullStateDictConfig(rank0_only=False)
    )
    return torchacc.full_state_dict(model), full


def check_exactly(found: tuple[dict[str, Any], ...], expected: tuple[dict[str, Any], ...]) -> None:
    assert found[1]["param_groups"] == expected[1]["param_groups"]
    pairs = [(each[0], each[1]["state"]) for each in (found, expected)]
    torch.testing.assert_close(*pairs, rtol=0, atol=0)


@case([NATIVE], num_devices=4)
def a_checkpoint_of_stages_is_that_of_shards() -> None:
    """Save in stages and in shards, and load each of them in the other, with the optimizer."""
    models, optimizers, batch = [], [], plain()
    for pp in (2, 1):
        model = make("gpt2", layers=4)
        torchacc.accelerate(model, None, config(pp) if pp > 1 else config(1))
        models.append(model)
        optimizers.append(torch.optim.AdamW(model.parameters(), **ADAM))
        step(model, [part_of(model, batch)], optimizers[-1])
    root = Path(sys.argv[2]) / "stages"
    for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        torchacc.checkpoint.save(root / str(index), model=model, optimizer=optimizer)
        torchacc.checkpoint.verify(root / str(index))
    saved = [states_of(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    for index in (0, 1):
        torchacc.checkpoint.load(root / str(1 - index), model=models[index], optimizer=optimizers[index])
        check_exactly(states_of(models[index], optimizers[index]), saved[1 - index])
    models[0].load_state_dict(saved[0][0])
    optimizers[0].load_state_dict(saved[0][1])
    check_exactly(states_of(models[0], optimizers[0]), saved[0])
    torchacc.checkpoint.load(root / "0", model=models[1], optimizer=optimizers[1])
    losses = [step(model, [part_of(model, batch)], own) for model, own in zip(models, optimizers, strict=True)]
    assert losses[0] == pytest.approx(losses[1], rel=RELATIVE)


@case([NATIVE], num_devices=4, each={"freed-between": "FULL_SHARD", "kept": "SHARD_GRAD_OP"})
def a_stage_gathers_and_reduces_once_for_all_microbatches(strategy: str) -> None:
    model = make("gpt2", layers=4, tie_word_embeddings=False)
    torchacc.accelerate(model, None, config(2, fsdp={"sharding_strategy": strategy}))
    batch = part_of(model, plain())
    assert len(batch["input_ids"]) == 2, "the number of microbatches"

    def sent() -> tuple[int, int]:
        with (
            mock.patch.object(_fsdp_param_group, "foreach_all_gather", wraps=gather) as gathers,
            mock.patch.object(_fsdp_param_group, "foreach_reduce", wraps=reduce) as reductions,
        ):
            model(**batch).loss.backward()
            return gathers.call_count, reductions.call_count

    gather, reduce = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce
    layers, units = 2, 3  # with what is around the layers, which stays gathered between forward and backward
    expected = (units + (layers if strategy == "FULL_SHARD" else 0), units)
    assert [sent(), sent()] == [expected] * 2
    dropped = [model(**batch).loss]  # whose backward never comes: the next one reduces at its end
    assert sent() == expected
    assert sent() == expected, dropped
    (model(**batch).loss + model(**batch).loss).backward()
    assert sent() == expected


EIGHT = {"pp": 2, "tp": 2}  # and fsdp 2


@case([NATIVE], num_devices=8)
def eight_devices_train_as_the_unsharded_model() -> None:
    compare(make(tie_word_embeddings=True), [packed(), padded(left=True)], in_windows=True, **EIGHT)
    compare(make(), [packed(), padded(left=True)], in_windows=True, pp=2, tp=2, sp=2, schedule="1f1b")


@case([NATIVE, SPMD], num_devices=8)
def a_checkpoint_goes_on() -> tuple[dict[str, Any], float]:
    """Load what the launch before has saved, or train; save, and return the states and the loss of a next step."""
    own = Path(sys.argv[2])
    layout = {"backend": "xla", "dist": {"fsdp": {"size": 4, "use_spmd": True}}}
    how = torchacc.Config.from_dict(layout) if ENGINE == SPMD else config(**EIGHT if NUM_DEVICES == 8 else {"pp": 1})
    model = torchacc.accelerate(make(tie_word_embeddings=True), None, how)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    if own.name == "0":
        tensor_parallel_cases.step(model, put(IDS % VOCAB), optimizer)
    else:
        torchacc.checkpoint.load(own.with_name(str(int(own.name) - 1)) / "saved", model=model, optimizer=optimizer)
    weights, states = states_of(model, optimizer)
    torchacc.checkpoint.save(own / "saved", model=model, optimizer=optimizer)
    moments = {f"{i} {key}": value for i, state in states["state"].items() for key, value in state.items()}
    return {**weights, **moments}, tensor_parallel_cases.step(model, put(IDS % VOCAB), optimizer)


@case([NATIVE])
def bfloat16_in_stages_trains_as_in_shards() -> None:
    batch, losses = padded(left=False), []
    for how in ({"pp": 1}, {"pp": 2}, {"pp": 2, "schedule": "1f1b"}):
        model = make()
        torchacc.accelerate(model, None, config(**how, compute={"bf16": True}))
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        losses.append([step(model, [part_of(model, batch)], optimizer) for _ in range(2)])
    for found in losses[1:]:
        assert found == [pytest.approx(each, rel=1e-2) for each in losses[0]]
    assert losses[2] == [pytest.approx(each, rel=1e-5) for each in losses[1]]


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
        ({"memory": {"gc": True, "gc_cls": ["GPT2Model"]}}, "which is no layer"),
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
        (nn.Sequential(make()), "no model of transformers|no list of layers"),
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
