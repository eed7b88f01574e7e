"""The table of axes is the config's, and a new axis is one entry."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn

from torchacc.config import Config
from torchacc.config.option_types import Axis
from torchacc.config.sections import DistConfig
from torchacc.memory_plan.step import study
from torchacc.parallel import axes
from torchacc.parallel.axes import AXES, Role, axes_with, axis_with, dim_over, restricted_to
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.sharding import RowLayout, local_shard, partition_spec, partitioned_shape


def test_the_table_has_the_axes_of_the_config():
    assert set(AXES) == set(get_args(Axis)) == set(Config().dist.topology)
    assert set(AXES) <= set(DistConfig.model_fields)


def test_an_axis_is_found_by_its_roles():
    assert axes_with(Role.BATCH) == ("dp", "fsdp", "ep")
    assert axis_with(Role.BATCH, Role.SHARD) == "fsdp"
    assert axis_with(Role.BATCH, Role.SHARD, Role.EXPERT) == "ep"
    with pytest.raises(ValueError, match="not enough values"):
        axis_with(Role.BATCH)


def test_a_spec_is_asked_by_role():
    spec = (None, "tp", ("dp", "fsdp"))
    assert [dim_over(spec, role) for role in (Role.TENSOR, Role.SHARD, Role.REPLICATE, Role.PIPELINE)] == [
        1,
        2,
        2,
        None,
    ]
    assert dim_over((), Role.TENSOR) is None
    assert restricted_to(spec, Role.TENSOR) == (None, "tp", None)
    assert restricted_to(spec, Role.SHARD) == (None, None, "fsdp")
    assert restricted_to(spec, Role.SHARD, Role.TENSOR) == (None, "tp", "fsdp")
    assert restricted_to(spec, Role.BATCH) == spec[:1] + (None,) + spec[2:]


@pytest.fixture
def made_up(monkeypatch):
    """An axis that there is not: along it parameters are sharded, and the devices see the same samples."""
    monkeypatch.setitem(axes.AXES, "made_up", frozenset({Role.SHARD}))


SHARDED = Mesh((("dp", 2), ("fsdp", 4)))


def test_a_new_axis_is_one_entry_for_the_mesh(made_up):
    mesh = Mesh((("dp", 2), ("fsdp", 2), ("made_up", 2)))
    assert (mesh.num_shards, mesh.data_parallel_size, mesh.size(Role.REPLICATE)) == (4, 4, 2)
    assert mesh.groups(Role.SHARD) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [mesh.index(device, Role.SHARD) for device in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [mesh.data_parallel_rank(device) for device in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert mesh.describe() == "dp 2 x fsdp 2 x made_up 2"


def test_a_new_axis_is_one_entry_for_the_sharding_rule(made_up):
    mesh = Mesh((("dp", 2), ("fsdp", 2), ("made_up", 2)))
    for device in range(8):
        assert local_shard("p", (7, 3), mesh, device) == local_shard("p", (7, 3), SHARDED, device)
    spec = partition_spec((3, 8), mesh)
    assert spec == (None, ("fsdp", "made_up"))
    assert partitioned_shape((3, 8), mesh, spec) == (3, 2)
    assert partition_spec((3, 8), mesh, (None, "fsdp")) == (None, "fsdp")
    assert partition_spec((4, 8), mesh, (None, "fsdp")) == ("made_up", "fsdp")


@pytest.mark.parametrize("engine", ["native", "xla"])
def test_a_new_axis_is_one_entry_for_the_memory_plan(made_up, engine):
    with torch.device("meta"):
        model, batch = Layers(), {"x": torch.zeros(4, 8)}
    step = study(model, batch, Config(), num_states=2, backend=engine)

    def count(mesh):
        (only,) = step.devices
        lifetimes = [stage.lifetimes for stage in only.stages]
        return step.backend.count(replace(step.plan, mesh=mesh), lifetimes, step.num_states, only.batch_bytes)

    found, alike = count(Mesh((("fsdp", 2), ("made_up", 2)))), count(Mesh((("fsdp", 4),)))
    assert found == alike != count(Mesh((("fsdp", 2),)))
    numel = sum(RowLayout(tuple(parameter.shape), 4).shard_numel for parameter in model.parameters())
    assert found.parameters == 4 * numel


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.mean()}
