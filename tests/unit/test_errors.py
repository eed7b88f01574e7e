import pytest

from torchacc.errors import in_few_lines, shown


class Rude:
    def __repr__(self):
        raise RuntimeError("no")


def bomb():
    value = ["x"]
    for _ in range(60):
        value = [value] * 9
    return value


def cycle():
    value = {}
    value["a"] = value
    return value


@pytest.mark.parametrize(
    "value", [None, True, 1, 1.5, "x", b"x", "it's", [], {}, (), set(), [1, "a"], {"a": [1]}, (1,), (1, 2), {1}, int]
)
def test_a_small_value_is_shown_as_its_repr(value):
    assert shown(value) == repr(value)


@pytest.mark.parametrize(
    "value", ["x" * 10**6, b"x" * 10**6, list(range(10**6)), bomb(), {str(i): 1 for i in range(999)}]
)
def test_a_large_value_is_cut_off(value):
    assert shown(value) == f"{shown(value)[:200]}…"


def test_values_without_a_repr_are_shown():
    assert shown(cycle()) == "{'a': {'a': {'a': {'a': {'a': {'a': {'a': {'a': …}}}}}}}}"
    assert shown([10**5000]) == "[<an int of 16,610 bits>]"
    assert shown([Rude()]) == "[<Rude, whose repr() raises RuntimeError>]"


def test_twenty_lines_tell_enough():
    assert in_few_lines(2, ["a", "b"]) == "a\nb"
    assert in_few_lines(1000, (str(i) for i in range(1000))).splitlines()[19:] == ["19", "… and 980 more of the kind"]
