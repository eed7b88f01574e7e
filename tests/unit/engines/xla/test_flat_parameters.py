import pytest
import torch

from torchacc.engines.xla.flat_parameters import Rows, flatten, unflatten

SHAPES = [(8,), (7,), (1,), (131, 3), (2, 3, 4), (4, 1, 1), (3, 0)]


def counted(shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1


@pytest.mark.parametrize("num_shards", [1, 2, 4, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_cut_and_join_are_inverse(shape, num_shards):
    rows, whole = Rows(shape, num_shards), counted(shape)
    shards = [rows.cut(whole, index) for index in range(num_shards)]
    assert {tuple(shard.shape) for shard in shards} == {rows.shard_shape}
    assert {shard.numel() for shard in shards} == {rows.shard_numel}
    gathered = torch.stack([shard.reshape(-1) for shard in shards])
    assert torch.equal(rows.join(gathered), whole)


@pytest.mark.parametrize("num_shards", [1, 2, 4, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_that_is_added_is_zero(shape, num_shards):
    rows, whole = Rows(shape, num_shards), counted(shape)
    padded = rows.pad(whole)
    assert padded.shape[0] == num_shards * rows.per_shard
    assert padded.shape[0] - shape[0] < num_shards
    assert padded[shape[0] :].eq(0).all()
    assert torch.equal(padded[: shape[0]], whole)


def test_more_shards_than_rows():
    rows = Rows((2, 3), 4)
    assert rows.per_shard == 1
    assert rows.cut(torch.ones(2, 3), 1).eq(1).all()
    assert rows.cut(torch.ones(2, 3), 3).eq(0).all()


def test_a_shard_is_a_copy():
    whole = counted((4, 2))
    Rows((4, 2), 2).cut(whole, 0).zero_()
    assert whole[0, 0] == 1


def test_nothing_is_padded_where_it_divides():
    whole = counted((4, 2))
    assert Rows((4, 2), 2).pad(whole) is whole


def test_flatten_and_unflatten_are_inverse():
    tensors = [counted(shape) for shape in SHAPES]
    flat = flatten(tensors)
    assert flat.shape == (sum(tensor.numel() for tensor in tensors),)
    for found, tensor in zip(unflatten(flat, SHAPES), tensors, strict=True):
        assert torch.equal(found, tensor)


def test_unflatten_ignores_padding_and_gives_views():
    flat = torch.arange(8.0)
    first, second = unflatten(flat, [(2, 2), (3,)])
    assert second.tolist() == [4, 5, 6]
    first[0, 0] = 10
    assert flat[0] == 10
