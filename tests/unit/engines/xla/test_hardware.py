"""Which devices are found, and what is refused because of them: on a machine that is made up, as nobody has one."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

import torchacc
from tests import forkrun
from torchacc.config import Config
from torchacc.engines import registry
from torchacc.engines.xla import cuda, hardware, runtime, tpu
from torchacc.engines.xla.multiprocess import MultiprocessEngine
from torchacc.engines.xla.spmd import SpmdEngine
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.parallel.mesh import Mesh

PROGRAM = Path(__file__).with_name("hardware_program.py")
ALONE = Job()
TWO = Job(num_processes=2, local_num_processes=2)
FOUR = Job(num_processes=4, local_num_processes=4)
VARIABLES = ("PJRT_DEVICE", "TPU_LIBRARY_PATH", "PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT")


@pytest.fixture(autouse=True)
def nothing(monkeypatch, tmp_path):
    """No variable, no chip, no GPU."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cuda, "has_gpu", lambda: False)
    monkeypatch.setattr(tpu, "num_chips", lambda: 0)


@pytest.fixture
def libtpu(tmp_path, monkeypatch):
    """A package of that name."""
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def chips(monkeypatch):
    monkeypatch.setattr(tpu, "num_chips", lambda: 4)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CUDA")
    monkeypatch.setattr(cuda, "check_plugin", lambda: Path())


# What is here


def make_bus(folder: Path, *devices: tuple[str, str]) -> Path:
    for index, (vendor, device) in enumerate(devices):
        place = folder / f"0000:00:{index:02}.0"
        place.mkdir()
        (place / "vendor").write_text(f"{vendor}\n")
        (place / "device").write_text(f"{device}\n")
    return folder


def test_chips_are_counted_on_the_bus(tmp_path, monkeypatch):
    monkeypatch.undo()
    bus = make_bus(tmp_path, ("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x001f"), ("0x10de", "0x0063"))
    (tmp_path / "0000:01:00.0").mkdir()  # with no file
    assert tpu.num_chips(bus) == 2
    assert tpu.num_chips(tmp_path / "none") == 0


@pytest.mark.xla
def test_chips_are_those_of_torch_xla():
    source = Path(importlib.util.find_spec("torch_xla").origin).parent / "_internal" / "tpu.py"  # read, not imported
    listed = source.read_text().partition("_TPU_PCI_DEVICE_IDS = [")[2].partition("]")[0]
    assert set(re.findall("'(0x[0-9a-f]+)'", listed)) == tpu.PCI_DEVICES
    assert "_GOOGLE_PCI_VENDOR_ID = '0x1ae0'" in source.read_text()


def test_libtpu_alone_is_no_tpu(libtpu):
    assert tpu.has_library()
    assert hardware.platform() == "CPU"
    assert runtime.runs_on_cpu()
    hardware.check_platform()


def test_chips_with_libtpu_are_taken(libtpu, chips):
    assert hardware.platform() == "TPU"
    hardware.check_platform()


@pytest.mark.xla
def test_chips_without_libtpu_are_refused_and_not_left_for_the_cpu(chips, monkeypatch):
    with pytest.raises(ConfigError, match=r"has 4 TPU chips, and libtpu, by which XLA drives them, is not installed"):
        registry.choose(Config(backend="xla"), ALONE)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert registry.choose(Config(backend="xla"), ALONE).engine == "xla-spmd"


@pytest.mark.parametrize("installed", [True, False])
def test_chips_that_are_left_idle_are_warned_of(chips, monkeypatch, caplog, installed):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(tpu, "has_library", lambda: installed)
    hardware.warn_of_idle_devices.cache_clear()
    hardware.warn_of_idle_devices()
    assert "has 4 TPU chips, as PJRT_DEVICE=CPU is set" in caplog.text
    assert ("once libtpu is installed" in caplog.text) is not installed
    hardware.warn_of_idle_devices.cache_clear()


# One process for each device


def test_one_process_for_each_gpu_is_refused(gpu):
    with pytest.raises(ConfigError, match=r"config\.backend = 'xla' with one process for each NVIDIA GPU") as raised:
        MultiprocessEngine.count_devices(Config(backend="xla"), TWO)
    assert "config.backend = 'native'" in str(raised.value)
    assert "config.dist.fsdp.use_spmd = True" in str(raised.value)


@pytest.mark.xla
@pytest.mark.parametrize("backend", ["xla", "auto"])
def test_accelerate_refuses_one_process_for_each_gpu_before_anything_starts(gpu, monkeypatch, backend):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one process for each NVIDIA GPU"):
        torchacc.accelerate(nn.Linear(2, 2), config=Config(backend=backend))
    assert os.environ["PJRT_DEVICE"] == "CUDA"
    assert "XLA_COORDINATOR_PORT" not in os.environ


def test_a_single_gpu_is_driven_as_spmds_virtual_device(gpu):
    engine = SpmdEngine(config=Config(), mesh=Mesh((("dp", 1), ("fsdp", 1))), job=ALONE)
    assert not engine.is_partitioned
    assert engine.uses_virtual_device


def test_as_many_processes_as_chips_are_taken(libtpu, chips):
    assert MultiprocessEngine.count_devices(Config(), FOUR) == 4
    eight_on_two_hosts = Job(num_processes=8, local_num_processes=4)
    assert MultiprocessEngine.count_devices(Config(), eight_on_two_hosts) == 8


def test_another_number_of_processes_than_chips_is_refused(libtpu, chips, monkeypatch):
    with pytest.raises(ConfigError, match=r"starts 2 processes on this machine, which has 4 TPU chips") as raised:
        MultiprocessEngine.count_devices(Config(), TWO)
    assert "--nproc_per_node=4" in str(raised.value)
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0,1")  # the user knows better
    assert MultiprocessEngine.count_devices(Config(), TWO) == 2


def test_chips_do_not_count_where_the_cpu_is_asked_for(libtpu, chips, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert MultiprocessEngine.count_devices(Config(), TWO) == 2


# Who has started the process


@pytest.mark.parametrize("use_spmd", [True, False])
def test_processes_of_torch_xlas_launch_are_refused(monkeypatch, use_spmd):
    monkeypatch.setattr(hardware, "is_running", lambda: False)
    monkeypatch.setenv("PJRT_LOCAL_PROCESS_RANK", "3")
    monkeypatch.setenv("PJRT_LOCAL_PROCESS_COUNT", "4")
    config = Config.from_dict({"dist": {"fsdp": {"use_spmd": use_spmd, "size": 2}}})
    with pytest.raises(ConfigError, match=r"has started 4 processes or threads.*start the script by `torchrun`"):
        SpmdEngine.count_devices(config, ALONE)


def test_a_single_process_of_torch_xlas_launch_is_taken(monkeypatch):
    monkeypatch.setattr(hardware, "is_running", lambda: False)
    monkeypatch.setenv("PJRT_LOCAL_PROCESS_RANK", "0")
    monkeypatch.setenv("PJRT_LOCAL_PROCESS_COUNT", "1")
    assert SpmdEngine.count_devices(Config(), ALONE) == 1


def test_torch_xlas_launch_inside_of_a_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("PJRT_LOCAL_PROCESS_COUNT", "4")
    with pytest.raises(ConfigError, match=r"PJRT_LOCAL_PROCESS_COUNT=4.*has started 2 processes"):
        MultiprocessEngine.count_devices(Config(), TWO)


def test_one_of_several_processes_that_has_no_rank_is_refused(monkeypatch):
    runtime_of_four = SimpleNamespace(process_count=lambda: 4)
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(runtime=runtime_of_four))
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime_of_four)
    with pytest.raises(torchacc.EngineError, match=r"connects 4 processes.*nobody has told this one its rank"):
        hardware.check_process_count(1)
    hardware.check_process_count(4)
    with pytest.raises(torchacc.EngineError, match=r"has started 2 processes, and the XLA runtime connects 4"):
        hardware.check_process_count(2)


def test_one_process_that_finds_several_chips_is_told_what_it_can_do(libtpu, chips):
    said = hardware.other_devices(1, 8)
    assert "asks for one XLA device in this process, and this machine has 8 TPU devices" in said
    for advice in ("use_spmd = True", "torchrun --nproc_per_node=8", "TPU_VISIBLE_CHIPS=0"):
        assert advice in said
    assert "sizes in config.dist multiply to 8" in hardware.other_devices(4, 8)


def test_what_exact_products_cost_a_tpu_is_said(libtpu, chips, monkeypatch, caplog):
    kept = []
    backends = SimpleNamespace(set_mat_mul_precision=kept.append)
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(backends=backends))
    monkeypatch.setitem(sys.modules, "torch_xla.backends", backends)
    with caplog.at_level("INFO", logger="torchacc"):
        runtime._keep_matmul_precision()
    assert kept == ["highest"]
    assert "which takes a TPU six passes: config.compute.bf16 = True takes one" in caplog.text


# In processes of their own


def run(*arguments: str) -> dict:
    done = forkrun.run(PROGRAM, *arguments, imports=["torch_xla"], timeout=200)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stdout + done.stderr
    return json.loads(found[-1])


@pytest.mark.slow
@pytest.mark.xla
def test_one_device_trains_the_same_as_spmds_virtual_device():
    plain, virtual = run("train"), run("train", "virtual")
    assert virtual["is_spmd"]
    assert not plain["is_spmd"]
    assert virtual["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert virtual["weights"] == pytest.approx(plain["weights"], rel=1e-6)
    assert len(set(plain["losses"])) == 4


@pytest.mark.slow
@pytest.mark.xla
def test_threads_of_torch_xlas_launch_are_refused():
    found = run("launch")
    assert found["error"] == "ConfigError"
    assert "torch_xla.launch() or xmp.spawn() has started 2 processes or threads" in found["message"]
