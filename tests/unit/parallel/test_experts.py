import pytest
import torch
from torch import nn

from torchacc.config import Config
from torchacc.errors import ConfigError
from torchacc.parallel.axes import Role, restricted_to
from torchacc.parallel.experts import EXPERT_SHARDING_ROLES, Experts, select_experts, spread_spec
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.plan import make_plan
from torchacc.parallel.sharding import local_shard, partition_spec, partitioned_shape


class ManyExperts(nn.Module):
    def __init__(self, num_experts, width=4):
        super().__init__()
        self.num_experts = num_experts
        self.up_proj = nn.Parameter(torch.zeros(num_experts, width, width))
        self.bias = nn.Parameter(torch.zeros(num_experts, width))

    def forward(self, x):
        return x


class Layer(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.router = nn.Linear(4, num_experts)
        self.experts = ManyExperts(num_experts)

    def forward(self, x):
        return self.experts(self.router(x))


class Net(nn.Module):
    def __init__(self, num_experts=4):
        super().__init__()
        self.layers = nn.ModuleList([Layer(num_experts) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def mesh(**sizes):
    return Mesh(tuple(sizes.items()))


def held(num_experts, **sizes):
    return select_experts(Net(num_experts), mesh(**sizes))[0].held


def test_devices_compute_the_experts_of_their_rows_in_any_order_of_the_axes():
    assert held(4, fsdp=1, ep=2) == ((0, 1), (2, 3))
    assert held(8, fsdp=2, ep=2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert held(8, ep=2, fsdp=2) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert held(8, dp=2, fsdp=2, ep=2) == held(8, fsdp=2, ep=2)
    assert held(8, fsdp=3, ep=2) == ((0, 1, 4, 5), (2, 3, 6, 7)), "two devices have no rows"
    assert held(2, fsdp=4, ep=2) == ((0,), (1,))


@pytest.mark.parametrize("sizes", [{"dp": 2, "fsdp": 2, "ep": 4}, {"ep": 2, "fsdp": 4}, {"fsdp": 1, "ep": 8}])
def test_what_a_device_gathers_is_the_rows_of_those_with_its_index(sizes):
    on = mesh(**sizes)
    (experts, _) = select_experts(Net(8), on)
    rows = {index: set() for index in range(on.size(Role.EXPERT))}
    for device in range(on.num_devices):
        for piece in local_shard("p", (8, 3), on, device).slices:
            rows[on.index(device, Role.EXPERT)] |= set(range(piece.start // 3, piece.stop // 3))
    assert [set(each) for each in experts.held] == list(rows.values())
    order = [expert for each in experts.held for expert in each]
    assert [order[position] for position in experts.positions] == list(range(8))


@pytest.mark.parametrize(
    ("num_experts", "sizes"), [(6, {"fsdp": 1, "ep": 4}), (6, {"fsdp": 2, "ep": 2}), (2, {"ep": 2, "fsdp": 4})]
)
def test_experts_that_would_not_be_equally_many_are_refused(num_experts, sizes):
    with pytest.raises(ConfigError, match=f"the {num_experts} experts of 'layers.0.experts'.*choose"):
        held(num_experts, **sizes)


@pytest.mark.parametrize(
    ("num_experts", "sizes", "at_rest", "computed"),
    [
        (8, {"dp": 2, "fsdp": 2, "ep": 2}, (2, 6, 4), (4, 6, 4)),
        (8, {"tp": 2, "fsdp": 2, "ep": 2}, (1, 6, 4), (2, 6, 4)),
        (8, {"fsdp": 1, "ep": 8, "tp": 1}, (1, 6, 4), (1, 6, 4)),
        (2, {"fsdp": 2, "ep": 2}, (1, 3, 4), (1, 6, 4)),
        (6, {"fsdp": 4, "ep": 2}, (3, 6, 1), (3, 6, 4)),
    ],
)
def test_in_one_program_devices_share_what_they_compute_by_experts_where_there_are_as_many(
    num_experts, sizes, at_rest, computed
):
    shape, on = (num_experts, 6, 4), mesh(**sizes)
    spec = partition_spec(shape, on, spread_spec(shape, on))
    assert partitioned_shape(shape, on, spec) == at_rest
    assert partitioned_shape(shape, on, restricted_to(spec, *EXPERT_SHARDING_ROLES)) == computed


def test_a_model_without_experts_is_refused_where_they_are_asked_for():
    plain = nn.Sequential(nn.Linear(4, 4))
    assert select_experts(plain, mesh(fsdp=4, ep=1)) == ()
    with pytest.raises(ConfigError, match=r"config\.dist\.ep\.size = 2 .* has no module of experts"):
        select_experts(plain, mesh(fsdp=1, ep=2))


def test_modules_of_experts_become_units_that_are_not_recomputed_by_themselves():
    config = Config(dist={"fsdp": {"wrap_layer_cls": ["Layer"]}}, memory={"gc": True})
    plan = make_plan(Net(), config, mesh(dp=1, fsdp=2, ep=2))
    names = ["layers.0", "layers.0.experts", "layers.1", "layers.1.experts", ""]
    assert [unit.name for unit in plan.units] == names
    assert plan.recomputed == ("layers.0", "layers.1")
    assert plan.experts[1] == Experts("layers.1.experts", ((0, 2), (1, 3)))
    assert "  experts: 2 of the 4 of layers.1.experts on each device" in str(plan)
    alone = make_plan(Net(), config, mesh(dp=1, fsdp=4, ep=1))
    assert [unit.name for unit in alone.units] == ["layers.0", "layers.1", ""]
