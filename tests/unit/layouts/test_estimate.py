"""The estimate of a step's time: what is sent, how far, and by whom."""

from dataclasses import replace

import pytest
import torch

from torchacc.config import Config
from torchacc.layouts import find_device
from torchacc.layouts.estimate import _copied, _is_near, _numel, _of_device, _of_parameters, estimate
from torchacc.memory_plan import study
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh

transformers = pytest.importorskip("transformers")


def mixtral(**sizes):
    config = transformers.MixtralConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    options = Config(backend="native")
    for axis, size in sizes.items():
        getattr(options.dist, axis).size = size
    with torch.device("meta"):
        model, tokens = transformers.MixtralForCausalLM(config).train(), torch.zeros(2, 16, dtype=torch.long)
    return study(model, {"input_ids": tokens, "labels": tokens}, options, num_states=2, backend="native")


def test_groups_of_any_devices_that_lie_on_two_machines_are_far():
    mesh = Mesh((("dp", 2), ("tp", 3)))
    assert _is_near(mesh, ("tp",), 3)
    assert not _is_near(mesh, ("tp",), 4), "devices 3, 4 and 5 are on two machines of 4"
    assert _is_near(mesh, ("tp",), 6)
    assert not _is_near(Mesh((("dp", 2), ("tp", 4))), ("dp",), 4)
    assert _is_near(mesh, (), 1)


def test_experts_are_gathered_by_the_devices_that_have_the_same():
    step = mixtral(ep=2)
    for num_devices, num_gathers in ((2, 0), (4, 3)):  # its weights twice, and its gradients
        plan = step.plan_on(num_devices, "FULL_SHARD")
        exchanges = [axes for axes, _ in _of_parameters(plan, find_device("h100"))]
        of_experts = [axes for axes in exchanges if "ep" not in axes]
        assert len(of_experts) == num_gathers * len(plan.experts)
        assert len(exchanges) > len(of_experts)
        assert {plan.mesh.axes(Role.SHARD)} == {axes for axes in exchanges if "ep" in axes}


def test_a_step_writes_each_shard_once_however_experts_are_spread():
    fast = find_device("1e30,1,1e30,1e30,8")  # so that memory is all that takes time
    alone, spread = mixtral(), mixtral(ep=2)
    nbytes = 7 * alone.on(2, "FULL_SHARD").parameters  # AdamW reads four tensors of them, and writes three
    assert nbytes == pytest.approx(7 * spread.on(2, "FULL_SHARD").parameters, rel=0.01)
    for step in (alone, spread):
        moved = sum(max(done / 1e30, read) for done, read in step.devices[0].stages[0].work)
        plan = step.plan_on(2, "FULL_SHARD")
        found = estimate(step, plan, fast)
        copied = sum(2 * _copied(plan, unit) for unit in plan.units)
        assert found.compute == pytest.approx(moved + copied + nbytes, rel=1e-3)

    # Alone a device has its weights as they are.
    assert not any(_copied(alone.plan_on(1, "FULL_SHARD"), unit) for unit in alone.plan_on(1, "FULL_SHARD").units)


def test_devices_that_wait_leave_a_shared_processor_to_others():
    step = mixtral(pp=2)
    plan = step.plan_on(2, "FULL_SHARD")
    own, shared, half = (estimate(step, plan, find_device(f"1e9,1e9,1e9,1e9,2,1e-6,{n}")) for n in (1, 2, 1.25))
    assert own.bubble > 0
    assert shared.bubble == 0
    assert shared.compute <= own.compute
    assert shared.total < half.total < own.total
    assert half.total == pytest.approx(own.total / 1.25)


def test_a_host_calls_each_operation_before_a_cpu_runs_it_and_while_a_gpu_runs_others():
    step = mixtral()
    plan = step.plan_on(1, "FULL_SHARD")
    calls = len(step.devices[0].stages[0].work)
    speeds = find_device("1e30,1e30,1e30,1e30,8,1e-30,1,0.5")  # so that calls are all that takes time
    assert estimate(step, plan, speeds).compute == pytest.approx(calls * 0.5)

    slow = replace(speeds, flops_per_second=1.0)
    products = sum(done for done, _ in step.devices[0].stages[0].work)
    assert products > calls
    assert estimate(step, plan, slow).compute == pytest.approx(products + calls * 0.5)
    assert estimate(step, plan, replace(slow, overlaps=True)).compute == pytest.approx(products)


def test_each_microbatch_but_the_first_adds_its_gradients():
    memory = find_device("1e30,1,1e30,1e30,8,1e-30,1,1e-30")  # so that memory is all that takes time
    step = mixtral(pp=2)
    plan = step.plan_on(2, "FULL_SHARD")
    device = step.devices[1]
    work = sum(read for stage in device.stages for _, read in stage.work)
    trained = sum(parameter.numel for parameter in device.plan_of(plan).parameters) * 4

    found = _of_device(device, plan, memory, 2).compute
    assert device.stages[0].lifetimes.num_microbatches == 2
    assert found == pytest.approx(2 * work + 3 * trained + 7 * trained, rel=1e-3)


def test_gloo_sums_all_gradients_to_reduce_them_to_shards():
    plan = mixtral().plan_on(2, "FULL_SHARD")
    nccl, gloo = (
        [nbytes for _, nbytes in _of_parameters(plan, find_device(name))] for name in ("h100", "1e9,1e9,1e9,1e9,8")
    )
    of_gradients = sum(_numel(plan, unit) * 4 // 2 for unit in plan.units)
    assert sum(gloo) == sum(nccl) + of_gradients
    assert len(gloo) == len(nccl)
