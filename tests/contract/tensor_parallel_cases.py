"""How layers lie split over four devices, what a step sends between them, and checkpoints of such models."""

import copy
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from casekit import ADAM, ADAM_ABSOLUTE, ENGINE, NATIVE, RANK, RELATIVE, SPMD, by_rank, check_parameters
from casekit import case as case_of
from torch import nn

import torchacc
from torchacc.engines import expected_calls, registry
from torchacc.engines.native import script_reads
from torchacc.engines.sharded_model import sharded_model

PROGRAMS = Path(os.environ.get("TORCHACC_TEST_PROGRAMS", os.devnull))
"""Where XLA writes the programs that it compiles."""
BOTH = (NATIVE, SPMD)
case = partial(case_of, num_devices=4)
VOCAB, LENGTH = 132, 16
IDS = torch.randint(0, VOCAB, (8, LENGTH), generator=torch.Generator().manual_seed(3))


def make_llama(num_layers: int = 2, intermediate_size: int = 48, num_key_value_heads: int = 4) -> nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def make_gpt2() -> nn.Module:
    torch.manual_seed(1)
    dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    size = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **dropouts, eos_token_id=1))


def accelerate(model: nn.Module, *, fsdp: int, tp: int, dp: int = 1, **options: Any) -> nn.Module:
    dist = {"dp": {"size": dp}, "fsdp": {"size": fsdp, "use_spmd": ENGINE == SPMD}, "tp": {"size": tp, **options}}
    return torchacc.accelerate(
        model, None, torchacc.Config.from_dict({"backend": ENGINE.partition("-")[0], "dist": dist})
    )


def train(model: nn.Module, ids: torch.Tensor, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for _ in range(steps):
        step(model, ids, optimizer)
    return optimizer


def step(model: nn.Module, ids: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def put(batch: torch.Tensor) -> torch.Tensor:
    """Return what this process sees of a global batch, on its devices."""
    engine = registry.active_engine()
    parts = batch.chunk(engine.mesh.data_parallel_size)
    return engine.to_device(torch.cat([parts[index] for index in engine.data_parallel_ranks]))


def num_on_a_device(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's elements that lie on one device, as the runtime tells it."""
    if ENGINE == NATIVE:
        return tensor.to_local().numel()
    from torch_xla import _XLAC

    (shards,) = _XLAC._get_local_shards([tensor])
    numbers = {shard.numel() for shard, _ in shards}
    assert len(numbers) == 1
    return numbers.pop()


@case(BOTH)
def a_device_holds_its_part_of_every_layer_and_of_the_optimizers_state() -> None:
    model = accelerate(make_llama(), fsdp=2, tp=2)
    optimizer = train(model, put(IDS), steps=1)
    found = {name: num_on_a_device(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        share = 4 if parameter.dim() > 1 else 2  # a norm is not split over tp
        assert found[name] * share == parameter.numel(), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert num_on_a_device(optimizer.state[parameter][key]) == found[name], (name, key)
    assert torchacc.describe(model).num_parameters_per_device == sum(found.values())
    assert torchacc.describe(model).mesh == "dp 1 x fsdp 2 x tp 2"


@case(BOTH, each={"with-fsdp": (2, 2, False), "alone": (1, 4, False)})
@case((SPMD,), each={"along-the-sequence": (2, 2, True)})
def a_vocabulary_that_divides_is_split_and_trains_the_same(how: tuple[int, int, bool]) -> None:
    fsdp, tp, sequence_parallel = how
    model = make_llama()
    plain = copy.deepcopy(model)
    accelerate(model, fsdp=fsdp, tp=tp, sequence_parallel=sequence_parallel)
    train(model, put(IDS))
    train(plain, IDS)
    check_parameters(model, plain, absolute=ADAM_ABSOLUTE)


@case((NATIVE,), each={"two-for-four": (1, 4, 2), "one-for-two": (2, 2, 1)})
def devices_that_share_a_key_value_head_train_the_same(how: tuple[int, int, int]) -> None:
    fsdp, tp, num_heads = how
    model = make_llama(num_key_value_heads=num_heads)
    plain = copy.deepcopy(model)
    accelerate(model, fsdp=fsdp, tp=tp)
    train(model, put(IDS))
    train(plain, IDS)
    check_parameters(model, plain, absolute=ADAM_ABSOLUTE)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in "ab"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Odd(nn.Module):
    """One layer of each kind, whose parts are not those that the next one computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(12, 8, padding_idx=7), nn.Embedding(12, 8)
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.third, self.conv = nn.Linear(8, 8), nn.Conv1d(8, 8, 1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))
        for bias in (self.first.bias, self.second.bias, self.third.bias):
            nn.init.normal_(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.rows(x) + self.columns(x))
        x = self.attention(x, x, x)[0]
        x = self.second(torch.softmax(self.first(x), -1).flip(-1))
        return self.conv(self.third(x).transpose(1, 2)) * self.scale[:, None]


X4 = torch.randn(4, 8, generator=torch.Generator().manual_seed(4))
PAIRS = {r"\.0\.weight$": ["tp", None], r"\.0\.bias$": ["tp"], r"\.2\.weight$": [None, "tp"]}
ODD = {
    "attention.in_proj_weight": ["tp", None],
    "attention.out_proj.weight": ["tp", None],
    "rows": ["tp", None],
    "columns": [None, "tp"],
    "norm.weight": ["tp"],
    "first.weight": ["tp", None],
    "first.bias": ["tp"],
    "second.weight": [None, "tp"],
    "second.bias": ["tp"],
    "third.weight": ["tp", None],
    "conv.weight": [None, "tp", None],
    "scale": ["tp"],
}


@case(BOTH, each={"pairs": (Mlp, PAIRS, X4)})
@case((NATIVE,), each={"fits-badly": (Odd, ODD, IDS[:4] % 12)})
@case((SPMD,), each={"over-fsdp": (Mlp, {**PAIRS, r"\.0\.weight$": ["tp", "fsdp"]}, X4)})
def an_own_plan_trains_the_same(how: tuple[type[nn.Module], dict[str, Any], torch.Tensor]) -> None:
    make, own, x = how
    torch.manual_seed(2)
    model = make()
    plain = copy.deepcopy(model)
    accelerate(model, fsdp=2, tp=2, plan=own)
    for each, data in ((model, put(x)), (plain, x)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(data).square().mean().backward()
            optimizer.step()
    check_parameters(model, plain)
    specs = sharded_model(model).plan.tensor_parallel.specs
    assert set(specs.values()) == {tuple(spec) for spec in own.values()}


@case(
    BOTH,
    each={"to-fsdp": ((2, 2), (4, 1)), "from-fsdp": ((4, 1), (2, 2)), "to-tp-alone": ((2, 2), (1, 4))},
    left_out=("to-fsdp", "to-tp-alone"),
)
def a_checkpoint_loads_at_another_mesh(meshes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    before, after = meshes
    # An odd part of a layer, which a second process then cannot share evenly.
    width = 48 if 4 in (before[1], after[1]) else 50
    saved = accelerate(make_llama(intermediate_size=width), fsdp=before[0], tp=before[1])
    optimizer = train(saved, put(IDS))
    expected, expected_states = torchacc.full_state_dict(saved), states(saved, optimizer)
    folder = Path(sys.argv[2]) / f"saved-{before}-{after}"
    torchacc.checkpoint.save(folder, model=saved, optimizer=optimizer)
    next_loss = step(saved, put(IDS), optimizer)
    loaded = accelerate(make_llama(intermediate_size=width), fsdp=after[0], tp=after[1])
    optimizer = torch.optim.AdamW(loaded.parameters(), lr=1.0)
    torchacc.checkpoint.load(folder, model=loaded, optimizer=optimizer)
    found, found_states = torchacc.full_state_dict(loaded), states(loaded, optimizer)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found_states.keys() == expected_states.keys()
    assert all(torch.equal(found_states[key], expected_states[key]) for key in expected_states)
    assert step(loaded, put(IDS), optimizer) == pytest.approx(next_loss, rel=RELATIVE)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    whole = model.full_optim_state_dict(optimizer, rank0_only=False)["state"]
    return {(index, key): value for index, entry in whole.items() for key, value in entry.items()}


@case((NATIVE,))
def an_evaluation_in_inference_mode_of_split_layers_is_that_of_the_unsharded_model() -> None:
    model = make_llama(num_key_value_heads=1)
    plain = copy.deepcopy(model)
    accelerate(model, fsdp=2, tp=2)
    for _ in range(2):  # before and after a step
        with torch.inference_mode():
            logits, expected = model(input_ids=put(IDS)).logits, plain(input_ids=put(IDS).cpu()).logits
        torch.testing.assert_close(logits.cpu(), expected, rtol=1e-4, atol=ADAM_ABSOLUTE * 10)
        train(model, put(IDS), steps=1)
        train(plain, IDS, steps=1)
    check_parameters(model, plain, absolute=ADAM_ABSOLUTE)


def make_t5() -> nn.Module:
    torch.manual_seed(1)
    size = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**size, decoder_start_token_id=0))


@case((NATIVE,))
def processes_that_share_layers_draw_the_same_random_numbers() -> None:
    model = accelerate(make_t5(), fsdp=2, tp=2).train()
    torch.manual_seed(RANK)
    ids = IDS[:2]
    logits = by_rank(model(input_ids=ids, labels=ids).logits.tolist())
    assert logits[0] == logits[1]
    assert logits[2] == logits[3]
    assert logits[0] != logits[2]


@case((NATIVE,))
def states_that_would_need_runs_are_refused() -> None:
    model = accelerate(make_llama(1), fsdp=2, tp=2)
    optimizer = train(model, put(IDS), steps=1)
    folder = Path(sys.argv[2]) / "ranks"
    refused = {
        "a state in shards": lambda: torchacc.state_dict(model, torchacc.StateDictType.SHARDED_STATE_DICT),
        "a local state": lambda: torchacc.state_dict(model, torchacc.StateDictType.LOCAL_STATE_DICT),
        "an optimizer's state in shards": lambda: model.sharded_optim_state_dict(optimizer),
        "a file for each rank": lambda: torchacc.save(optimizer.state_dict(), folder, master_only=False),
    }
    for what, act in refused.items():
        with pytest.raises(torchacc.CheckpointError, match=rf"^{what} is not available.*torchacc\.checkpoint\.save"):
            act()


@case((NATIVE,))
def a_full_state_loads_as_it_was() -> None:
    model = accelerate(make_llama(1), fsdp=2, tp=2)
    optimizer = train(model, put(IDS), steps=1)
    expected, whole = torchacc.full_state_dict(model), model.full_optim_state_dict(optimizer, rank0_only=False)
    own = optimizer.state_dict()
    train(model, put(IDS), steps=1)
    model.load_state_dict(expected)
    found = torchacc.full_state_dict(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for given, options in ((whole, {}), (own, {}), (whole if RANK == 0 else {}, {"rank0_only": True})):
        other = torch.optim.AdamW(model.parameters(), **ADAM)
        other.load_state_dict(model.optim_state_dict_to_load(other, given, **options))
        found = model.full_optim_state_dict(other, rank0_only=False)["state"]
        for index, entry in whole["state"].items():
            assert all(torch.equal(found[index][key], value) for key, value in entry.items())


def split_and_plain(fsdp: int, tp: int) -> tuple[nn.Module, nn.Module]:
    model = make_llama()
    plain = copy.deepcopy(model)
    return accelerate(model, fsdp=fsdp, tp=tp), plain


@case((NATIVE,), each={"with-fsdp": (2, 2), "alone": (1, 4)})
def a_penalty_of_split_weights_and_what_a_script_writes_into_them_train_the_same(how: tuple[int, int]) -> None:
    model, plain = split_and_plain(*how)
    for each, ids in ((model, put(IDS)), (plain, IDS)):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        penalty = sum(parameter.square().sum() for parameter in each.parameters())
        (each(input_ids=ids, labels=ids).loss + 0.01 * penalty).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in each.parameters():
                parameter[1:3] = 2 * parameter[1:3]
    check_parameters(model, plain)


PARTS = {"with-fsdp": (2, 2, 1), "with-copies": (1, 2, 2), "alone": (1, 4, 1)}


@case((NATIVE,), each=PARTS)
def parts_outside_of_layers_compute_the_same_by_themselves(how: tuple[int, int, int]) -> None:
    fsdp, tp, dp = how
    model = make_llama()
    plain = copy.deepcopy(model)
    accelerate(model, fsdp=fsdp, tp=tp, dp=dp)
    for _ in range(2):
        for each, ids in ((model, put(IDS)), (plain, IDS)):
            optimizer = torch.optim.SGD(each.parameters(), 0.1)
            hidden = each.model(input_ids=ids).last_hidden_state + each.get_input_embeddings()(ids)
            hidden = each.model.layers[0].input_layernorm(hidden)
            torch.nn.functional.cross_entropy(each.lm_head(hidden).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
    check_parameters(model, plain)


@case((NATIVE,))
def parts_of_layers_that_are_split_do_not_compute_by_themselves() -> None:
    model, _ = split_and_plain(2, 2)
    hidden, layer = torch.randn(2, LENGTH, 32, device=model.device), model.model.layers[0]
    narrow = torch.randn(2, LENGTH, 48, device=model.device)
    for part, given in ((layer.mlp, hidden), (layer.mlp.down_proj, narrow), (layer.self_attn.q_proj, hidden)):
        with pytest.raises(torchacc.EngineError, match="that dist.tp splits was called by itself"), torch.no_grad():
            part(given)


@case((NATIVE,), each={"with-fsdp": (2, 2), "alone": (1, 4)})
def an_encoder_that_a_script_calls_by_itself_trains_and_generates_the_same(how: tuple[int, int]) -> None:
    model = make_t5().eval()
    plain = copy.deepcopy(model)
    accelerate(model, fsdp=how[0], tp=how[1])
    for each, ids in ((model, put(IDS)), (plain, IDS)):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        each(encoder_outputs=each.get_encoder()(ids), labels=ids).loss.backward()
        optimizer.step()
    check_parameters(model, plain)
    found, expected = (
        each.generate(IDS[:4].to(each.device), max_new_tokens=5, min_new_tokens=5) for each in (model, plain)
    )
    assert found.tolist() == expected.tolist()


@case((NATIVE,))
def a_value_of_split_weights_that_only_some_processes_read_is_named() -> None:
    model, _ = split_and_plain(2, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected_calls, "_LOOK_SECS", 0.1)
        patch.setattr(script_reads._reads, "num_left", 1, raising=False)
        with pytest.raises(torchacc.EngineError, match=r"torchacc.full_state_dict\(\).*: every process"):
            torchacc.full_state_dict(model) if RANK else model.model.layers[0].mlp.up_proj.weight.norm().item()


@case((NATIVE,), each={"with-fsdp": (2, 2), "alone": (1, 4)})
def what_a_script_draws_into_split_weights_is_what_it_draws_into_full_ones(how: tuple[int, int]) -> None:
    model, plain = split_and_plain(*how)
    plain.to(model.device)  # each kind of device has random numbers of its own
    for each in (model, plain):
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in each.parameters():
                torch.nn.init.normal_(parameter, std=0.02)
                parameter.add_(torch.randn_like(parameter))
    check_parameters(model, plain, absolute=0.0)


@case((NATIVE,))
def rows_that_are_padding_are_not_trained() -> None:
    torch.manual_seed(1)
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=3,
        )
    )
    plain = copy.deepcopy(model)
    accelerate(model, fsdp=2, tp=2)
    ids = IDS.clone()
    ids[:, :4] = 3
    ids[:, 4:6] = VOCAB // 2 + 3
    train(model, put(ids))
    train(plain, ids)
    check_parameters(model, plain, absolute=ADAM_ABSOLUTE)


def compiled_step(run: Callable[[], Any]) -> Path:
    """Return where the longest is of the programs that XLA compiles while something runs."""
    before = set(PROGRAMS.glob("*.cpu_after_optimizations.txt"))
    run()
    programs = set(PROGRAMS.glob("*.cpu_after_optimizations.txt")) - before
    return max(programs, key=lambda path: path.stat().st_size)


@case((SPMD,), each={"with-fsdp": (2, 2, False), "alone": (1, 4, False), "along-the-sequence": (1, 4, True)})
def what_a_step_sends(how: tuple[int, int, bool]) -> dict[str, list[str]]:
    """Return the groups of devices of each collective operation in the compiled step."""
    fsdp, tp, sequence_parallel = how
    # One layer, as no other case has: a program that was compiled before would not be written.
    model = accelerate(make_llama(1), fsdp=fsdp, tp=tp, sequence_parallel=sequence_parallel)
    step = compiled_step(lambda: train(model, put(IDS), steps=1)).read_text()
    found: dict[str, list[str]] = {}
    for kind, groups in re.findall(r" ([a-z-]+)\(.*(?:replica_groups|source_target_pairs)=(\S+)", step):
        found.setdefault(kind, []).append(groups.removesuffix(","))
    return found


@case([NATIVE])
def other_memory_between_forward_and_backward_is_refused() -> None:
    """Where nobody shares the parts of layers, these compute with the parameters' own memory."""
    model = accelerate(make_llama(), fsdp=1, tp=4)
    loss = model(input_ids=IDS, labels=IDS).loss
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    with pytest.raises(torchacc.EngineError, match="parameter.data was set between a forward and its backward"):
        loss.backward()
    alone = make_llama()
    for each in (alone, other := accelerate(make_llama(), fsdp=1, tp=4)):
        for parameter in each.parameters():
            parameter.data = parameter.data * 1.5
        each(input_ids=IDS, labels=IDS).loss.backward()
    norm, expected = (nn.utils.clip_grad_norm_(each.parameters(), 1e9) for each in (other, alone))
    assert float(norm) == pytest.approx(float(expected), rel=RELATIVE)


def with_adapters(model: nn.Module, names: list[str]) -> nn.Module:
    """Return a model that trains adapters of LoRA alone, which begin as something else than zero."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False))


ADAPTED: Mapping[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "llama": (make_llama, ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]),
    "shared-heads": (lambda: make_llama(num_key_value_heads=1), ["q_proj", "k_proj", "v_proj"]),
    "gpt2": (make_gpt2, ["c_attn", "c_proj", "c_fc"]),
}


@case(BOTH, each=ADAPTED)
def adapters_of_split_layers_train_the_same(how: tuple[Callable[[], nn.Module], list[str]]) -> None:
    make, names = how
    model, plain = with_adapters(make(), names), with_adapters(make(), names)
    accelerate(model, fsdp=2, tp=2)
    train(model, put(IDS))
    train(plain, IDS)
    check_parameters(model, plain, absolute=ADAM_ABSOLUTE)
    split = [name for name, spec in sharded_model(model).plan.tensor_parallel.specs.items() if "lora" in name and spec]
    assert len(split) >= len(names) - 2 * (make is not make_llama), split
