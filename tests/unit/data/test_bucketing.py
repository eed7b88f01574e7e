from collections import UserDict

import pytest
import torch

from torchacc.data import Bucketing, make_buckets
from torchacc.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_length": 512, "num_buckets": 4}, (128, 256, 384, 512)),
        ({"max_length": 100}, (13, 25, 38, 50, 63, 75, 88, 100)),
        ({"max_length": 3, "num_buckets": 8}, (1, 2, 3)),
        ({"buckets": [128, 256]}, (128, 256)),
        ({"buckets": [128, 256], "max_length": 256, "num_buckets": 2}, (128, 256)),
    ],
)
def test_make_buckets(arguments, expected):
    assert make_buckets(**arguments) == expected


def test_uniform_buckets_hold_every_length_and_end_at_the_last():
    for max_length in range(1, 60):
        for num_buckets in range(1, 10):
            buckets = make_buckets(None, max_length, num_buckets)
            assert buckets[-1] == max_length
            assert len(buckets) <= num_buckets
            assert list(buckets) == sorted(set(buckets))
            assert buckets[0] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "name no length"),
        ({"num_buckets": 4}, "name no length"),
        ({"max_length": 0}, "positive integers"),
        ({"max_length": 8, "num_buckets": -1}, "positive integers"),
        ({"buckets": []}, "positive integers"),
        ({"buckets": [0, 8]}, "positive integers"),
        ({"buckets": [8, 4, 8]}, r"write buckets=\[4, 8\]"),
        ({"buckets": [4, 8], "max_length": 16}, "contradicts"),
        ({"buckets": [4, 8], "num_buckets": 3}, "contradicts the 2 lengths"),
    ],
)
def test_make_buckets_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_buckets(**arguments)


def text_batch(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.arange(1, rows * length + 1).view(rows, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


@pytest.mark.parametrize(("length", "target"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)])
def test_pads_to_the_smallest_bucket_that_holds_the_batch(length, target):
    batch = text_batch(length)
    padded = Bucketing([4, 8, 16], pad_values={"input_ids": 7})(batch)
    for key, value in {"input_ids": 7, "attention_mask": 0, "labels": -100}.items():
        assert padded[key].shape == (2, target)
        assert torch.equal(padded[key][:, :length], batch[key])
        assert (padded[key][:, length:] == value).all()
        assert batch[key].shape == (2, length)


def test_few_shapes_leave_a_stream_of_many():
    bucketing = Bucketing(make_buckets(None, 64, 4))
    assert {bucketing(text_batch(length))["input_ids"].shape for length in range(1, 65)} == {
        (2, 16),
        (2, 32),
        (2, 48),
        (2, 64),
    }


def test_other_keys_containers_and_dtypes():
    batch = UserDict(
        input_ids=torch.ones(2, 3, dtype=torch.long),
        attention_mask=torch.ones(2, 3, dtype=torch.bool),
        labels=torch.tensor([0, 1]),
        pixel_values=torch.ones(2, 3, 5, 5),
        features=torch.ones(2, 3, 6, dtype=torch.bfloat16),
        names=["a", "b"],
    )
    padded = Bucketing([4], pad_values={"features": -1.0}, pad_dims={"features": 1})(batch)
    assert type(padded) is UserDict
    assert padded["attention_mask"].tolist() == [[True, True, True, False]] * 2
    assert padded["labels"] is batch["labels"]
    assert padded["pixel_values"] is batch["pixel_values"]
    assert padded["names"] is batch["names"]
    assert padded["features"].shape == (2, 4, 6)
    assert padded["features"].dtype == torch.bfloat16
    assert (padded["features"][:, 3] == -1).all()
    assert batch["features"].shape == (2, 3, 6)


def test_batch_encoding_stays_one():
    transformers = pytest.importorskip("transformers")
    padded = Bucketing([8])(transformers.BatchEncoding(text_batch(3)))
    assert type(padded) is transformers.BatchEncoding
    assert padded.input_ids.shape == (2, 8)


def test_none_leaves_a_key_alone():
    batch = {**text_batch(3), "labels": torch.ones(2, 5)}
    with pytest.raises(DataError, match=r"disagree.*'labels': 5.*pad_values=\{'labels': None\}"):
        Bucketing([4])(batch)
    padded = Bucketing([4], pad_values={"labels": None})(batch)
    assert padded["labels"].shape == (2, 5)
    assert padded["input_ids"].shape == (2, 4)


def test_too_long_is_refused_or_cut():
    with pytest.raises(DataError, match="'input_ids' is 9 long, more than the last bucket, 8"):
        Bucketing([4, 8])(text_batch(9))
    batch = text_batch(9)
    padded = Bucketing([4, 8], truncate=True)(batch)
    assert torch.equal(padded["labels"], batch["labels"][:, :8])


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ([torch.ones(2, 3)], {}, "batch is a list"),
        ({"x": torch.ones(2, 3)}, {}, r"nothing to pad: its keys are \['x'\]"),
        ({"input_ids": [[1, 2]]}, {}, "return_tensors='pt'"),
        ({"attention_mask": torch.ones(2, 1, 3, 3)}, {}, "2-D padding mask"),
        ({"x": torch.ones(2, 3)}, {"pad_values": {"x": 0}, "pad_dims": {"x": 0}}, "dim 0 holds the samples"),
        ({"x": torch.ones(2, 3)}, {"pad_values": {"x": 0}, "pad_dims": {"x": 2}}, "cannot be padded along dim 2"),
        ({"x": torch.ones(2)}, {"pad_values": {"x": 0}}, "dim 0 holds the samples"),
    ],
)
def test_refuses_batches_it_cannot_pad(batch, options, message):
    with pytest.raises(DataError, match=message):
        Bucketing([4], **options)(batch)


def test_a_dim_without_a_value_is_refused():
    with pytest.raises(ConfigError, match=r"pad_values=\{'x': 0\}"):
        Bucketing([4], pad_dims={"x": 1})
