"""Optimizers by name, which parameters decay, and learning rates over a stage."""

from typing import get_args

import pytest
import torch
from torch import nn

import torchacc
from torchacc.errors import ConfigError
from torchacc.train.config import Schedule, SchedulerConfig
from torchacc.train.optim import DECAYS, check_options, lr_factor, make_optimizer, make_scheduler


def sharded_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    model[2].weight.requires_grad_(False)
    config = torchacc.Config()
    config.backend = "native"
    return torchacc.accelerate(model, config=config)


def test_biases_norms_and_frozen_weights_do_not_decay():
    model = sharded_model()
    optimizer = make_optimizer(model, "AdamW", {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.5})
    assert type(optimizer) is torch.optim.AdamW
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [([names[p] for p in group["params"]], group["weight_decay"]) for group in optimizer.param_groups]
    assert groups == [(["0.weight"], 0.5), (["0.bias", "1.weight", "1.bias"], 0.0)]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}


def test_without_decay_there_is_one_group():
    optimizer = make_optimizer(sharded_model(), "sgd", {"lr": 0.1, "momentum": 0.9})
    assert [(len(group["params"]), group["momentum"]) for group in optimizer.param_groups] == [(4, 0.9)]


def test_the_step_is_fused_unless_an_option_says_otherwise():
    model = sharded_model()

    def chosen(name, **options):
        group = make_optimizer(model, name, {"lr": 0.1, **options}).param_groups[0]
        return group.get("fused"), group["foreach"]

    assert chosen("adamw") == chosen("adam") == (True, None)
    assert chosen("sgd") == (None, None)
    assert chosen("adamw", fused=False) == (False, None)
    assert chosen("adamw", foreach=True) == (None, True)
    assert chosen("radam") == (None, None)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("adanw", {"lr": 0.1}, "optimizer.name = 'adanw'.*did you mean 'AdamW'"),
        ("lbfgs", {"lr": 0.1}, "optimizer.name = 'lbfgs' cannot train here"),
        ("sgd", {"lr": 0.1, "beta": 0.9}, "optimizer.beta = 0.9: SGD has no such option"),
        ("adam", {"lr": 0.1, "wieght_decay": 0}, "optimizer.wieght_decay.*did you mean 'weight_decay'"),
        ("adam", {"lr": 0.1, "params": []}, "optimizer.params = .*no such option"),
        ("adamw", {"lr": 0.1, "betas": (0.9, 1.5)}, "AdamW refuses .*beta parameter at index 1: 1.5"),
        ("adamw", {"lr": 0.1, "betas": (0.9,)}, "AdamW refuses .*'betas': .*IndexError"),
        ("adamw", {"lr": 0.1, "betas": (0.9, 0.9, 0.9)}, "AdamW refuses .*'betas': .*too many values"),
        ("adamw", {"lr": 0.1, "differentiable": True}, "optimizer.differentiable = True: no step is differentiated"),
        ("adam", {"lr": 0.1, "capturable": True}, "optimizer.capturable = True: no CUDA graph is captured"),
        ("rprop", {"lr": 0.1}, "optimizer.name = 'rprop' cannot train here"),
        ("muon", {"lr": 0.1}, "optimizer.name = 'muon' cannot train here"),
    ],
)
def test_what_an_optimizer_does_not_have_is_refused(name, options, text):
    with pytest.raises(ConfigError, match=text):
        check_options(name, options)


@pytest.mark.parametrize("name", ["adadelta", "adafactor", "adagrad", "adamax", "asgd", "nadam", "radam", "rmsprop"])
def test_the_other_optimizers_are_taken(name):
    check_options(name, {"lr": 0.1, "weight_decay": 0.1})


def rates(name, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    config = SchedulerConfig(**{"name": name, "warmup_steps": 2, "min_lr_ratio": 0.1} | options)
    scheduler = make_scheduler(optimizer, config, total_steps=6)
    found = []
    for _ in range(6):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_a_file_takes_the_schedules_that_there_are():
    assert set(get_args(Schedule)) == set(DECAYS)


def test_each_schedule_warms_up_and_falls_as_its_name_says():
    assert rates("constant") == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert rates("linear") == pytest.approx([1.0, 2.0, 2.0, 1.55, 1.1, 0.65])
    cosine = rates("cosine")
    assert cosine[:3] == [1.0, 2.0, 2.0]
    assert cosine[4] == pytest.approx(1.1)  # half of the way from 2 to 0.2
    assert rates("linear", warmup_steps=0, min_lr_ratio=0.0)[0] == 2.0


def test_the_rate_ends_at_its_lowest_and_stays_there():
    ends = [lr_factor(step, SchedulerConfig(warmup_steps=2), total_steps=6) for step in (6, 7, 100)]
    assert ends == pytest.approx([0.1, 0.1, 0.1])
    assert lr_factor(1, SchedulerConfig(name="linear", warmup_steps=2), total_steps=2) == 1.0


def test_a_warm_up_longer_than_the_stage_is_refused():
    with pytest.raises(ConfigError, match=r"scheduler.warmup_steps = 7: the stage has 6 steps"):
        rates("linear", warmup_steps=7)
