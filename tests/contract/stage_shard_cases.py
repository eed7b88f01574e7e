"""What each stage holds, sends and saves."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tensor_parallel_cases
import torch
from casekit import (
    ADAM,
    ENGINE,
    NATIVE,
    NUM_DEVICES,
    RELATIVE,
    SPMD,
    case,
    check_parameters,
)
from pipeline_cases import EIGHT, config, make
from sequence_cases import VOCAB, part_of, plain, step
from tensor_parallel_cases import IDS, put
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import torchacc


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


@case([NATIVE])
def parameters_of_other_stages_have_the_number_of_elements_that_they_have_there() -> None:
    model, plain_model = make("gpt2", 4), make("gpt2", 4)
    torchacc.accelerate(model, None, config(2))
    expected = [parameter.numel() for parameter in plain_model.parameters()]
    for count in (torch.numel, torch.Tensor.numel, torch.Tensor.nelement):
        assert list(map(count, model.parameters())) == expected
    assert model.num_parameters() == plain_model.num_parameters()
    assert model.get_memory_footprint() == plain_model.get_memory_footprint()


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
        model = make("gpt2", layers=2)
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
