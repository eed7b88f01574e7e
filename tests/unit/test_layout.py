"""Runs of elements: every element of a whole tensor is held once, wherever it lies."""

from math import prod

import pytest

from torchacc.layout import Holding, flat_run


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shapes", [[(5, 3)], [(1,)], [(2, 2), (7,), (3, 1, 2)], [(4,), (0, 3), (4,)]])
def test_shards_hold_every_element_once(shapes, count):
    members = tuple((f"p{index}", shape) for index, shape in enumerate(shapes))
    total = sum(prod(shape) for shape in shapes)
    held = {name: [] for name, _ in members}
    for index in range(count):
        holding = Holding("key", members, -(-total // count), index)
        offset = 0
        for piece in holding.pieces:
            assert piece.offset == offset, "pieces lie one after another"
            offset += piece.numel
            held[piece.name] += range(piece.start, piece.stop)
        assert offset <= holding.shard_numel
    assert held == {name: list(range(prod(shape))) for name, shape in members}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_sharers_of_a_piece_have_every_element_once(count):
    (piece,) = flat_run(["p"], [(3, 5)], 2, 11)
    parts = [piece.part(index, count) for index in range(count)]
    assert [element for part in parts for element in range(part.start, part.stop)] == list(range(2, 11))
    assert all(part.offset - piece.offset == part.start - piece.start for part in parts)
