"""Which optimizers are told that they could step faster."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adam, AdamW, NAdam

from torchacc.engines.fused_steps import faster_choice, fuse, leave_out_fused

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def made(kind, **options):
    return kind([nn.Parameter(torch.zeros(2))], lr=0.1, **options)


class Own(AdamW):
    """An optimizer of a script, whose step may be another."""


@pytest.mark.parametrize(
    ("optimizer", "device", "expected"),
    [
        (made(AdamW), CPU, "fused=True"),
        (made(SGD), CPU, None),
        (made(AdamW, fused=True), CPU, None),
        (made(AdamW, foreach=True), CPU, None),
        (made(NAdam), CPU, None),
        (made(AdamW), GPU, None),
        (made(Adam, foreach=False), GPU, "fused=True"),
        (made(Adadelta, foreach=False), GPU, "foreach=True"),
        (made(Adam, foreach=False), torch.device("mps"), None),
        (made(AdamW, capturable=True, foreach=False), GPU, None),
        (made(Own), CPU, None),
    ],
)
def test_a_loop_over_parameters_is_named(optimizer, device, expected):
    assert faster_choice(optimizer, device) == expected


def test_a_fused_step_is_left_out_where_there_is_none():
    optimizer = made(AdamW, fused=True)
    assert leave_out_fused(optimizer)
    assert not leave_out_fused(optimizer)
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("optimizer", "device", "expected"),
    [
        (made(AdamW), CPU, True),
        (made(SGD, momentum=0.9), CPU, None),
        (made(AdamW, fused=False), CPU, False),
        (made(AdamW, foreach=False), CPU, None),
        (made(AdamW), GPU, None),
        (made(NAdam), CPU, "absent"),
        (made(Own), CPU, None),
        (AdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]), CPU, None),
    ],
)
def test_a_script_s_choice_of_implementation_is_kept(optimizer, device, expected):
    assert fuse(optimizer, device) == (expected is True)
    assert not fuse(optimizer, device)
    assert optimizer.param_groups[0].get("fused", "absent") == expected


def test_a_group_that_was_added_is_fused_too():
    optimizer = made(AdamW)
    assert fuse(optimizer, CPU)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert fuse(optimizer, CPU)
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
