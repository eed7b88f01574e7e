"""Cases about what XLA does in another way than PyTorch in a forward; `behaviour_worker.py` runs them."""

from collections.abc import Callable
from typing import Any

import torch
from casekit import SPMD, XLA, case, check_equal, part, plain_value, sharded_and_plain
from torch import nn

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
        check_equal(plain_value(found), expected.detach(), "loss")
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
