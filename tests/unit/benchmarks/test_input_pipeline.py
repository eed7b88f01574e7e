"""The documents of the benchmark of the input pipeline, and what is made of its measurements."""

import pytest


@pytest.fixture
def measured():
    from _input_cases import CASES, RIVAL, documents
    from _report import Block, Result

    tokens = sum(map(len, documents()))
    names = (RIVAL, "xla-spmd-2, to the longest", "xla-spmd-2, 4 even buckets", "native-1, packed")
    cases = [case for case in CASES if case.name in names]
    results = {
        name: Result(first_steps=[first], compiles=compiles, blocks={0: Block(secs, secs, 0.0, 1.0, None)})
        for name, (first, compiles, secs) in zip(
            names, [(1.0, 0, 1.0), (30.0, 20, 0.8), (9.0, 4, 1.2), (0.5, 0, 0.5)], strict=True
        )
    }
    for result, positions in zip(results.values(), (2 * tokens, 2 * tokens, 4 * tokens, tokens), strict=True):
        result.answers.append({"positions": positions, "batches": 24, "wait": 0.01, "loader_secs": 0.24})
    return cases, results


def test_losses_of_time_say_how_much_is_compiled_and_padded(measured):
    from input_pipeline import make_report

    found = {(each.what, each.loses): each for each in make_report(*measured, [], rounds=1).comparisons}
    assert "4 programs" in found["first epoch of xla-spmd-2, 4 even buckets", True].reason
    assert "75% of the positions" in found["later epochs of xla-spmd-2, 4 even buckets", True].reason
    assert ("later epochs of native-1, packed", False) in found
    assert found["loader of xla-spmd-2, 4 even buckets alone", False].ours == 10.0


def test_the_table_has_padding_programs_and_a_rate_of_real_tokens(measured):
    from _input_cases import documents
    from input_pipeline import make_report

    report = make_report(*measured, [], rounds=1)
    row = next(row for row in report.tables[0].rows if row[0] == "xla-spmd-2, 4 even buckets")
    tokens = sum(map(len, documents()))
    assert row[1:] == ["75%", "4", "9.0", "1.20", f"{tokens / 1.2:,.0f}", "1.200", "1.200 .. 1.200", "1.0%"]
    assert report.reading == [
        "xla-spmd-2, 4 even buckets: 4 programs and 0.30 of the first epoch of padding to the longest, which compiles "
        "20; 75% of the positions are padding, and a later epoch takes 1.50 of the time.",
        "native-1, packed: a later epoch takes 0.50 of the time of plain PyTorch, to the longest.",
    ]


def test_all_cases_train_on_the_same_tokens():
    from _input_cases import CASES, documents
    from _input_worker import make_batches

    whole = sorted(token for document in documents() for token in document)
    for case in CASES:
        seen = []
        for batch in make_batches(case):
            mask = batch.get("attention_mask")
            ids = batch["input_ids"] if mask is None else batch["input_ids"][mask.bool()]
            seen += ids.reshape(-1).tolist()
        if case.packed:  # its last block is filled up
            seen = [token for token in seen if token]
        assert sorted(seen) == whole, case.name


def test_each_case_is_one_that_a_config_takes():
    from _input_cases import CASES, QUICK, RIVAL
    from _input_worker import make_config

    names = {case.name for case in CASES}
    assert {RIVAL, *QUICK} <= names
    for case in CASES:
        if case.kind != "eager":
            make_config(case)
