"""States as JSON and tensors come back as they were."""

import json
import math

import numpy as np
import pytest
import torch

from torchacc.checkpoint.own_format.json_codec import decode, encode
from torchacc.errors import CheckpointError

VALUES = {
    "numbers": [1, -2.5, True, None, 10**30, "text", float("inf")],
    "nested": {"a": (1, (2, [3])), 4: {"$": 5}, (6, 7): {8, 9}, "frozen": frozenset({1})},
    "bytes": b"\x00\xff",
    "dtype": [torch.bfloat16],
    "generator": __import__("random").Random(3).getstate(),
}


def through_json(value):
    tensors = {}
    text = json.dumps(encode(value, tensors, "state"))
    return decode(json.loads(text), tensors)


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(name):
    assert through_json(VALUES[name]) == VALUES[name]


def test_nan_comes_back():
    assert math.isnan(through_json({"x": math.nan})["x"])


def test_tensors_and_arrays_come_back():
    given = {1: torch.arange(3), "1": torch.ones((), dtype=torch.bfloat16), "array": np.arange(4, dtype=np.uint32)}
    found = through_json(given)
    assert torch.equal(found[1], given[1])
    assert found["1"].dtype == torch.bfloat16
    assert isinstance(found["array"], np.ndarray)
    assert found["array"].dtype == np.uint32
    assert np.array_equal(found["array"], given["array"])


def test_tensors_are_copies():
    given = torch.zeros(2)
    tensors = {}
    encode(given, tensors, "state")
    given += 1
    assert tensors["state"].eq(0).all()


def test_what_could_run_code_is_refused_by_its_path():
    with pytest.raises(CheckpointError, match=r"state.a.1 is a function"):
        encode({"a": [1, test_nan_comes_back]}, {}, "state")
