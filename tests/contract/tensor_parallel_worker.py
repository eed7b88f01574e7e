"""Look at how layers lie split over four XLA devices of one process, which `test_tensor_parallel.py` launches."""

import copy
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from casekit import ADAM, ADAM_ABSOLUTE, RELATIVE, case, check_parameters, main
from torch import nn

import torchacc
from torchacc.engines import registry
from torchacc.engines.base import sharded_model

PROGRAMS = Path(os.environ.get("TORCHACC_TEST_PROGRAMS", os.devnull))
"""Where XLA writes the programs that it compiles."""
VOCAB, LENGTH = 132, 16
IDS = torch.randint(0, VOCAB, (8, LENGTH), generator=torch.Generator().manual_seed(3))


def make_llama(num_layers: int = 2, vocab_size: int = VOCAB) -> nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def accelerate(model: nn.Module, *, fsdp: int, tp: int, **options: Any) -> nn.Module:
    dist = {"fsdp": {"size": fsdp, "use_spmd": True}, "tp": {"size": tp, **options}}
    return torchacc.accelerate(model, None, torchacc.Config.from_dict({"backend": "xla", "dist": dist}))


def train(model: nn.Module, ids: torch.Tensor, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for _ in range(steps):
        step(model, ids, optimizer)
    return optimizer


def step(model: nn.Module, ids: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def put(ids: torch.Tensor) -> torch.Tensor:
    return registry.active_engine().put(ids)


def num_on_a_device(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's elements that lie on one device, as the runtime tells it."""
    from torch_xla import _XLAC

    (shards,) = _XLAC._get_local_shards([tensor])
    numbers = {shard.numel() for shard, _ in shards}
    assert len(numbers) == 1
    return numbers.pop()


@case()
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


@case(each={"with-fsdp": (2, 2, False), "alone": (1, 4, False), "along-the-sequence": (2, 2, True)})
def a_vocabulary_that_divides_is_split_and_trains_the_same(how: tuple[int, int, bool]) -> None:
    fsdp, tp, sequence_parallel = how
    model = make_llama()
    plain = copy.deepcopy(model)
    accelerate(model, fsdp=fsdp, tp=tp, sequence_parallel=sequence_parallel)
    train(model, put(IDS))
    train(plain, IDS)
    check_parameters(model, plain, absolute=ADAM_ABSOLUTE)


@case()
def an_own_plan_trains_the_same() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in "ab"])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    torch.manual_seed(2)
    model = Mlp()
    plain = copy.deepcopy(model)
    own = {r"\.0\.weight$": ["tp", "fsdp"], r"\.0\.bias$": ["tp"], r"\.2\.weight$": [None, "tp"]}
    accelerate(model, fsdp=2, tp=2, plan=own)
    x = torch.randn(4, 8)
    for each, data in ((model, put(x)), (plain, x)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(data).square().mean().backward()
            optimizer.step()
    check_parameters(model, plain)
    specs = sharded_model(model).plan.split.specs
    assert specs["layers.0.0.weight"] == ("tp", "fsdp")


@case(each={"to-fsdp": ((2, 2), (4, 1)), "from-fsdp": ((4, 1), (2, 2)), "to-tp-alone": ((2, 2), (1, 4))})
def a_checkpoint_loads_at_another_mesh(meshes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    before, after = meshes
    saved = accelerate(make_llama(), fsdp=before[0], tp=before[1])
    optimizer = train(saved, put(IDS))
    expected, expected_states = torchacc.full_state_dict(saved), states(saved, optimizer)
    with TemporaryDirectory() as folder:
        torchacc.checkpoint.save(Path(folder) / "saved", model=saved, optimizer=optimizer)
        next_loss = step(saved, put(IDS), optimizer)
        loaded = accelerate(make_llama(), fsdp=after[0], tp=after[1])
        optimizer = torch.optim.AdamW(loaded.parameters(), lr=1.0)
        torchacc.checkpoint.load(Path(folder) / "saved", model=loaded, optimizer=optimizer)
    found, found_states = torchacc.full_state_dict(loaded), states(loaded, optimizer)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found_states.keys() == expected_states.keys()
    assert all(torch.equal(found_states[key], expected_states[key]) for key in expected_states)
    assert step(loaded, put(IDS), optimizer) == pytest.approx(next_loss, rel=RELATIVE)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    whole = model.full_optim_state_dict(optimizer)["state"]
    return {(index, key): value for index, entry in whole.items() for key, value in entry.items()}


@case(each={"with-fsdp": (2, 2, False), "alone": (1, 4, False), "along-the-sequence": (1, 4, True)})
def what_a_step_sends(how: tuple[int, int, bool]) -> dict[str, list[str]]:
    """Return the groups of devices of each collective operation in the compiled step."""
    fsdp, tp, sequence_parallel = how
    # One layer, as no other case has: a program that was compiled before would not be written.
    model = accelerate(make_llama(1), fsdp=fsdp, tp=tp, sequence_parallel=sequence_parallel)
    before = set(PROGRAMS.glob("*.cpu_after_optimizations.txt"))
    train(model, put(IDS), steps=1)
    programs = set(PROGRAMS.glob("*.cpu_after_optimizations.txt")) - before
    step = max((path.read_text() for path in programs), key=len)
    found: dict[str, list[str]] = {}
    for kind, groups in re.findall(r" ([a-z-]+)\(.*(?:replica_groups|source_target_pairs)=(\S+)", step):
        found.setdefault(kind, []).append(groups.removesuffix(","))
    return found


if __name__ == "__main__":
    main(lambda: accelerate(make_llama(1), fsdp=2, tp=2))
