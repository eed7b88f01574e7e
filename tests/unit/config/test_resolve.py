import pytest

from torchacc.config import Config, requested_devices, resolve
from torchacc.env import Job
from torchacc.errors import ConfigError


def job(num_processes=1):
    return Job(num_processes=num_processes, local_num_processes=num_processes)


def refusal(values, *, num_processes=1, num_devices=None):
    with pytest.raises(ConfigError) as raised:
        resolve(Config.from_dict(values), job(num_processes), num_devices=num_devices or num_processes)
    return str(raised.value)


def test_the_users_config_is_never_changed():
    config = Config(dist={"fsdp": {"size": 2}})
    resolved = resolve(config, job(4), num_devices=4)
    assert config == Config(dist={"fsdp": {"size": 2}})
    config.dist.fsdp.size = 4
    assert resolved.dist.fsdp.size == 2


def test_what_is_resolved_is_frozen_and_can_be_resolved_again():
    resolved = resolve(Config(), job(2), num_devices=2)
    with pytest.raises(ConfigError, match="frozen"):
        resolved.dist.dp.size = 1
    assert resolve(resolved, job(2), num_devices=2) == resolved


@pytest.mark.parametrize(
    ("dist", "num_devices", "dp"),
    [
        ({}, 1, 1),
        ({}, 4, 4),
        ({"fsdp": {"size": 4}}, 4, 1),
        ({"fsdp": {"size": 2}}, 4, 2),
        ({"dp": {"size": 2}, "fsdp": {"size": 2}}, 4, 2),
        ({"fsdp": {"size": 2, "sharding_strategy": "HYBRID_SHARD"}}, 4, 2),
        ({"fsdp": {"size": 4, "sharding_strategy": "NO_SHARD"}}, 4, 1),
    ],
)
def test_dp_takes_what_the_other_axes_leave(dist, num_devices, dp):
    assert resolve(Config(dist=dist), job(num_devices), num_devices=num_devices).dist.dp.size == dp


@pytest.mark.parametrize(
    ("dist", "expected"),
    [({}, 1), ({"fsdp": {"size": 4}}, 4), ({"dp": {"size": 2}, "fsdp": {"size": 4}}, 8)],
)
def test_requested_devices_count_an_open_dp_as_one(dist, expected):
    assert requested_devices(Config(dist=dist)) == expected


def test_a_single_process_learns_both_ways_to_more_devices():
    message = refusal({"dist": {"fsdp": {"size": 4}}})
    assert "config.dist.fsdp.size = 4, but the job has 1 device." in message
    assert "`torchrun --nproc_per_node=4 your_script.py`" in message
    assert "`config.dist.fsdp.use_spmd = True`" in message
    assert refusal({"dist": {"dp": {"size": 4}}}).endswith(message[message.index("Either") :])


def test_spmd_is_not_proposed_to_who_uses_it():
    assert "use_spmd" not in refusal({"dist": {"fsdp": {"size": 4, "use_spmd": True}}})


def test_spmd_drives_all_devices_from_one_process():
    config = Config(dist={"fsdp": {"size": 4, "use_spmd": True}})
    assert resolve(config, job(), num_devices=requested_devices(config)).dist.dp.size == 1


ARITHMETIC = [
    (
        {"fsdp": {"size": 4}},
        2,
        "config.dist.fsdp.size = 4, but the job has 2 devices. Start one process per device: "
        "`torchrun --nproc_per_node=4 your_script.py`, or set `config.dist.fsdp.size = 2`",
    ),
    (
        {"fsdp": {"size": 3}, "tp": {"size": 2}},
        4,
        "config.dist: fsdp(3) * tp(2) = 6, but the job has 4 devices. Start one process per device: "
        "`torchrun --nproc_per_node=6 your_script.py`, or set `config.dist.fsdp.size = 2`",
    ),
    ({"fsdp": {"size": 3}}, 4, "= 3, but the job has 4 devices. 3 does not divide 4: choose sizes whose product does"),
    (
        {"dp": {"size": 1}, "fsdp": {"size": 2}},
        4,
        "config.dist.fsdp.size = 2, but the job has 4",
    ),
]


@pytest.mark.parametrize(("dist", "num_processes", "message"), ARITHMETIC)
def test_axes_that_do_not_fill_the_job_are_refused_with_the_arithmetic(dist, num_processes, message):
    assert message in refusal({"dist": dist}, num_processes=num_processes)


def test_a_job_on_several_machines_is_not_told_to_start_all_processes_on_one():
    with pytest.raises(ConfigError, match="8 processes on all machines together"):
        resolve(Config(dist={"fsdp": {"size": 8}}), Job(num_processes=4, local_num_processes=2), num_devices=4)


def test_two_dtypes_contradict_each_other():
    assert "compute.fp16 and compute.bf16 are both True" in refusal({"compute": {"fp16": True, "bf16": True}})


def test_a_chunked_loss_goes_with_no_scaler():
    message = refusal({"compute": {"fp16": True, "chunked_loss": 512}})
    assert message.startswith("compute.chunked_loss = 512 with compute.fp16 = True")


@pytest.mark.parametrize("compute", [{}, {"fp16": True}], ids=str)
def test_masters_have_no_less_precision_than_the_computation(compute):
    message = refusal({"compute": {"master_dtype": "bfloat16", **compute}})
    assert message.startswith("compute.master_dtype = 'bfloat16'")
    assert "config.compute.bf16 = True" in message


def test_units_are_chosen_in_one_way():
    message = refusal({"dist": {"fsdp": {"wrap_layer_cls": "Block", "min_num_params": 1000}}})
    assert message.startswith("dist.fsdp.wrap_layer_cls and dist.fsdp.min_num_params each choose the units")


@pytest.mark.parametrize(
    ("fsdp", "message"),
    [
        (4, "dp(1) * fsdp(4) has a single group: make both larger than 1, or use 'FULL_SHARD'"),
        (1, "dp(4) * fsdp(1) has a single device in a group: make both larger than 1, or use 'NO_SHARD'"),
    ],
)
def test_a_hybrid_needs_two_axes(fsdp, message):
    dist = {"fsdp": {"size": fsdp, "sharding_strategy": "HYBRID_SHARD"}}
    assert message in refusal({"dist": dist}, num_processes=4)


def test_devices_that_share_samples_or_experts_hold_no_copies():
    dist = {"sp": {"size": 2}, "fsdp": {"size": 2, "sharding_strategy": "NO_SHARD"}}
    assert "parameters are sharded over the devices that share samples" in refusal({"dist": dist}, num_processes=4)
    dist = {"ep": {"size": 2}, "fsdp": {"size": 2, "sharding_strategy": "NO_SHARD"}}
    assert "experts are sharded over the devices that they are spread over" in refusal({"dist": dist}, num_processes=4)


@pytest.mark.parametrize("values", [{"memory": {"gc": True}}, {"dist": {"fsdp": {"activation_checkpointing": True}}}])
def test_two_switches_for_recompute(values):
    assert resolve(Config.from_dict(values), job(), num_devices=1).memory.gc
    assert not resolve(Config(), job(), num_devices=1).memory.gc


@pytest.mark.parametrize(
    ("option", "value"), [("gc_cls", "Block"), ("gc_every", 2), ("gc_cnt", 1), ("gc_policy", "save_matmuls")]
)
def test_a_choice_of_what_is_recomputed_needs_recompute(option, value):
    message = refusal({"memory": {option: value}})
    assert message.startswith(f"memory.{option} = ")
    assert "set config.memory.gc = True" in message
    asked = Config.from_dict({"memory": {option: value}, "dist": {"fsdp": {"activation_checkpointing": True}}})
    assert resolve(asked, job(), num_devices=1).memory.gc


def test_results_that_are_kept_are_not_offloaded():
    memory = {"gc": True, "gc_policy": "save_matmuls", "offload_activations": True}
    assert "the results that are kept would stay on the device" in refusal({"memory": memory})


def test_microbatches_are_for_stages():
    assert "leave it out, or set config.dist.pp.size" in refusal({"dist": {"pp": {"num_microbatches": 4}}})
