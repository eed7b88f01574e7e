"""The rule of sharding: every element of a full tensor is held once, and lies where others put it."""

import ast
import importlib.util
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchacc.parallel.mesh import Mesh
from torchacc.parallel.sharding import (
    TORCH_XLA_MULTIPLE,
    DimSlice,
    DivisibleDimLayout,
    FlatLayout,
    LocalShard,
    RowLayout,
    chunk,
    flat_slices,
    local_shard,
    partition_spec,
    partitioned_shape,
    replicated_over,
    unshard,
    unsharded,
)

dims = st.lists(st.integers(1, 9), max_size=3).map(tuple)
counts = st.integers(1, 7)
checked = settings(deadline=None, max_examples=60)


def held(shard, full):
    """Return the elements of a full tensor that a device holds, with -1 where its shard has padding."""
    local = full.new_full((shard.shard_numel,), -1)
    end = 0
    for part in shard.slices:
        assert part.offset == end, "slices lie one after another"
        end += part.numel
        local[part.offset : end] = full.flatten()[part.start : part.stop]
    return local


def counted(shape):
    return torch.arange(prod(shape)).reshape(shape)


@checked
@given(st.integers(0, 40), counts)
def test_chunks_are_those_of_torch(length, count):
    own = [chunk(length, count, index) for index in range(count)]
    assert [index for part in own for index in part] == list(range(length))
    expected = torch.arange(length).chunk(count) if length else ()
    assert [list(part) for part in own if part] == [part.tolist() for part in expected]


# Layouts


@checked
@given(dims, counts)
def test_rows_are_sharded_and_joined(shape, count):
    layout, full = RowLayout(shape, count), counted(shape) + 1
    shards = [layout.shard(full, index) for index in range(count)]
    assert {tuple(shard.shape) for shard in shards} == {layout.shard_shape}
    assert {shard.numel() for shard in shards} == {layout.shard_numel}
    assert torch.equal(layout.unshard(torch.stack([shard.reshape(-1) for shard in shards])), full)
    for index, shard in enumerate(shards):
        rows = len(layout.rows(index))
        assert shard[:rows].ne(0).all()
        assert shard[rows:].eq(0).all(), "what is added is zero"
        local = held(LocalShard("p", (("p", shape),), layout.shard_numel, index), full)
        assert local[local >= 0].tolist() == shard.flatten()[: rows * prod(shape[1:])].tolist()


def test_a_shard_is_a_copy_and_what_divides_is_not_padded():
    full = torch.ones(4, 2)
    RowLayout((4, 2), 2).shard(full, 0).zero_()
    assert full.eq(1).all()
    assert RowLayout((4, 2), 2).pad(full) is full


def test_an_empty_dimension_and_a_scalar_have_shards():
    assert RowLayout((0, 3), 4).shard_shape == (0, 3)
    assert RowLayout((3, 0), 2).shard_numel == 0
    assert RowLayout((), 3).shard_shape == (1,)
    assert FlatLayout((), 2).shard_shape == (1,)


@checked
@given(dims, counts, st.sampled_from([1, 4, TORCH_XLA_MULTIPLE]))
def test_flat_shards_are_the_fewest_multiples_that_hold_all(shape, count, multiple):
    layout = FlatLayout(shape, count, multiple)
    assert layout.shard_numel % multiple == 0
    assert (layout.shard_numel - multiple) * count < prod(shape) <= layout.shard_numel * count
    shards = [
        held(LocalShard("p", (("p", shape),), layout.shard_numel, index), counted(shape)) for index in range(count)
    ]
    assert torch.cat(shards)[: prod(shape)].tolist() == list(range(prod(shape)))


@checked
@given(dims, counts, st.sets(st.integers(0, 2)))
def test_the_first_dimension_that_divides_is_cut(shape, count, taken):
    layout = DivisibleDimLayout(shape, count, frozenset(taken))
    if layout.dim is None:
        assert layout.shard_shape == shape
        assert count == 1 or not any(n % count == 0 for dim, n in enumerate(shape) if dim not in taken)
        return
    assert layout.dim not in taken
    assert not any(n % count == 0 for dim, n in enumerate(shape[: layout.dim]) if dim not in taken)
    parts = [DimSlice(layout.dim, index, count) for index in range(count)]
    assert {part.part_shape(shape) for part in parts} == {layout.shard_shape}
    shards = [LocalShard("p", (("p", shape),), layout.shard_numel, 0, part) for part in parts]
    expected = counted(shape).chunk(count, layout.dim)
    assert all(torch.equal(held(s, counted(shape)), e.flatten()) for s, e in zip(shards, expected, strict=True))


# What a device holds


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shapes", [[(5, 3)], [(1,)], [(2, 2), (7,), (3, 1, 2)], [(4,), (0, 3), (4,)]])
def test_shards_of_flattened_tensors_hold_every_element_once(shapes, count):
    members = tuple((f"p{index}", shape) for index, shape in enumerate(shapes))
    layout = FlatLayout((sum(prod(shape) for shape in shapes),), count)
    found = {name: [] for name, _ in members}
    shards = [LocalShard("key", members, layout.shard_numel, index) for index in range(count)]
    for part in (part for shard in shards for part in shard.slices):
        found[part.name] += range(part.start, part.stop)
    assert found == {name: list(range(prod(shape))) for name, shape in members}
    full = torch.arange(layout.numel)
    locals_ = [full[shard.index * shard.shard_numel :][: shard.shard_numel] for shard in shards]
    assert torch.equal(unshard(zip(shards, locals_, strict=True)), full)


@checked
@given(dims, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.data())
def test_the_devices_of_a_mesh_hold_every_element_once(shape, fsdp, tp, dp, data):
    dim = data.draw(st.sampled_from([None, *(dim for dim, n in enumerate(shape) if n % tp == 0)]))
    names = data.draw(st.permutations([("dp", dp), ("fsdp", fsdp), ("tp", tp)]))
    mesh, spec = Mesh(tuple(names)), () if dim is None else tuple("tp" if i == dim else None for i in range(len(shape)))
    shards = {device: local_shard("p", shape, mesh, device, spec) for device in range(mesh.num_devices)}
    copies = dp if dim is not None else dp * tp if shape else mesh.num_devices
    assert {mesh.size(*replicated_over(shard)) for shard in shards.values()} == {copies}
    locals_ = {device: held(shard, counted(shape)) for device, shard in shards.items()}
    every = torch.cat(list(locals_.values()))
    assert every[every >= 0].sort().values.tolist() == [n for n in range(prod(shape)) for _ in range(copies)]
    assert torch.equal(unshard((shards[d], locals_[d]) for d in shards), counted(shape).flatten())
    for group in mesh.groups(*replicated_over(shards[0])):
        assert len({shards[device] for device in group}) == 1, "they hold the same"


def test_a_process_that_drives_all_devices_holds_all():
    assert held(unsharded("p", (3, 2)), counted((3, 2))).tolist() == list(range(6))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_devices_with_parts_of_a_slice_have_every_element_once(count):
    (full,) = flat_slices(["p"], [(3, 5)], 2, 11)
    parts = [full.part(index, count) for index in range(count)]
    assert [element for part in parts for element in range(part.start, part.stop)] == list(range(2, 11))
    assert all(part.offset - full.offset == part.start - full.start for part in parts)


# Where others put it


@pytest.fixture
def world_of_six():
    """Six processes, of which this is the first, and the others are made up."""
    if dist.is_initialized():  # of one process, for a model that an earlier test has sharded
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    yield
    dist.destroy_process_group()


SHAPES = [(8,), (7,), (1,), (13, 3), (2, 3, 4), (5, 6), (6, 1)]


@pytest.mark.parametrize(("dp", "fsdp"), [(1, 6), (2, 3), (3, 2)])
def test_rows_are_those_of_fully_shard(world_of_six, dp, fsdp):
    module = nn.ParameterList([nn.Parameter(counted(shape).float()) for shape in SHAPES])
    full = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    mesh = Mesh((("dp", dp), ("fsdp", fsdp)))
    fully_shard(module, mesh=init_device_mesh("cpu", (dp, fsdp), mesh_dim_names=("replicate", "shard")))
    for name, parameter in module.named_parameters():
        own = local_shard(name, tuple(full[name].shape), mesh, 0)
        mine = parameter.to_local().detach().flatten()
        assert torch.equal(held(own, full[name])[: len(mine)], mine)
        assert sum(part.numel for part in own.slices) == len(mine)


@pytest.mark.parametrize(("fsdp", "tp"), [(6, 1), (3, 2), (2, 3)])
def test_every_devices_slices_are_those_of_a_dtensor(world_of_six, fsdp, tp):
    mesh = Mesh((("fsdp", fsdp), ("tp", tp)))
    for device, shape in product(range(6), [(12, 6), (7, 6), (6, 5), (18,)]):
        for dim in (d for d in (0, 1) if d < len(shape) and shape[d] % tp == 0):
            at = mesh.coordinates(device)
            spec = tuple("tp" if i == dim else None for i in range(len(shape)))
            found = held(local_shard("p", shape, mesh, device, spec), counted(shape))
            expected = counted(shape).chunk(tp, dim)[at["tp"]].chunk(fsdp, 0)
            own = expected[at["fsdp"]].flatten() if at["fsdp"] < len(expected) else found[:0]
            assert found[found >= 0].tolist() == own.tolist()
            if device == 0:  # whose process this is
                world = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("shard", "tensor"))
                first = Shard(0) if dim else _StridedShard(0, split_factor=tp)
                size, _ = compute_local_shape_and_global_offset(shape, world, [first, Shard(dim)])
                assert prod(size) == len(own)


def methods_of_torch_xla():
    """Return the two methods that cut a tensor, read from torch_xla's source: its import changes the environment."""
    package = importlib.util.find_spec("torch_xla").submodule_search_locations[0]
    source = Path(package, "distributed/fsdp/xla_fully_sharded_data_parallel.py").read_text(encoding="utf-8")
    wanted = ("_get_shard", "_flatten_and_pad_to_world_size")
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name in wanted]
    namespace = {"torch": torch, "Tuple": tuple, "F": torch.nn.functional}
    exec(compile(ast.Module(found, type_ignores=[]), "torch_xla", "exec"), namespace)
    return [namespace[name] for name in wanted]


@pytest.mark.xla
@pytest.mark.parametrize("count", [1, 2, 5])
def test_flat_shards_and_rows_are_those_of_torch_xla(count):
    get_shard, pad = methods_of_torch_xla()
    for shape, by_rows, index in product([*SHAPES, (131, 3), (64, 8)], (True, False), range(count)):
        full = counted(shape)
        layout = RowLayout(shape, count) if by_rows else FlatLayout(shape, count, TORCH_XLA_MULTIPLE)
        stock = SimpleNamespace(rank=index, world_size=count, _shard_param_on_dim_0=by_rows)
        stock._shard_size_multiple = 1 if by_rows else TORCH_XLA_MULTIPLE
        stock._flatten_and_pad_to_world_size = partial(pad, stock)
        shard = get_shard(stock, full)
        assert tuple(shard.shape) == layout.shard_shape
        own = held(LocalShard("p", (("p", shape),), layout.shard_numel, index), full)
        assert shard.flatten()[own >= 0].tolist() == own[own >= 0].tolist()


@pytest.mark.parametrize(
    ("shape", "planned", "expected"),
    [
        ((8, 6), (), ("fsdp", None)),
        ((7, 6), (), (None, "fsdp")),
        ((7, 5), (), (None, None)),
        ((0, 4), (), (None, "fsdp")),
        ((8, 6), ("tp", None), ("tp", "fsdp")),
        ((8, 5), ("tp", None), ("tp", None)),
        ((8, 6), (None, "tp"), ("fsdp", "tp")),
        ((8, 6), (None, "fsdp"), (None, "fsdp")),
    ],
)
def test_a_partition_leaves_what_the_plan_says(shape, planned, expected):
    mesh = Mesh((("dp", 1), ("fsdp", 2), ("tp", 2)))
    assert partition_spec(shape, mesh, planned) == expected
    assert partitioned_shape(shape, mesh, expected) == tuple(
        n if axis is None else n // 2 for n, axis in zip(shape, expected, strict=True)
    )
    assert partition_spec(shape, Mesh((("fsdp", 1), ("tp", 1))), planned) == (None,) * len(shape)
