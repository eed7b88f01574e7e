"""What torchao's optimizers do with shards, beside unsharded parameters; for `test_optimizer_checks.py`.

TORCHDYNAMO_DISABLE=1 python low_precision_program.py out/ shared/     on one rank first, then under torchrun
"""

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from program_cases import run_cases
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8, _AdamW

import torchacc
from torchacc.errors import CheckpointError, ConfigError

RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
X = torch.randn(2 * NUM_RANKS, 64, generator=torch.Generator().manual_seed(1))
OWN = X[2 * RANK : 2 * RANK + 2]


def seeded():
    torch.manual_seed(0)
    # A half of a weight has 16 blocks of 256, and the 4096 elements from which on torchao quantizes.
    return nn.Sequential(nn.Linear(64, 128, bias=False), nn.Tanh(), nn.Linear(128, 64, bias=False))


def sharded(strategy="FULL_SHARD", **compute):
    config = {"backend": "native", "compute": compute}
    config["dist"] = {"fsdp": {"size": NUM_RANKS, "sharding_strategy": strategy}}
    return torchacc.accelerate(seeded(), None, torchacc.Config.from_dict(config))


def train(model, optimizer, x, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def new_folder():
    found = [tempfile.mkdtemp() if RANK == 0 else None]
    if NUM_RANKS > 1:
        dist.broadcast_object_list(found)
    return f"{found[0]}/saved"


def shards_are_updated_as_unsharded_weights_are():
    for kind in (_AdamW, AdamW8bit, AdamW4bit, AdamWFp8):
        model, plain = sharded(), seeded()
        train(model, kind(model.parameters(), lr=0.01), OWN)
        train(plain, kind(plain.parameters(), lr=0.01), X)
        for name, tensor in torchacc.full_state_dict(model).items():
            # Where a gradient differs in its last digit, its state may become the next of few numbers.
            alike = torch.isclose(tensor, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
            assert alike.float().mean() > 0.99, (kind.__name__, name)


def state_in_full_is_that_of_pytorchs():
    model, plain = sharded(), seeded()
    train(model, _AdamW(model.parameters(), lr=0.01, eps=1e-4), OWN)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-4), X)
    for name, tensor in torchacc.full_state_dict(model).items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


def random_rounding_resumes_bit_for_bit():
    def made():
        model = sharded(bf16=True, master_dtype="bfloat16")
        return model, _AdamW(model.parameters(), lr=0.01, bf16_stochastic_round=True)

    model, optimizer = made()
    train(model, optimizer, OWN)
    folder = new_folder()
    torchacc.checkpoint.save(folder, model=model, optimizer=optimizer)
    train(model, optimizer, OWN)
    expected = torchacc.full_state_dict(model)
    model, optimizer = made()
    torchacc.checkpoint.load(folder, model=model, optimizer=optimizer)
    train(model, optimizer, OWN)
    for name, tensor in torchacc.full_state_dict(model).items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name]), name


def random_rounding_of_replicas_is_refused():
    model = sharded("NO_SHARD", bf16=True, master_dtype="bfloat16")
    optimizer = AdamW8bit(model.parameters(), bf16_stochastic_round=True)
    if NUM_RANKS == 1:
        train(model, optimizer, OWN)
        return
    with pytest.raises(ConfigError, match=r"AdamW8bit\(bf16_stochastic_round=True\) with 2 replicas of each weight"):
        train(model, optimizer, OWN)


def quantized_state_resumes_bit_for_bit():
    for kind in (AdamW8bit, AdamW4bit, AdamWFp8):
        model = sharded()
        optimizer = kind(model.parameters(), lr=0.01)
        train(model, optimizer, OWN)
        folder = new_folder()
        torchacc.checkpoint.save(folder, model=model, optimizer=optimizer)
        torchacc.checkpoint.verify(folder)
        train(model, optimizer, OWN)
        expected = torchacc.full_state_dict(model)
        model = sharded()
        optimizer = kind(model.parameters(), lr=0.01)
        torchacc.checkpoint.load(folder, model=model, optimizer=optimizer)
        train(model, optimizer, OWN)
        for name, tensor in torchacc.full_state_dict(model).items():
            assert torch.equal(tensor, expected[name]), (kind.__name__, name)


def quantized_state_of_another_size_loads_or_is_refused():
    """What one device has saved loads on two where shards consist of whole blocks that are large enough."""
    folder, kept = Path(sys.argv[2]), {}
    for name, rows in (("fits", 128), ("too-small", 64)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, rows, bias=False))
        config = torchacc.Config(backend="native")
        config.dist.fsdp.size = NUM_RANKS
        torchacc.accelerate(model, None, config)
        optimizer = AdamW8bit(model.parameters(), lr=0.01)
        if NUM_RANKS == 1:
            train(model, optimizer, X[:1].repeat(2, 1))
            torchacc.checkpoint.save(folder / name, model=model, optimizer=optimizer)
            train(model, optimizer, X[:1].repeat(2, 1))
            torch.save(torchacc.full_state_dict(model), folder / f"{name}.pt")
        elif name == "fits":
            torchacc.checkpoint.load(folder / name, model=model, optimizer=optimizer)
            train(model, optimizer, X[:1].repeat(2, 1))
            kept[name] = torchacc.full_state_dict(model)["0.weight"]
            torch.testing.assert_close(kept[name], torch.load(folder / f"{name}.pt")["0.weight"], rtol=1e-6, atol=1e-8)
        else:
            with pytest.raises(CheckpointError, match="too small here to be quantized in blocks of 256 elements"):
                torchacc.checkpoint.load(folder / name, model=model, optimizer=optimizer)
            train(model, AdamW8bit(model.parameters()), OWN)  # nothing was changed


def quantized_state_has_no_full_form():
    model = sharded()
    optimizer = AdamW8bit(model.parameters())
    train(model, optimizer, OWN)
    with pytest.raises(CheckpointError, match=r"the optimizer's exp_avg of '0\.weight' is quantized in blocks"):
        torchacc.optim_state_dict(model, optimizer)


CASES = [
    shards_are_updated_as_unsharded_weights_are,
    state_in_full_is_that_of_pytorchs,
    random_rounding_resumes_bit_for_bit,
    random_rounding_of_replicas_is_refused,
    quantized_state_resumes_bit_for_bit,
    quantized_state_of_another_size_loads_or_is_refused,
    quantized_state_has_no_full_form,
]

if __name__ == "__main__":
    folder = Path(sys.argv[1]) / str(RANK)
    folder.mkdir(exist_ok=True)
    run_cases(CASES, folder)
