"""Layers in stages over two and four devices, beside the unsharded model on the whole batch."""

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from casekit import (
    ADAM,
    ADAM_ABSOLUTE,
    IS_FULL,
    NATIVE,
    NUM_DEVICES,
    RANK,
    RELATIVE,
    case,
    check_parameters,
    on_rank_0,
)
from further_families import FAMILIES_ALIKE, FURTHER_FAMILIES
from sequence_cases import (
    STEPS,
    VOCAB,
    Batch,
    labelled_unevenly,
    masked_by_hand,
    packed,
    padded,
    part_of,
    plain,
    rows_of,
    step,
    unsharded_step,
)
from torch import nn

import torchacc


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


def compare(
    model: nn.Module,
    batches: list[Batch],
    steps: int = STEPS,
    in_windows: bool = False,
    evaluates: bool = True,
    **how: Any,
) -> None:
    """Train a model and its unsharded copy; compare losses, norms and parameters, and an evaluation after each step."""
    plain_model = copy.deepcopy(model) if RANK == 0 else None
    torchacc.accelerate(model, None, config(**how))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    plain_step = unsharded_step(plain_model, batches)
    for _ in range(steps):
        own = [part_of(model, batch) for batch in batches]
        found = step(model, own, optimizer, in_windows=in_windows)
        expected = on_rank_0(plain_step)
        assert found == pytest.approx(expected, rel=RELATIVE), f"loss and norm: {found} {expected}"
        if not evaluates:
            continue
        with torch.no_grad():
            inputs = own[0]
            if how.get("compute", {}).get("chunked_loss"):  # with labels the loss in chunks has no logits
                with pytest.raises(torchacc.EngineError, match="never there as a whole"):
                    model(**inputs).logits[0]
                inputs.pop("labels")
            logits, of_all = model(**inputs).logits.cpu(), on_rank_0(lambda: plain_model(**batches[0]).logits)
            torch.testing.assert_close(logits, rows_of(model, of_all), rtol=1e-4, atol=ADAM_ABSOLUTE * 10)
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
    **FURTHER_FAMILIES,
}


IN_OTHER_CASES = ("gpt2", "llama", "llama-tied", "qwen3")


@case([NATIVE], each=FAMILIES, left_out=(*FURTHER_FAMILIES, *IN_OTHER_CASES))  # those in stages of split samples
def a_family_in_two_stages_trains_as_the_unsharded_model(options: dict[str, Any]) -> None:
    compare(make(**options), [padded(14, left=True)], steps=1, pp=2)


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
    left_out=("shards", "kept-weights", "copies"),  # other schedules have these
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


@case([NATIVE], num_devices=4, each=SPLIT, left_out=("llama", "llama-tied", "mistral", "qwen2"))
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
    left_out=(*FAMILIES, "gpipe"),
)
def stages_of_split_samples_train_as_the_unsharded_model(how: dict[str, Any]) -> None:
    model = make(**how.pop("model", {}))
    batches = [packed(), padded(left=True)] + [labelled_unevenly()] * IS_FULL
    compare(model, batches, in_windows=True, pp=2, sp=2, **how)


@case([NATIVE], num_devices=4, each=FURTHER_FAMILIES, left_out=FAMILIES_ALIKE)
def a_further_family_in_stages_of_split_samples_trains_as_unsharded(options: dict[str, Any]) -> None:
    compare(make(**options, layers=2), [padded(left=True)], pp=2, sp=2)


@case(
    [NATIVE],
    num_devices=4,
    each={"stages": {"pp": 2, "schedule": "interleaved", "each": 2}, "split-layers": {"pp": 1, "tp": 2}},
    left_out=("split-layers",),
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
    left_out=("gpipe", "interleaved"),
)
def stages_train_with_the_loss_in_chunks(how: dict[str, Any]) -> None:
    model = make(**how.pop("model"))
    compare(model, WINDOW, in_windows=True, compute={"chunked_loss": 3}, **how)


BOTH = {"batches": WINDOW} if IS_FULL else {}  # in place of the last one: each kind of batch has graphs of its own
COMPILED_ON_TWO: Mapping[str, dict[str, Any]] = {
    "gpipe": {"model": {"family": "gpt2"}},
    "1f1b-recomputed": {"schedule": "1f1b", "memory": {"gc": True}, "model": {"tie_word_embeddings": True}, **BOTH},
    "interleaved": {"schedule": "interleaved", "microbatches": 3, "model": {"layers": 4}, **BOTH},
}
COMPILED: Mapping[str, dict[str, Any]] = {
    "split-layers": {"tp": 2, "model": {"layers": 2}},
    "split-samples": {"sp": 2, "schedule": "1f1b", "model": {"family": "gpt2", "layers": 2}},
    "chunks": {"compute": {"chunked_loss": 3}, "model": {}},
}


@case([NATIVE], each=COMPILED_ON_TWO, left_out=("gpipe", "interleaved"))
@case([NATIVE], num_devices=4, each=COMPILED, left_out=COMPILED)  # on two are stages, and layers split
def compiled_stages_train_as_the_unsharded_model(how: dict[str, Any]) -> None:
    model = make(**how.pop("model"))
    compute = {"compile": True, "compile_backend": "aot_eager", **how.pop("compute", {})}
    compare(model, how.pop("batches", WINDOW[1:]), in_windows=True, evaluates=IS_FULL, pp=2, compute=compute, **how)
    assert torchacc.compile_report().graphs


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
    left_out=("shards-recomputed", "kept-weights", "copies", "replicas", "four"),
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
    left_out=("shards-recomputed", "kept-weights", "replicas"),
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
    left_out=("split-layers", "four-with-few"),
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
    left_out=("shards", "split-samples"),
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


OPTIMIZERS: Mapping[str, dict[str, Any]] = {
    "ASGD": {},
    "Adagrad": {},
    "AdamW": {"amsgrad": True},
    "Adamax": {"foreach": True},
    "NAdam": {},
    "RAdam": {},
    "SGD": {"momentum": 0.9},
    "Adam": {"fused": True},
}


@case([NATIVE])
def each_stage_has_the_state_of_an_optimizer_for_all_parameters() -> None:
    """Numbers of the parameters of other stages, as steps, are those of the unsharded run, and a checkpoint's names."""
    for name, options in OPTIMIZERS.items():
        model, batch = make(), padded(14, left=True)
        plain_model = copy.deepcopy(model)
        torchacc.accelerate(model, None, config(pp=2))
        own, expected = (getattr(torch.optim, name)(each.parameters(), **options) for each in (model, plain_model))
        for _ in range(3):
            step(model, [part_of(model, batch)], own)
            step(plain_model, [batch], expected)
        for (key, parameter), other in zip(model.named_parameters(), plain_model.parameters(), strict=True):
            assert own.state[parameter].keys() == expected.state[other].keys(), (name, key)
            assert None not in own.state[parameter].values(), (name, key)
            numbers = {key: value for key, value in expected.state[other].items() if not value.dim()}
            assert {each: own.state[parameter][each] for each in numbers} == numbers, (name, key)
        check_parameters(model, plain_model, absolute=ADAM_ABSOLUTE)


@case([NATIVE])
def adapters_that_stages_cannot_train_are_refused() -> None:
    peft = pytest.importorskip("peft")
    head = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"])
    copied = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"])
    for kind, expected in (
        (head, "'base_model.model.lm_head' has an adapter of peft, and is not a part of a layer"),
        (peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]), "these are IA3"),
        (copied, r"of modules_to_save = \['lm_head'\] peft holds two copies"),
    ):
        with pytest.raises(torchacc.ConfigError, match=expected):
            torchacc.accelerate(peft.get_peft_model(make(), kind), None, config(2))


EIGHT = {"pp": 2, "tp": 2}  # and fsdp 2


@case([NATIVE], num_devices=8)
def eight_devices_train_as_the_unsharded_model() -> None:
    compare(make(tie_word_embeddings=True), [packed(), padded(left=True)], in_windows=True, **EIGHT)
    compare(make(), [packed(), padded(left=True)], in_windows=True, pp=2, tp=2, sp=2, schedule="1f1b")


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
