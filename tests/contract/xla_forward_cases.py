"""Cases about what XLA does in another way than PyTorch in a forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from casekit import (
    ENGINE,
    SPMD,
    XLA,
    X,
    by_rank,
    case,
    check_equal,
    check_gradients,
    check_parameters,
    check_still_trains,
    loss_of,
    part,
    plain_value,
    sgd,
    sharded_and_plain,
    step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torchacc

# Documents in one row

TOKENS = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(3))
DOCUMENTS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]).expand(4, 8).contiguous()
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]).expand(4, 8).contiguous()
THREE = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2]).expand(4, 8).contiguous()
UNEVEN = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]] * 2)


def make_causal(family: str = "llama", num_layers: int = 1) -> nn.Module:
    """Return a model whose loss depends much on where it attends to."""
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    common = {**sizes, **heads, "use_cache": False, "initializer_range": 0.5, "pad_token_id": 0}
    if family == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**common, sliding_window=3))
    if family == "llama4":
        chunks = {"attention_chunk_size": 4, "layer_types": ["chunked_attention"], "no_rope_layers": [1]}
        experts = {"moe_layers": [], "intermediate_size_mlp": 8, "head_dim": 4}
        return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**common, **chunks, **experts))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))


class Renaming(nn.Module):
    """Gives the positions to the model within it under another name, or makes them itself."""

    def __init__(self, make: Callable[[dict[str, torch.Tensor]], torch.Tensor | None], family: str = "llama") -> None:
        super().__init__()
        self.model, self.make = make_causal(family), make

    def forward(self, **batch: torch.Tensor) -> Any:
        positions = self.make(batch)
        return self.model(batch["input_ids"], batch.get("mask"), positions, labels=batch["input_ids"]).loss


def from_documents(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    documents = batch["documents"]
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.where(documents == documents.roll(1, 1), 0, places)
    return places - begins.cummax(1).values


def from_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    ends = (batch["input_ids"] < 8).long()
    count = torch.ones_like(ends).cumsum(1) - 1
    last = torch.where(ends.roll(1, 1) > 0, count, 0).cummax(1).values
    return count - last


def on(batch: dict[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
    return positions.to(batch["input_ids"].device)


PACKED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], dict[str, torch.Tensor]]] = {
    "renamed": (lambda batch: batch["places"], {"places": POSITIONS}),
    "three-documents": (lambda batch: batch["places"], {"places": THREE}),
    "in-some-rows": (lambda batch: batch["places"], {"places": UNEVEN}),
    "from-documents": (from_documents, {"documents": DOCUMENTS}),
    "from-tokens": (from_tokens, {}),
    "constant": (
        lambda batch: torch.zeros_like(batch["input_ids"]) + torch.arange(8, device=batch["input_ids"].device) % 4,
        {},
    ),
    "constant-in-one-row": (lambda batch: torch.arange(8, device=batch["input_ids"].device)[None] % 5, {}),
    "one-row-for-all": (lambda batch: on(batch, POSITIONS[:1]), {}),
    "offset": (lambda batch: batch["places"] + 5, {"places": torch.arange(8).expand(4, 8).contiguous()}),
    "mask-beside": (lambda batch: batch["places"], {"places": POSITIONS, "mask": (TOKENS != 7).long()}),
    "none": (lambda batch: None, {}),
}


def check_two_steps(make: Callable[[], nn.Module], batch: dict[str, torch.Tensor], **options: Any) -> None:
    """Check the losses of two steps and the parameters after them."""
    model, plain = sharded_and_plain(make, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    mine = {name: part(tensor) for name, tensor in batch.items()}
    for _ in range(2):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        found, expected = value_of(model(**mine)), value_of(plain(**batch))
        shares = by_rank(plain_value(found))  # where the model returns no loss, each process makes its own
        check_equal(sum(shares) / len(shares), expected.detach(), "loss")
        found.backward()
        expected.backward()
        optimizer.step()
        plain_optimizer.step()
    found_state, expected_state = torchacc.full_state_dict(model), plain.state_dict()
    for name, tensor in expected_state.items():
        check_equal(found_state[name], tensor, name, 5e-6)


def value_of(output: Any) -> torch.Tensor:
    output = getattr(output, "loss", output)
    assert isinstance(output, torch.Tensor)
    return output if not output.dim() else output.square().mean()


@case(XLA, each=PACKED)
def packed_documents_stay_apart(case: tuple[Callable[[dict[str, torch.Tensor]], Any], dict[str, torch.Tensor]]) -> None:
    make, more = case
    check_two_steps(lambda: Renaming(make), {"input_ids": TOKENS, **more})


@case([SPMD], each={"sliding": "mistral", "chunked": "llama4"})
def packed_documents_stay_apart_in(family: str) -> None:
    for key in ("renamed", "offset", "none"):
        make, more = PACKED[key]
        check_two_steps(lambda make=make: Renaming(make, family), {"input_ids": TOKENS, **more})


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_causal()

    def forward(self, input_ids: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        if places is None:  # nothing but the program itself says so
            places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden = self.model.model(input_ids, None, places).last_hidden_state
        return self.model.lm_head(hidden).square().mean()


@case(XLA, each={"packed": {"places": POSITIONS}, "plain": {}})
def masks_are_the_same_when_computed_again(more: dict[str, torch.Tensor]) -> None:
    check_two_steps(Outer, {"input_ids": TOKENS, **more}, memory={"gc": True, "gc_cls": {"LlamaModel"}})


@case([SPMD], each={"packed": {"position_ids": POSITIONS}, "plain": {}})
def packed_documents_stay_apart_in_a_loop_of_layers(more: dict[str, torch.Tensor]) -> None:
    batch = {"input_ids": TOKENS, "labels": TOKENS, **more}
    check_two_steps(lambda: make_causal(num_layers=2), batch, compute={"scan_layers": True})


@case([SPMD])
def plain_documents_get_no_mask_and_ask_nothing() -> None:
    from torchacc.engines.xla import runtime

    masks: list[Any] = []

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        masks.append(kwargs["attention_mask"])

    model, _ = sharded_and_plain(make_causal)
    model.model.layers[0].register_forward_pre_hook(look, with_kwargs=True)
    before = runtime.count("ExecuteReplicated"), runtime.compile_stats()[0]
    model(input_ids=part(TOKENS))
    assert (runtime.count("ExecuteReplicated"), runtime.compile_stats()[0]) == before
    model(input_ids=part(TOKENS), position_ids=part(POSITIONS))
    assert (runtime.count("ExecuteReplicated"), runtime.compile_stats()[0]) == before
    assert masks[0] is None
    assert masks[1] is not None


# Families that used to crash


def make_llava() -> nn.Module:
    import transformers

    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"model_type": "llama", "vocab_size": 32, "num_key_value_heads": 2, "use_cache": False, **small}
    vision = {"model_type": "clip_vision_model", "image_size": 4, "patch_size": 2, "projection_dim": 8, **small}
    layers = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=31, **layers)
    return transformers.LlavaForConditionalGeneration(config)


def make_mixtral() -> nn.Module:
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "use_cache": False}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**sizes, **heads, output_router_logits=True, router_aux_loss_coef=1.0)
    return transformers.MixtralForCausalLM(config)


@case([SPMD])
def pictures_are_put_among_tokens() -> None:
    tokens = TOKENS.clamp(max=30)
    tokens[:, 2:6] = 31
    pictures = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(5))
    check_two_steps(make_llava, {"input_ids": tokens, "labels": tokens, "pixel_values": pictures})


@case([SPMD])
def experts_are_balanced() -> None:
    check_two_steps(make_mixtral, {"input_ids": TOKENS, "labels": TOKENS})


# Gradients that a step has freed


@case(XLA)
def second_step_with_the_same_gradients_is_refused() -> None:
    model, plain = sharded_and_plain()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    loss_of(model(part(X))).backward()
    first.step()
    for optimizer in (first, second):
        with pytest.raises(torchacc.EngineError, match="gradients that this SGD is to step with are gone"):
            optimizer.step()
    with pytest.raises(torchacc.EngineError, match="no gradients to clip any more"):
        model.clip_grad_norm_(1.0)
    step(plain, X, sgd(plain))
    model.zero_grad()
    first.step()
    check_parameters(model, plain)
    check_still_trains(model, plain)


# Edits of weights


class Edits(nn.Module):
    def __init__(self, edit: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        self.linear, self.head, self.edit = nn.Linear(8, 8), nn.Linear(8, 8), edit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.edit(self.linear)
        return self.head(torch.tanh(self.linear(x)))


def assign(linear: nn.Linear) -> None:
    linear.weight.data = linear.weight.data * 0.9


EDITS: dict[str, Callable[[nn.Linear], Any]] = {
    "clamped": lambda linear: linear.weight.clamp_(-0.1, 0.1),
    "as-data": lambda linear: linear.weight.data.mul_(0.9),
    "a-row": lambda linear: linear.weight.data[0].zero_(),
    "other-data": assign,
}
LOST = "the model's own forward edits"


@case(XLA, each=EDITS)
def weight_edited_in_forward(edit: Callable[[nn.Linear], Any]) -> None:
    if ENGINE == SPMD:
        check_two_steps(lambda: Edits(edit), {"x": X})
        return
    model, _ = sharded_and_plain(lambda: Edits(edit))
    with pytest.raises(torchacc.EngineError, match=LOST):
        model(part(X))


@case([SPMD])
def embedding_is_kept_within_its_norm() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(32, 8, max_norm=1.0), nn.Linear(8, 8))

    check_two_steps(make, {"input": TOKENS})


def put_in_place(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.detach() * 0.5)


REFUSED_EDITS: dict[str, tuple[Callable[[nn.Linear], Any], dict[str, Any]]] = {
    "another-parameter": (put_in_place, {}),
    "recomputed": (EDITS["as-data"], {"memory": {"gc": True, "gc_cls": {"Edits"}}}),
    "bfloat16": (EDITS["as-data"], {"compute": {"bf16": True}}),
}


@case([SPMD], each=REFUSED_EDITS)
def edit_that_would_be_lost_is_refused(refused: tuple[Callable[[nn.Linear], Any], dict[str, Any]]) -> None:
    edit, options = refused
    model, _ = sharded_and_plain(lambda: nn.Sequential(Edits(edit), nn.Linear(8, 4)), **options)
    with pytest.raises(torchacc.EngineError, match=LOST):
        model(part(X))


# Edits between two steps


DATA: dict[str, Callable[[nn.Linear, torch.Tensor], Any]] = {
    "a-full-tensor": lambda linear, new: setattr(linear.weight, "data", new),
    "a-view": lambda linear, new: setattr(linear.weight, "data", torch.cat([new, new])[4:12]),
    "its-own-times": lambda linear, new: setattr(linear.weight, "data", linear.weight.data * 0.5),
}


@case(XLA)
def data_is_assigned() -> None:
    model, plain = sharded_and_plain(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    new = torch.randn(8, 8, generator=torch.Generator().manual_seed(9))
    for assign_data in DATA.values():
        for each in (model, plain):
            assign_data(each[0], new.to(each[0].weight.device))
        check_parameters(model, plain)
        check_still_trains(model, plain)


@case([SPMD])
def data_of_another_shape_is_refused() -> None:
    model, _ = sharded_and_plain(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    model[0].weight.data = model[0].weight.data[:, :4]
    with pytest.raises(torchacc.EngineError, match="'0.weight' was sharded with the shape .8, 8., and has got data of"):
        torchacc.full_state_dict(model)


# PyTorch's own recompute


class Checkpoints(nn.Module):
    def __init__(self, run: Callable[["Checkpoints", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.run = nn.Linear(8, 8), nn.Linear(8, 8), run
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.run(self, self.first(x)))

    def tail(self, x: torch.Tensor, *, by: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x) * by


def nested(model: Checkpoints, x: torch.Tensor) -> torch.Tensor:
    def outer(y: torch.Tensor) -> torch.Tensor:
        return y + checkpoint(model.layers[1], model.layers[0](y), use_reentrant=False)

    return checkpoint(outer, x, use_reentrant=False)


CHECKPOINTS: dict[str, Callable[[Checkpoints, torch.Tensor], torch.Tensor]] = {
    "units": lambda model, x: checkpoint(model.layers[1], checkpoint(model.layers[0], x, use_reentrant=True)),
    "a-method": lambda model, x: checkpoint(model.tail, x, by=x, use_reentrant=False, preserve_rng_state=False),
    "nested": nested,
    "in-segments": lambda model, x: checkpoint_sequential(model.layers, 2, x, use_reentrant=False),
}


@case(XLA, each=CHECKPOINTS)
def models_own_checkpoint(run: Callable[[Checkpoints, torch.Tensor], torch.Tensor]) -> None:
    check_two_steps(lambda: Checkpoints(run), {"x": X})


@case(XLA)
def checkpoint_around_the_model() -> None:
    model, plain = sharded_and_plain(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval())
    for each, x in ((model, part(X)), (plain, X)):
        checkpoint(lambda y, each=each: each(y).square().mean(), x.requires_grad_(), use_reentrant=False).backward()
    check_gradients(model, plain)


# Programs that differ only in which of two like weights they read


class Tasks(nn.Module):
    """Runs two heads of one shape, and returns the loss of one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

    def forward(self, x: torch.Tensor, task: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        hidden = self.body(x)
        outputs = {name: head(hidden) for name, head in self.heads.items()}
        return loss_of(outputs[task]), outputs


@case(XLA)
def each_task_has_its_own_loss() -> None:
    model, plain = sharded_and_plain(Tasks)
    pairs = [(each, sgd(each), x) for each, x in ((model, part(X)), (plain, X))]
    for task in "abab":
        losses, kept = [], []  # what runs beside the loss is a result of the same program
        for each, optimizer, x in pairs:
            optimizer.zero_grad()
            loss, outputs = each(x, task)
            loss.backward()
            optimizer.step()
            losses.append(plain_value(loss))
            kept.append(outputs)
        check_equal(*losses, f"the loss of {task}")
    check_parameters(model, plain)


@case(XLA)
def each_task_is_evaluated_by_its_own_loss() -> None:
    model, plain = sharded_and_plain(Tasks)
    with torch.no_grad():
        for task in "ab":
            loss, kept = model(part(X), task)
            torchacc.sync()
            check_equal(plain_value(loss), plain(X, task)[0], f"the loss of {task}")
            del kept
