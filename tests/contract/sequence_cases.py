"""Samples split along their length over two and four devices, beside the unsharded model on the whole batch."""

import copy
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from casekit import ADAM, ADAM_ABSOLUTE, IS_FULL, NATIVE, NUM_DEVICES, RANK, RELATIVE, check_parameters, on_rank_0
from casekit import case as case_of
from further_families import FURTHER_FAMILIES
from torch import nn

import torchacc
from torchacc.engines.native import split_sequence
from torchacc.engines.sharded_model import sharded_model

case = partial(case_of, (NATIVE,), num_devices=4)
VOCAB = 96
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
STEPS = 2 if IS_FULL or NUM_DEVICES == 2 else 1
"""How many steps a comparison makes: the second is as any step, and takes four devices twice as long as two."""
Batch = dict[str, Any]


def make(
    family: str = "llama", heads: int = 4, kv_heads: int = 4, head: str = "ForCausalLM", **options: Any
) -> nn.Module:
    """Return a tiny model of a family, the same on each rank."""
    torch.manual_seed(1)
    if family == "gpt2":
        size = {"n_embd": 32, "n_layer": 2, "n_head": heads, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1}
        dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        config = transformers.GPT2Config(vocab_size=VOCAB, **size, **dropouts, **options)
        return transformers.AutoModelForCausalLM.from_config(config)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 32}
    size |= {"mixtral": {"num_local_experts": 4}, "qwen3_moe": EXPERTS}.get(family, {})
    if family.startswith(("gemma", "qwen3")):
        size["head_dim"] = 8
    config = transformers.AutoConfig.for_model(
        family, vocab_size=VOCAB, num_attention_heads=heads, **{"num_key_value_heads": kv_heads, **size, **options}
    )
    kind = {"ForCausalLM": transformers.AutoModelForCausalLM, "": transformers.AutoModel}[head]
    return kind.from_config(config)


def accelerate(
    model: nn.Module,
    *,
    sp: int,
    ring: int | None = None,
    dp: int = 1,
    tp: int = 1,
    strategy: str = "FULL_SHARD",
    **options: Any,
) -> nn.Module:
    fsdp = {"size": NUM_DEVICES // sp // dp // tp, "sharding_strategy": strategy}
    dist = {"dp": {"size": dp}, "fsdp": fsdp, "sp": {"size": sp, "ring_size": ring}, "tp": {"size": tp}}
    return torchacc.accelerate(model, None, torchacc.Config.from_dict({"backend": "native", "dist": dist, **options}))


# Batches of four rows


def tokens(length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(2, VOCAB, (4, length), generator=torch.Generator().manual_seed(seed))


def plain(length: int = 16) -> Batch:
    ids = tokens(length)
    return {"input_ids": ids, "labels": ids.clone()}


def labelled_unevenly(length: int = 16) -> Batch:
    """Return one whose labels are all in the first half, but for one of the last quarter."""
    batch = plain(length)
    batch["labels"][:, length // 2 :] = -100
    batch["labels"][0, -1] = 5
    return batch


def padded(length: int = 16, *, left: bool) -> Batch:
    batch = plain(length)
    mask = torch.ones_like(batch["input_ids"])
    for row, missing in enumerate((0, 3, 7, 11)):
        there = slice(0, missing) if left else slice(length - missing, length)
        mask[row, there] = 0
    batch["labels"][mask == 0] = -100
    return {**batch, "attention_mask": mask}


def packed(length: int = 16, *, use_cache: bool = False) -> Batch:
    """Return one with several documents in each row, which transformers keeps apart where nothing is cached."""
    positions = torch.cat([torch.arange(n) for n in (3, 6, length - 9)]).expand(4, -1).contiguous()
    batch = plain(length)
    batch["labels"][positions == 0] = -100
    return {**batch, "position_ids": positions} | ({} if use_cache else {"use_cache": False})


def masked_by_hand(length: int = 16) -> Batch:
    """Return one with a mask for each query and key, which hides every fifth token."""
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[:, 4::5] &= torch.eye(length, dtype=torch.bool)[:, 4::5]
    return {**plain(length), "attention_mask": mask.expand(4, 1, -1, -1).contiguous()}


BATCHES: Mapping[str, Callable[[], Batch]] = {
    "plain": plain,
    "uneven-labels": labelled_unevenly,
    "left-padded": partial(padded, left=True),
    "right-padded": partial(padded, left=False),
    "packed": packed,
    "packed-and-cached": partial(packed, use_cache=True),
    "masked-by-hand": masked_by_hand,
    "of-a-length-that-does-not-divide": partial(padded, 13, left=False),
    "with-a-part-of-nothing": partial(packed, 9),
}


def rows_of(model: nn.Module, whole: torch.Tensor) -> torch.Tensor:
    """Return the rows of this process."""
    engine = sharded_model(model).engine
    own = engine.data_parallel_ranks
    return torch.cat(whole.chunk(engine.mesh.data_parallel_size)[own.start : own.stop])


def part_of(model: nn.Module, batch: Batch) -> Batch:
    """Return the rows of this process, on its devices, and how many labels that is in the mean."""
    engine = sharded_model(model).engine
    rows = {name: rows_of(model, value) if name != "use_cache" else value for name, value in batch.items()}
    share = len(engine.data_parallel_ranks) / engine.mesh.data_parallel_size
    return engine.to_device(rows | {"num_items_in_batch": batch["labels"][:, 1:].ne(-100).sum() * share})


def step(
    model: nn.Module, batches: list[Batch], optimizer: torch.optim.Optimizer, *, in_windows: bool = True
) -> tuple[float, float]:
    """Make a step of several micro-batches; return the mean loss and the norm of the gradients."""
    optimizer.zero_grad()
    losses = []
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        if last or not in_windows or not hasattr(model, "_torchacc"):
            loss = model(**batch).loss / len(batches)
            loss.backward()
        else:
            with torchacc.accumulate(model):
                loss = model(**batch).loss / len(batches)
                loss.backward()
        losses.append(loss.detach())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return sum(loss.item() for loss in losses), float(norm)


def unsharded_step(model: nn.Module | None, batches: list[Batch]) -> Callable[[], tuple[float, float]]:
    """Return what makes a step of an unsharded model with the global batches; nothing where there is no model."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM) if model is not None else None
    whole = [batch | {"num_items_in_batch": batch["labels"][:, 1:].ne(-100).sum()} for batch in batches]
    return lambda: step(model, whole, optimizer)


def compare_sharded(
    shard: Callable[..., nn.Module], model: nn.Module, batches: list[Batch], steps: int = STEPS, **how: Any
) -> None:
    """Train a model that `shard(model, **how)` shards and its unsharded copy; compare losses, norms and parameters."""
    plain_model = copy.deepcopy(model) if RANK == 0 else None
    shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    plain_step = unsharded_step(plain_model, batches)
    for _ in range(steps):
        found = step(model, [part_of(model, batch) for batch in batches], optimizer)
        expected = on_rank_0(plain_step)
        assert found == pytest.approx(expected, rel=RELATIVE), f"loss and norm: {found} {expected}"
    check_parameters(model, plain_model, absolute=ADAM_ABSOLUTE)


compare = partial(compare_sharded, accelerate)
FAMILIES: Mapping[str, dict[str, Any]] = {
    "gemma": {"family": "gemma", "kv_heads": 1},
    "gemma3": {"family": "gemma3_text", "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"family": "granite", "kv_heads": 2},
    "olmo2": {"family": "olmo2"},
    "phi3": {"family": "phi3", "pad_token_id": 0},
    "qwen3-moe": {"family": "qwen3_moe", "kv_heads": 2},
    "smollm3": {"family": "smollm3", "pad_token_id": 0},
    "gpt2": {"family": "gpt2"},
    "llama": {"family": "llama", "tie_word_embeddings": True},
    "mistral": {"family": "mistral", "kv_heads": 2, "sliding_window": 5},
    "mixtral": {"family": "mixtral", "kv_heads": 2},
    "qwen2": {"family": "qwen2", "heads": 4, "kv_heads": 1},
    "qwen3": {"family": "qwen3", "heads": 8, "kv_heads": 2},
    **FURTHER_FAMILIES,
}


@case_of((NATIVE,), each=FAMILIES, left_out=FURTHER_FAMILIES)  # these are split so in `pipeline_cases`
def trains_as_the_unsharded_model(options: dict[str, Any]) -> None:
    compare(make(**options), [padded(14, left=True)], steps=1, sp=2)


@case(each={name: (index, make_batch) for index, (name, make_batch) in enumerate(BATCHES.items())})
def trains_the_same_with_a_batch(numbered: tuple[int, Callable[[], Batch]]) -> None:
    index, make_batch = numbered
    ways = (("gpt2", 2), ("llama", 4))  # over half of the devices, and over all
    for family, sp in ways if IS_FULL else [ways[index % 2]]:
        compare(make(family), [make_batch()], sp=sp)


WINDOW = [labelled_unevenly(), padded(left=True)]
# Each kind of batch has graphs of its own, which each device compiles.
Compiled = tuple[dict[str, Any], dict[str, Any], list[Batch]]
COMPILED_ON_TWO: Mapping[str, Compiled] = {
    "layers-of-two-kinds": (FAMILIES["gemma3"], {"sp": 2}, [packed()]),
    "recomputed-experts": (FAMILIES["mixtral"], {"sp": 2, "memory": {"gc": True}}, [packed()]),
    "on-more-devices-than-heads": ({"heads": 1, "kv_heads": 1}, {"sp": 2}, [packed()]),
}
COMPILED: Mapping[str, Compiled] = {"beside-split-layers": (FAMILIES["llama"], {"sp": 2, "tp": 2}, [packed()])}


@case_of((NATIVE,), each=COMPILED_ON_TWO, left_out=("on-more-devices-than-heads",))
@case(each=COMPILED, left_out=COMPILED)  # each half of it runs by itself
def compiled_layers_train_as_unsharded(how: Compiled) -> None:
    options, axes, batches = how
    torch._dynamo.reset()  # or it would have the graphs of other cases
    before = torchacc.compile_report().graphs
    compare(make(**options), batches, **axes, compute={"compile": True, "compile_backend": "aot_eager"})
    assert torchacc.compile_report().graphs > before


SELECTIVE: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of-a-window": (FAMILIES["mistral"], {"sp": 2}),
    "beside-split-layers": (FAMILIES["llama"], {"sp": 2, "tp": 2}),
    "on-more-devices-than-heads": (FAMILIES["qwen2"], {"sp": 4}),
}


@case(each=SELECTIVE)
def layers_whose_products_are_kept_train_as_unsharded(how: tuple[dict[str, Any], dict[str, Any]]) -> None:
    options, axes = how
    compare(make(**options), [*WINDOW, packed()], **axes, memory={"gc": True, "gc_policy": "save_matmuls"})


@case(each=BATCHES)
def trains_the_same_on_more_devices_than_heads_with_a_batch(make_batch: Callable[[], Batch]) -> None:
    compare(make(heads=2, kv_heads=1), [make_batch()], sp=4)


ON_MORE_DEVICES: Mapping[str, dict[str, Any]] = {
    "one-head": {"family": "gpt2", "heads": 1},
    "a-window": {"family": "mistral", "heads": 2, "kv_heads": 1, "sliding_window": 5},
    "layers-of-two-kinds": {**FAMILIES["gemma3"], "heads": 2, "kv_heads": 2},
    "heads-that-do-not-divide": {"family": "qwen3", "heads": 6, "kv_heads": 3},
    "experts": {"family": "mixtral", "heads": 2, "kv_heads": 2},
}


@case(each=ON_MORE_DEVICES)
def trains_the_same_on_more_devices_than_heads(options: dict[str, Any]) -> None:
    compare(make(**options), WINDOW, sp=4)


RINGS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of-all": (FAMILIES["llama"], {"sp": 4, "ring": 4}),
    "of-two-groups": ({"family": "qwen3", "heads": 8, "kv_heads": 2}, {"sp": 4, "ring": 2}),
    "and-fsdp": (FAMILIES["gpt2"], {"sp": 2, "ring": 2}),
    "beside-split-layers": (FAMILIES["llama"], {"sp": 2, "ring": 2, "tp": 2}),
    "recomputed": (FAMILIES["mistral"], {"sp": 2, "ring": 2, "memory": {"gc": True}}),
    "by-a-kernel-without-sums": (FAMILIES["llama"], {"sp": 2, "ring": 2, "compute": {"attention": "sdpa_math"}}),
}


@case(each=RINGS)
def trains_the_same_in_a_ring(how: tuple[dict[str, Any], dict[str, Any]]) -> None:
    options, axes = how
    compare(make(**options), [*WINDOW, packed()], **axes)


BOTH_WAYS = {"over-heads": {"sp": 2}, "in-two-groups": {"sp": 4, "ring": 2}, "in-a-ring": {"sp": 4, "ring": 4}}


@case(each=BOTH_WAYS)
def layers_that_attend_to_later_tokens_too_train_the_same(axes: dict[str, Any]) -> None:
    model = make(kv_heads=2)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    compare(copy.deepcopy(model), [plain(), labelled_unevenly()], **axes)
    with pytest.raises(torchacc.EngineError, match="attends to later tokens, too"):
        compare(model, [plain(13)], **axes)


@case()
def under_a_causal_mask_no_device_gathers_keys() -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("keys and values were gathered")

    gathers, split_sequence.all_gather = split_sequence.all_gather, refuse
    try:
        compare(make(kv_heads=2), [plain(13), labelled_unevenly()], sp=4, ring=4)
        with pytest.raises(AssertionError, match="keys and values were gathered"):
            compare(make(kv_heads=2), [padded(left=True)], sp=4, ring=4)
    finally:
        split_sequence.all_gather = gathers


@case()
def a_ring_that_heads_do_not_allow_is_refused() -> None:
    with pytest.raises(torchacc.ConfigError, match=r"heads over 4 devices, and 2 heads .* set it to 2"):
        accelerate(make(heads=2, kv_heads=1), sp=4, ring=1)


WITH_LAYERS_SPLIT: Mapping[str, dict[str, Any]] = {
    "fused-projections": {"family": "gpt2", "heads": 4},
    "tied": {"family": "llama", "kv_heads": 2, "tie_word_embeddings": True},
    "shared-heads": {"family": "qwen2", "heads": 8, "kv_heads": 1},
    "norms-of-heads": {"family": "qwen3", "kv_heads": 2},
    "more-devices-than-heads": {"family": "llama", "heads": 2, "kv_heads": 2},
}


@case(each=WITH_LAYERS_SPLIT)
def trains_the_same_with_layers_split_and(options: dict[str, Any]) -> None:
    compare(make(**options), WINDOW, sp=2, tp=2)


@case()
def layers_computed_again_on_more_devices_than_heads_train_the_same() -> None:
    compare(make(heads=2, kv_heads=1), [plain(13), padded(left=True)], sp=4, memory={"gc": True})


@case(
    each={
        "and-fsdp": {"sp": 2},
        "and-replicas": {"sp": 2, "dp": 2},
        "recompute": {"sp": 2, "memory": {"gc": True}},
        "the-loss-in-chunks": {"sp": 4, "compute": {"chunked_loss": 3}},
        "kept-weights": {"sp": 2, "strategy": "SHARD_GRAD_OP"},
    }
)
def trains_the_same_in_windows_with(how: dict[str, Any]) -> None:
    compare(make(kv_heads=2), WINDOW, **how)


@case()
def gradient_checkpointing_of_transformers_trains_the_same() -> None:
    model = make()
    model.gradient_checkpointing_enable()
    compare(model, [plain()], sp=4)


@case()
def adapters_train_the_same() -> None:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    compare(peft.get_peft_model(make(), options), [labelled_unevenly()], sp=4)


@case()
def bfloat16_trains_as_over_shards_of_parameters() -> None:
    batch, losses = padded(left=False), []
    for sp in (1, 4):
        model = accelerate(make(), sp=sp, compute={"bf16": True})
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        losses.append([step(model, [part_of(model, batch)], optimizer) for _ in range(2)])
    assert losses[1] == [pytest.approx(each, rel=1e-2) for each in losses[0]]


@case()
def a_loss_of_the_script_has_the_same_gradients() -> None:
    class Scored(nn.Module):
        """A model of transformers, and a head of the script's that looks at the last token."""

        def __init__(self) -> None:
            super().__init__()
            self.body = make(heads=1, kv_heads=1, head="")  # fewer heads than devices, so that tokens change places
            self.score = nn.Linear(32, 1)

        def forward(self, embeds: torch.Tensor) -> torch.Tensor:
            found = self.body(inputs_embeds=embeds, output_hidden_states=True)
            return self.score(found.last_hidden_state[:, -1]) + found.hidden_states[1].square().mean((1, 2))[:, None]

    torch.manual_seed(5)
    model = Scored()
    whole = copy.deepcopy(model)
    accelerate(model, sp=2)
    embeds = torch.randn(4, 13, 32, generator=torch.Generator().manual_seed(2))
    engine = sharded_model(model).engine
    given = [embeds.chunk(2)[engine.data_parallel_ranks.start].clone(), embeds.clone()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
    for each, inputs, optimizer in zip((model, whole), given, optimizers, strict=True):
        inputs.requires_grad_()
        each(inputs).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(given[0].grad / 2, given[1].grad.chunk(2)[engine.data_parallel_ranks.start])
    check_parameters(model, whole)


@case(each={"by-heads": 4, "by-heads-and-queries": 2})
def outputs_are_of_all_tokens_or_say_why_not(heads: int) -> None:
    model = make("gpt2", heads)
    whole = copy.deepcopy(model).eval()
    accelerate(model, sp=4)
    batch = plain(14)
    ids = batch["input_ids"]
    expected = whole(ids, labels=ids)
    torch.testing.assert_close(model(ids).logits.cpu(), expected.logits)
    model.eval()
    with torch.no_grad():
        loss, logits = model(ids, labels=ids, return_dict=False)
        generated = model.generate(ids[:, :5].to(model.device), max_new_tokens=4, do_sample=False)
        kept = model(ids[:, :-1], use_cache=True).past_key_values
        last = model(ids[:, -1:], past_key_values=kept).logits
        with pytest.raises(torchacc.EngineError, match="use_cache=True"):
            model(ids[:, -1:], past_key_values=model(ids[:, :-1]).past_key_values)
    torch.testing.assert_close((loss.cpu(), logits.cpu()), (expected.loss, expected.logits))
    torch.testing.assert_close(last.cpu(), expected.logits[:, -1:])
    assert torch.equal(generated.cpu(), whole.generate(ids[:, :5], max_new_tokens=4, do_sample=False))
    logits = model.train()(**batch).logits
    for use in (lambda: logits[:, -1], lambda: logits.shape, lambda: torch.argmax(logits), lambda: list(logits)):
        with pytest.raises((torchacc.EngineError, torchacc.ConfigError), match="without labels"):
            use()


@case()
def what_would_see_a_part_only_is_refused() -> None:
    for options, expected in (({"sp": 2, "compute": {"attention": "flex_attention"}}, "compute.attention"),):
        with pytest.raises(torchacc.ConfigError, match=expected):
            accelerate(make(), **options)
    mine = type("Mine", (transformers.LlamaForCausalLM,), {"forward": lambda self, ids: self.model(ids)})
    odd = make()
    odd.model.layers[0].mlp = nn.Conv1d(32, 32, 1)
    weighed = make()
    weighed.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.mean()
    encoder = transformers.BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=VOCAB)
    classifier = transformers.LlamaForSequenceClassification(make().config)
    own_loss = make()
    own_loss.loss_function = lambda logits, labels, **kwargs: logits.mean()
    rotated = make(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    for model, expected in (
        (nn.Linear(4, 4), "no model of transformers"),
        (transformers.BertForMaskedLM(encoder), "'bert'"),
        (classifier, "its head"),
        (mine(make().config), "the script's own"),
        (odd, "Conv1d"),
        (weighed, "its loss_function"),
        (own_loss, "loss_function"),
        (rotated, "rotary"),
    ):
        with pytest.raises(torchacc.ConfigError, match=expected):
            accelerate(model, sp=4)
    model, ids = accelerate(make(), sp=4), tokens(16)
    layer = model.model.layers[0].self_attn
    hidden, cosine = torch.ones(4, 16, 32, device=model.device), torch.ones(1, 16, 8, device=model.device)
    with pytest.raises(torchacc.DataError, match="different inputs"):
        model(ids.roll(RANK, 0))
    cache = transformers.DynamicCache()
    for call, expected in (
        (lambda: model(ids, past_key_values=cache), "past_key_values in a forward that records"),
        (lambda: model(ids, output_attentions=True), "output_attentions"),
        (lambda: model(ids, attention_mask=torch.ones(4, 20)), "attention_mask of shape"),
        (lambda: model(ids, labels=ids, ignore_index=0), "ignore_index = 0"),
        (lambda: model(ids, more=torch.ones(4, 16)), "the input 'more'"),
        (lambda: model.model(ids.to(model.device)), "called by itself"),
        (lambda: layer(hidden, (cosine, cosine), None), "by itself"),
    ):
        with pytest.raises(torchacc.EngineError, match=expected):
            call()
    model.set_attn_implementation("sdpa")
    with pytest.raises(torchacc.EngineError, match="after accelerate"):
        model(ids)


@case(
    each={"to-fsdp": {"sp": 1}, "to-longer": {"sp": 4}, "to-split-layers": {"sp": 2, "tp": 2}},
    left_out=("to-fsdp", "to-longer"),
)
def a_checkpoint_of_split_samples_loads_at(after: dict[str, Any]) -> None:
    folder = Path(sys.argv[2]) / f"sp-saved-{after['sp']}-{len(after)}"
    make_with_two_heads = partial(make, heads=2, kv_heads=2)
    saved = accelerate(make_with_two_heads(), sp=2)
    optimizer = torch.optim.AdamW(saved.parameters(), **ADAM)
    step(saved, [part_of(saved, plain())], optimizer)
    torchacc.checkpoint.save(folder, model=saved, optimizer=optimizer)
    expected = torchacc.full_state_dict(saved)
    loaded = accelerate(torchacc.deferred_init(make_with_two_heads), **after)
    new_optimizer = torch.optim.AdamW(loaded.parameters(), lr=1.0)
    torchacc.checkpoint.load(folder, model=loaded, optimizer=new_optimizer)
    found = torchacc.full_state_dict(loaded)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    following = [step(each, [part_of(each, plain())], o) for each, o in ((saved, optimizer), (loaded, new_optimizer))]
    assert following[1] == pytest.approx(following[0], rel=RELATIVE)
