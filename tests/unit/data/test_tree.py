import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from torchacc.data import concat, map_tensors, num_rows, take, tensors_in
from torchacc.errors import DataError

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Any
    name: Any


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    "tree",
    [
        {"x": rows(1), "n": None},
        OrderedDict(x=rows(1)),
        UserDict(x=rows(1)),
        [rows(1), "text"],
        (rows(1), 3),
        Pair(rows(1), None),
        Batch(rows(1), "a"),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_map_tensors_keeps_the_container(tree):
    mapped = map_tensors(lambda t: t + 1, tree)
    assert type(mapped) is type(tree)
    values = (
        list(vars(mapped).values()) if isinstance(mapped, Batch) else list(getattr(mapped, "values", mapped.__iter__)())
    )
    assert values[0].tolist() == [2]
    original = list(vars(tree).values()) if isinstance(tree, Batch) else list(getattr(tree, "values", tree.__iter__)())
    assert original[0].tolist() == [1]
    assert values[1:] == original[1:]


def test_map_tensors_goes_deep_and_leaves_the_rest():
    array = np.zeros(2)
    tree = {"a": [(rows(1), array)], "b": defaultdict(list, c=rows(2)), "d": {"e": Pair(rows(3), 4)}}
    mapped = map_tensors(lambda t: t * 10, tree)
    assert mapped["a"][0][0].item() == 10
    assert mapped["a"][0][1] is array
    assert mapped["b"]["c"].item() == 20
    assert mapped["b"].default_factory is list
    assert mapped["d"]["e"] == Pair(torch.tensor([30]), 4)
    seen = []
    map_tensors(seen.append, tree)
    assert [id(tensor) for tensor in tensors_in(tree)] == [id(tensor) for tensor in seen] != []


def test_map_tensors_on_transformers_outputs():
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": rows(1, 2)}, encoding=None, n_sequences=1)
    mapped = map_tensors(lambda t: t + 1, encoding)
    assert type(mapped) is transformers.BatchEncoding
    assert mapped["input_ids"].tolist() == [2, 3]
    assert mapped.n_sequences == 1
    assert encoding["input_ids"].tolist() == [1, 2]
    output = transformers.modeling_outputs.CausalLMOutput(logits=rows(1))
    mapped_output = map_tensors(lambda t: t + 1, output)
    assert type(mapped_output) is type(output)
    assert mapped_output.logits.item() == mapped_output["logits"].item() == 2
    assert mapped_output.loss is None


def test_concat():
    first = {
        "x": torch.ones(2, 3),
        "names": ["a", "b"],
        "task": "lm",
        "pair": (rows(1, 2), "k"),
        "temperature": torch.tensor(1.0),
    }
    second = {
        "x": torch.zeros(1, 3),
        "names": ["c"],
        "task": "lm",
        "pair": (rows(3), "k"),
        "temperature": torch.tensor(1.0),
    }
    joined = concat([first, second])
    assert joined["x"].tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert joined["names"] == ["a", "b", "c"]
    assert joined["task"] == "lm"
    assert joined["pair"][0].tolist() == [1, 2, 3]
    assert joined["pair"][1] == "k"
    assert joined["temperature"].item() == 1.0
    assert concat([first]) is first


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}, r"batch\['x'\] has shapes \[\(2, 3\), \(2, 4\)\]"),
        ({"x": rows(1)}, {"y": rows(1)}, "different keys"),
        ({"x": rows(1)}, {"x": [1]}, r"types from batch to batch \(Tensor, list\)"),
        ({"x": rows(1), "t": 1}, {"x": rows(1), "t": 2}, r"batch\['t'\] is a int without rows"),
        ({"x": np.ones(2)}, {"x": np.zeros(2)}, "ndarray without rows"),
    ],
)
def test_concat_refuses(first, second, message):
    with pytest.raises(DataError, match=message):
        concat([first, second])


def test_take_and_num_rows():
    batch = {"x": torch.arange(6).view(3, 2), "names": ("a", "b", "c"), "scale": torch.tensor(2.0), "task": "lm"}
    assert num_rows(batch) == 3
    taken = take(batch, 2)
    assert taken["x"].tolist() == [[0, 1], [2, 3]]
    assert taken["names"] == ("a", "b")
    assert taken["scale"].item() == 2.0
    assert taken["task"] == "lm"
    assert num_rows({"x": rows(1, 2), "y": rows(1)}) is None
    assert num_rows({"task": "lm"}) is None
