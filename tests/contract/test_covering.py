"""Fewer combinations are run than there are, and still each pair of their values."""

from itertools import product

import pytest
from covering import covering, pairs
from hypothesis import given
from hypothesis import strategies as st

VALUES = st.lists(st.integers(0, 4), max_size=3)
COMBINATIONS = st.lists(st.tuples(VALUES, VALUES, VALUES), max_size=30)


def pairs_of(combination):
    return pairs(dict(zip("abc", combination, strict=True)))


@given(COMBINATIONS, st.randoms(use_true_random=False))
def test_each_pair_that_a_combination_has_is_one_of_those_chosen(combinations, chance):
    every = {index: pairs_of(each) for index, each in enumerate(combinations)}
    kept = [index for index in every if chance.random() < 0.2]
    chosen = covering(every, kept)
    assert set(kept) <= set(chosen) <= set(every)
    assert chosen == sorted(chosen)
    assert set().union(*(every[index] for index in chosen)) == set().union(*every.values())
    for index in set(chosen) - set(kept):
        others = set().union(*(every[other] for other in chosen if other != index))
        assert not every[index] <= others, "one that adds nothing"


def test_pairs_are_of_two_factors_each():
    found = pairs({"engine": ["native"], "model": ["gpt2"], "test": ["losses", "norms"]})
    assert {frozenset(dict(pair).items()) for pair in found} == {
        frozenset({("engine", "native"), ("model", "gpt2")}),
        *(frozenset({("engine", "native"), ("test", test)}) for test in ("losses", "norms")),
        *(frozenset({("model", "gpt2"), ("test", test)}) for test in ("losses", "norms")),
    }


def test_a_full_product_needs_little_more_than_the_pairs_of_its_largest_factors():
    every = {each: pairs({key: [v] for key, v in zip("abcd", each, strict=True)}) for each in product("wxyz", repeat=4)}
    assert len(every) == 256
    assert len(covering(every)) <= 24  # 16 at least


def test_each_pair_of_the_contract_is_run():
    pytest.importorskip("transformers")
    import test_engines
    from matrix import cases_with_pairs, chosen_cases

    every = cases_with_pairs(test_engines)
    chosen = chosen_cases(test_engines)
    assert {case for case in every if case.is_fast} <= chosen < every.keys()
    assert set().union(*(every[case] for case in chosen)) == set().union(*every.values())
    assert len(chosen) < 0.6 * len(every)
