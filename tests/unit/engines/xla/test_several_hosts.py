"""One program for several hosts: on two that are made up, as XLA's CPU client connects no processes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from tests import forkrun
from torchacc.config import Config
from torchacc.engines.xla import cuda, runtime, tpu
from torchacc.engines.xla.spmd import SpmdEngine
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.parallel.mesh import Mesh

PROGRAM = Path(__file__).with_name("hosts_program.py")
RELATIVE = 1e-5
HOSTS = Job(rank=1, num_processes=4, local_rank=0, local_num_processes=1)
FOR_ALL = {"dist": {"fsdp": {"use_spmd": True, "size": 8}}}


# Who may start


@pytest.fixture
def on_tpus(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.delenv("PJRT_LOCAL_PROCESS_RANK", raising=False)
    monkeypatch.setattr(tpu, "num_chips", lambda: 4)


def test_one_process_on_each_tpu_host_is_taken(on_tpus, monkeypatch):
    monkeypatch.setattr(runtime, "count_devices", lambda num_processes: 4 * num_processes)
    assert SpmdEngine.count_devices(Config.from_dict(FOR_ALL), HOSTS) == 16


def test_several_processes_on_a_tpu_host_are_refused(on_tpus):
    two_on_each = Job(num_processes=8, local_num_processes=2)
    with pytest.raises(ConfigError, match=r"has 8, 2 of them on this machine: start one on each TPU host, --nproc_per"):
        SpmdEngine.count_devices(Config.from_dict(FOR_ALL), two_on_each)


@pytest.mark.parametrize("platform", ["CPU", "CUDA"])
def test_cpus_and_gpus_of_several_machines_are_refused(monkeypatch, platform):
    monkeypatch.setenv("PJRT_DEVICE", platform)
    monkeypatch.setattr(cuda, "check_plugin", lambda: Path())
    with pytest.raises(ConfigError, match=r"this job has 4, 1 of them on this machine: start the script with `python`"):
        SpmdEngine.count_devices(Config.from_dict(FOR_ALL), HOSTS)


def test_buckets_of_several_lengths_are_refused(on_tpus):
    config = Config.from_dict({**FOR_ALL, "backend": "xla", "dataloader": {"max_length": 64, "num_buckets": 4}})
    engine = SpmdEngine(config=config, mesh=Mesh((("dp", 1), ("fsdp", 8))), job=HOSTS)
    with pytest.raises(ConfigError, match=r"buckets of \d lengths, of which each of the 4 hosts would choose one"):
        engine.check(nn.Linear(2, 2))
    config.dataloader.num_buckets = 1
    SpmdEngine(config=config, mesh=engine.mesh, job=HOSTS).check(nn.Linear(2, 2))


def test_weights_of_rank_0_can_be_asked_for_where_there_are_several():
    of_hosts, alone = (
        SpmdEngine(config=Config(), mesh=Mesh((("dp", 1), ("fsdp", 8))), job=job) for job in (HOSTS, Job())
    )
    assert "dist.fsdp.sync_module_states" in alone.options_without_effect()
    assert "dist.fsdp.sync_module_states" not in of_hosts.options_without_effect()


# Where the devices lie


def made_up_runtime(monkeypatch, places, own=()):
    """Let the runtime have TPUs at some places, whose numbers come in no order."""
    devices = [
        {"name": f"TPU:{number}", "coords": list(coords), "core_on_chip": 0} | ({"slice_index": index} if index else {})
        for number, (index, *coords) in enumerate(places)
    ]
    module = SimpleNamespace(global_runtime_device_attributes=lambda: devices[::-1])
    library = SimpleNamespace(_xla_get_runtime_devices=lambda: [f"TPU:{number}" for number in own])
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(runtime=module, _XLAC=library))
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", module)


def test_devices_of_tpus_are_put_where_their_neighbours_are(on_tpus, monkeypatch):
    places = [(index, x, y, 0) for index in (1, 0) for y in range(2) for x in range(2)]
    made_up_runtime(monkeypatch, places, own=[6, 3])
    assert runtime.local_devices() == [6, 3]
    assert runtime.device_places() == [(*place, 0) for place in places]
    engine = SpmdEngine(config=Config(), mesh=Mesh((("dp", 2), ("fsdp", 2), ("tp", 2))), job=HOSTS)
    first, second = engine.device_order[:4], engine.device_order[4:]
    assert first == [4, 6, 5, 7]  # slice 0, and in it neighbours
    assert second == [0, 2, 1, 3]
    assert engine.partition((("dp", "fsdp"), "tp")).tile_assignment == [[4, 6], [5, 7], [0, 2], [1, 3]]


def test_devices_elsewhere_keep_their_order(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    made_up_runtime(monkeypatch, [(0, x, 0, 0) for x in (3, 1, 0, 2)])
    engine = SpmdEngine(config=Config(), mesh=Mesh((("dp", 1), ("fsdp", 4))), job=Job())
    assert engine.device_order == [0, 1, 2, 3]


# Training


class Runs:
    """What the program has found, for each layout with one process and with two hosts."""

    def __init__(self, folder):
        self._folder = folder
        self._found = {}

    def __call__(self, layout, num_ranks):
        if (layout, num_ranks) not in self._found:
            folder = self._folder / f"{layout}-{num_ranks}"
            folder.mkdir()
            done = forkrun.run(
                PROGRAM, folder, layout, num_ranks=num_ranks, imports=["torch_xla"], timeout=200, merged=True
            )
            files = [folder / f"rank{rank}.json" for rank in range(max(num_ranks, 1))]
            assert all(file.exists() for file in files), done.stdout
            self._found[layout, num_ranks] = [json.loads(file.read_text()) for file in files]
        return self._found[layout, num_ranks]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    pytest.importorskip("transformers")
    return Runs(tmp_path_factory.mktemp("hosts"))


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:  # the hosts have rows of their own, or the same; others are of these two
        others = ["hybrid", "sp"] if metafunc.config.getoption("--full-contract") else []
        metafunc.parametrize("layout", ["fsdp", "tp", *others])


@pytest.mark.slow
@pytest.mark.xla
def test_two_hosts_train_save_and_load_as_one_does(runs, layout):
    (alone,), of_hosts = runs(layout, 0), runs(layout, 2)
    assert len(set(alone["before"] + alone["after"])) > 5
    for found in of_hosts:
        for name in ("before", "after", "resumed"):
            assert found[name] == pytest.approx(alone[name], rel=RELATIVE)
        assert found["resumed"] == found["after"]
        assert found["differences"] == []
        assert found["not_written_once"] == []
        assert found["of_full_states"] == []
        assert len(set(found["in_order"])) == 1


@pytest.mark.slow
@pytest.mark.xla
def test_each_host_feeds_and_holds_what_its_devices_do(runs):
    (alone,), of_hosts = runs("fsdp", 0), runs("fsdp", 2)
    assert [found["data_parallel_ranks"] for found in of_hosts] == [[1, 2], [0, 3]]
    assert all(found["held"] < 0.51 * alone["held"] for found in of_hosts)
    assert all(found["gathered"] == [100, 101, 0, 1, 2, 3, 102, 103] for found in of_hosts)
    of_parts_of_layers = [found["data_parallel_ranks"] for found in runs("tp", 2)]
    assert of_parts_of_layers == [[0, 1], [0, 1]]


@pytest.mark.slow
@pytest.mark.xla
def test_what_hosts_do_not_have_in_common_is_refused(runs):
    for found in runs("fsdp", 2):
        assert "different shapes, or other numbers, and run one program: rank 0 calls" in found["of_other_shapes"]
        assert all(f"with (8, {length}) torch.int64, with gradients" in found["of_other_shapes"] for length in (4, 5))
        assert "torch.int64, without gradients" in found["in_other_modes"]
        assert "give a row for each sample of this host" in found["without_rows"]
        assert "one program is for several hosts" in found["in_shards"]
