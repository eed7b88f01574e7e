import torch

from torchacc.engines.xla.collectives import flatten, unflatten

SHAPES = [(8,), (7,), (1,), (131, 3), (2, 3, 4), (4, 1, 1), (3, 0)]


def counted(shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1


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
