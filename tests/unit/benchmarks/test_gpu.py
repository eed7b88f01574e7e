"""The GPU's profile, as far as a CPU can show it."""

import argparse

import pytest


@pytest.fixture
def run_of(results_of):
    def make(secs, peaks):
        from _gpu_cases import GPT2_124M
        from gpu import Run

        return Run(GPT2_124M, results_of(secs), peaks)

    return make


def report_of(run):
    from gpu import make_report

    found = {
        "device": "a GPU",
        "matrix_flops": 100e12,
        "flops_per_token": {"GPT-2 124M": 1e9},
        "planned": {"GPT-2 124M": {"FULL_SHARD": 7 * 10**9}},
    }
    args = argparse.Namespace(devices=2, rounds=2, steps_per_round=1)
    return make_report({"GPT-2 124M": run}, found, args)


def test_utilisation_is_against_the_measured_product(run_of):
    run = run_of(
        {"FULL_SHARD": [0.4, 0.4], "FULL_SHARD, recompute": [0.5, 0.5]},
        {"FULL_SHARD": 8 * 10**9, "FULL_SHARD, recompute": 4 * 10**9},
    )
    report = report_of(run)
    # 2 devices x 8 samples x 1024 tokens in 0.4 s, of 1 GFLOP each, where the devices do 200 TFLOP/s.
    assert report.tables[0].rows[0][2:] == ["400.0", "40,960", "20.5%", "8", "7", "1.000", "1.000"]
    assert report.reading == [
        "GPT-2 124M, FULL_SHARD, recompute: 1.25 of the step time of FULL_SHARD, and 0.50 of its memory."
    ]


def test_what_loses_to_a_rival_has_its_reason(run_of):
    run = run_of({"FULL_SHARD": [0.4, 0.4], "FSDP2 by hand, torch.compile": [0.3, 0.3]}, {"FULL_SHARD": None})
    (time,) = report_of(run).comparisons
    assert time.loses
    assert "compiles nothing" in time.reason


def test_a_case_without_numbers_is_a_row_of_the_table(run_of):
    from _report import Result

    run = run_of({"FULL_SHARD": [0.4]}, {})
    run.results["XLA"] = Result(error="no plugin")
    report = report_of(run)
    assert report.tables[0].rows[1][:2] == ["XLA", "failed"]
    assert "no plugin" in report.checks[0].text


def test_xla_is_left_out_where_its_plugin_is_not_installed(monkeypatch):
    from _gpu_cases import CASES
    from gpu import missing_package

    import torchacc.engines.xla.cuda

    monkeypatch.setattr(torchacc.engines.xla.cuda, "installed_plugin", lambda: None)
    args = argparse.Namespace(device="cuda", xla_path=None)
    missing = {case.name: missing_package(case, args) for case in CASES}
    assert [name for name, why in missing.items() if why] == ["XLA", "XLA, loss in chunks"]


def test_a_loss_that_is_far_from_the_others_is_told(run_of):
    from gpu import differing_losses

    run = run_of({"FULL_SHARD": [0.4], "NO_SHARD": [0.4], "XLA": [0.4]}, {})
    assert differing_losses("GPT-2 124M", run) == []
    run.results["XLA"].losses = [float("nan")]
    assert "XLA" in differing_losses("GPT-2 124M", run)[0]


def test_each_case_is_one_that_a_config_takes():
    from _gpu_cases import BASE, CASES, QUICK, RECOMPUTED, RIVALS
    from _gpu_worker import make_config

    names = {case.name for case in CASES}
    assert len(names) == len(CASES)
    assert {BASE, RECOMPUTED, *QUICK, *(name for pair in RIVALS for name in pair)} <= names
    for case in CASES:
        if case.kind in ("native", "xla"):
            config = make_config(case, 2)
            assert config.compute.bf16
            assert (config.compute.compile, config.compute.fp8, config.memory.gc) == (
                case.compiled,
                case.fp8,
                case.recomputed,
            )


def test_the_largest_model_fills_what_the_plan_may_take():
    from dataclasses import replace

    from _gpu_cases import LARGEST, MODELS, tiny
    from _gpu_worker import largest, planned_bytes

    deepest = replace(tiny(MODELS[LARGEST]), layers=9)
    for layers in (1, 4, 9):
        assert largest(deepest, planned_bytes(replace(deepest, layers=layers))) == replace(deepest, layers=layers)
    with pytest.raises(SystemExit, match="do not hold one layer"):
        largest(deepest, 1000.0)


@pytest.mark.slow
@pytest.mark.parametrize(("label", "measured"), [("GPT-2 124M", 12.98e9), ("Llama 1.2B", 33.12e9)])
def test_the_plan_is_what_an_h200_took(label, measured):
    """As docs/hardware.md has it."""
    from _gpu_cases import BASE, CASES, MODELS
    from _gpu_worker import planned_bytes

    (case,) = (case for case in CASES if case.name == BASE)
    assert planned_bytes(MODELS[label], case) == pytest.approx(measured, rel=0.01)


def test_cases_that_a_model_cannot_be_trained_by_are_left_out():
    from _gpu_cases import CASES, LARGEST

    assert not any(case.fp8 for case in CASES if case.suits("GPT-2 124M"))
    assert {case.fp8 for case in CASES if case.suits(LARGEST)} == {True, False}
    assert all(case.recomputed for case in CASES if case.suits(LARGEST))


def test_a_model_without_memory_for_the_base_is_compared_recomputed(run_of):
    run = run_of(
        {"FULL_SHARD, recompute": [0.5, 0.5], "FULL_SHARD, recompute, torch.compile": [0.4, 0.4]},
        {"FULL_SHARD, recompute": 4 * 10**9, "FULL_SHARD, recompute, torch.compile": 3 * 10**9},
    )
    report = report_of(run)
    assert "ratios to FULL_SHARD, recompute" in report.tables[0].title
    assert report.tables[0].rows[1][-2:] == ["0.800", "0.750"]


def test_float8_is_left_out_where_torchao_is_not_installed(monkeypatch):
    import importlib.util

    from _gpu_cases import CASES
    from gpu import missing_package

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find_spec(name))
    args = argparse.Namespace(device="cpu", xla_path=None)
    missing = [case.name for case in CASES if "torchao" in (missing_package(case, args) or "")]
    assert missing == [case.name for case in CASES if case.fp8]
    assert missing


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_operations_are_counted_for_each_family(family):
    from _gpu_cases import MODELS, tiny
    from _gpu_worker import flops_per_token

    size = next(tiny(size) for size in MODELS.values() if size.family == family)
    layer = {"gpt2": 12, "llama": 16, "mixtral": 4 + 2 * 12}[family] * size.width**2
    products = size.layers * layer + size.vocabulary * size.width
    attention = 12 * size.layers * size.width * size.length
    assert flops_per_token(size) == pytest.approx(6 * products + attention, rel=0.02)  # norms and biases
