"""A list of samples, or a stream of them, where a loader is expected."""

import pytest
import torch

from torchacc.data import shard_loader
from torchacc.errors import DataError

IDS = torch.arange(8)

SAMPLES = {
    "tokens": {"input_ids": IDS, "labels": IDS},
    "lists of tokens": {"input_ids": [1, 2, 3], "labels": [1, 2, 3]},
    "an image and its class": (torch.zeros(3, 4, 4), 7),
    "a row and its class as a tensor": (torch.zeros(7), torch.tensor(3)),
    "named": {"x": torch.zeros(7), "label": 3},
    "text": {"text": "once upon a time", "label": 1},
}
BATCHES = {
    "tokens": {"input_ids": IDS.view(2, 4), "labels": IDS.view(2, 4)},
    "pairs": (torch.zeros(2, 7), torch.zeros(2, dtype=torch.long)),
    "a list of two tensors": [torch.zeros(2, 7), torch.zeros(2)],
    "tensors of one dimension": torch.zeros(4),
    "with a number": {"x": torch.zeros(2, 7), "labels": torch.zeros(2), "epoch": 3},
    "with a weight": (torch.zeros(2, 7), 0.5),
    "texts": {"text": ["once", "upon"], "label": torch.zeros(2)},
    "rows of tokens": {"input_ids": [[1, 2], [3, 4]]},
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("kind", [list, tuple])
def test_samples_are_refused_before_anything_is_read(name, kind):
    with pytest.raises(DataError, match=r"the (list|tuple) of 4 that was passed.*gives samples.*DataLoader\(samples"):
        shard_loader(kind([SAMPLES[name]] * 4), data_parallel_size=2, shards=range(1))


def test_a_stream_of_samples_is_refused_when_it_is_read():
    class Stream:
        def __iter__(self):
            return iter([SAMPLES["tokens"]] * 4)

    with pytest.raises(DataError, match=r"the Stream that was passed as the loader gives samples.*'input_ids': \(8,\)"):
        next(iter(shard_loader(Stream(), data_parallel_size=2, shards=range(1))))


@pytest.mark.parametrize("name", BATCHES)
def test_batches_are_taken(name):
    assert len(list(shard_loader([BATCHES[name]] * 4, data_parallel_size=2, shards=range(1)))) == 2
