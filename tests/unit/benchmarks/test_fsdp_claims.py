"""What is made of the measurements of FSDP's options, and the bytes that are read from a native step."""

import torch
from torch import nn


def test_a_claim_stands_beside_what_was_found(results_of):
    from fsdp_claims import CASES, make_report

    results = results_of({"activations kept": [1.0, 2.0], "activations recomputed": [1.25, 2.5]})
    peaks = {"activations kept": {"peak": 1000, "rest": 1}, "activations recomputed": {"peak": 600, "rest": 1}}
    report = make_report([case for case in CASES if case.name in results], results, peaks, [], 2, 1)
    found = {row[0]: row[2] for row in report.tables[0].rows}
    assert found["activations are recomputed"] == "+25 % step time, -40.0 % memory"
    assert found["BACKWARD_PRE gathers the next unit early"] == "not run"
    assert "--profile gpu" in found["shards are kept in the host's memory"]
    assert report.reading == ["Recompute takes 25 % more time for a step and 40.0 % less memory, natively on this CPU."]
    assert [series.y for series in report.series] == [[1.25], [0.6]]


def test_each_case_is_one_that_a_config_takes():
    from _claims_cases import CASES, PAIRS, QUICK

    import torchacc

    for case in CASES:
        torchacc.Config.from_dict(case.config)
    names = {case.name for case in CASES}
    assert {name for pair in PAIRS for name in (pair.case, pair.reference)} | set(QUICK) <= names


def test_a_step_is_measured_tensor_by_tensor():
    from _step_memory import measure

    layer = nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    x = torch.randn(1000, 1000)

    def step():
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()

    step()
    found = measure(step)
    square = 4_000_000
    # The weight, its momentum and the input; above them the output, or its gradient, and the weight's gradient.
    assert found["rest"] >= 3 * square
    assert 2 * square <= found["peak"] - found["rest"] < 4 * square
    assert found["traffic"] == {}
