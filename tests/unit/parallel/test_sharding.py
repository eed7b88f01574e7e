"""Runs of elements: every element of a whole tensor is held once, wherever it lies."""

from itertools import product
from math import prod

import pytest
import torch

from torchacc.parallel.sharding import LocalShard, TensorParallelSlice, flat_slices


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shapes", [[(5, 3)], [(1,)], [(2, 2), (7,), (3, 1, 2)], [(4,), (0, 3), (4,)]])
def test_shards_hold_every_element_once(shapes, count):
    members = tuple((f"p{index}", shape) for index, shape in enumerate(shapes))
    total = sum(prod(shape) for shape in shapes)
    held = {name: [] for name, _ in members}
    for index in range(count):
        holding = LocalShard("key", members, -(-total // count), index)
        offset = 0
        for piece in holding.slices:
            assert piece.offset == offset, "pieces lie one after another"
            offset += piece.numel
            held[piece.name] += range(piece.start, piece.stop)
        assert offset <= holding.shard_numel
    assert held == {name: list(range(prod(shape))) for name, shape in members}


@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize(
    ("shape", "dim"), [((4, 3), 0), ((3, 4), 1), ((5, 2, 3), 1), ((3, 2, 6), 2), ((6,), 0)], ids=str
)
def test_shards_of_parts_hold_every_element_once(shape, dim, num_shards):
    whole = torch.arange(prod(shape))
    parts = whole.view(shape).chunk(2, dim)
    rows = -(-parts[0].shape[0] // num_shards)
    held = []
    for part, shard in product(range(2), range(num_shards)):
        holding = LocalShard(
            "key", (("p", shape),), rows * parts[part][0].numel(), shard, TensorParallelSlice(dim, part, 2)
        )
        expected = parts[part][shard * rows : (shard + 1) * rows].flatten()
        found = torch.full_like(expected, -1)
        for piece in holding.slices:
            found[piece.offset : piece.offset + piece.numel] = whole[piece.start : piece.stop]
        assert torch.equal(found, expected)
        held += found.tolist()
    assert sorted(held) == whole.tolist()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_sharers_of_a_piece_have_every_element_once(count):
    (piece,) = flat_slices(["p"], [(3, 5)], 2, 11)
    parts = [piece.part(index, count) for index in range(count)]
    assert [element for part in parts for element in range(part.start, part.stop)] == list(range(2, 11))
    assert all(part.offset - piece.offset == part.start - piece.start for part in parts)
