"""XLA on NVIDIA GPUs, up to the point where a GPU is needed."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchacc.config import Config
from torchacc.engines import registry
from torchacc.engines.xla import cuda, runtime
from torchacc.env import Job
from torchacc.errors import ConfigError

ROOT = Path(__file__).parents[4]
PROGRAM = Path(__file__).with_name("cuda_program.py")
ALONE = Job()

needs_plugin = pytest.mark.skipif(
    cuda.installed_plugin() is None, reason="no CUDA plugin is installed: pip install 'torchacc[xla-cuda]'"
)


def install(folder: Path, version: str, library: Path | None, wheel: str = "jax_cuda12_pjrt") -> None:
    """Lay out what pip would: metadata of a plugin, and a library that may be none."""
    metadata = folder / f"{wheel}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {wheel.replace('_', '-')}\nVersion: {version}\n")
    if library is not None:
        place = folder / "jax_plugins" / f"xla_{wheel.split('_')[1]}" / "xla_cuda_plugin.so"
        place.parent.mkdir(parents=True)
        place.symlink_to(library)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder that comes before all others in which packages are looked for."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def xla_29(site):
    """torch_xla 2.9.0 by its metadata, where it may not be installed."""
    metadata = site / "torch_xla-2.9.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch-xla\nVersion: 2.9.0\n")


@pytest.fixture
def without_plugin(monkeypatch):
    def version(name, original=importlib.metadata.version):
        if name.endswith("-pjrt"):
            raise importlib.metadata.PackageNotFoundError(name)
        return original(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


# Which plugin


def test_a_plugin_of_a_known_pair_is_found_by_its_files(site, xla_29):
    install(site, "0.7.1", Path(__file__))
    assert cuda.check_plugin() == site / "jax_plugins/xla_cuda12/xla_cuda_plugin.so"
    assert "jax_plugins" not in sys.modules


@pytest.mark.parametrize(("wheel", "version"), [("jax-cuda12-pjrt", "0.8.0"), ("jax-cuda13-pjrt", "0.11.2")])
def test_another_plugin_is_refused_with_the_pair(site, xla_29, monkeypatch, wheel, version):
    monkeypatch.setattr(cuda, "_WHEELS", (wheel,))
    install(site, version, Path(__file__), wheel=wheel.replace("-", "_"))
    with pytest.raises(ConfigError, match=rf"fits torch_xla 2\.9\.0, and {wheel} {version} is installed") as error:
        cuda.check_plugin()
    assert "pip install 'torchacc[xla-cuda]'" in str(error.value)
    assert "`pip install --no-deps jax-cuda12-pjrt==0.7.1`" in str(error.value)


def test_no_plugin_is_refused_with_the_pair(xla_29, without_plugin):
    with pytest.raises(ConfigError, match=r"no plugin is installed: `pip install 'torchacc\[xla-cuda\]'`"):
        cuda.check_plugin()


def test_a_plugin_without_its_library_is_refused(site, xla_29):
    install(site, "0.7.1", None)
    with pytest.raises(ConfigError, match=r"xla_cuda_plugin\.so is missing: install it again"):
        cuda.check_plugin()


def test_an_unknown_torch_xla_is_refused(site):
    metadata = site / "torch_xla-2.10.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch-xla\nVersion: 2.10.0\n")
    install(site, "0.7.1", Path(__file__))
    with pytest.raises(ConfigError, match=r"fits torch_xla 2\.10\.0.*torch_xla 2\.9 is the one that works"):
        cuda.check_plugin()


def test_the_extra_pins_the_pair_that_is_recommended():
    plugin = cuda.KNOWN_PAIRS["2.9"]
    assert f'"{plugin.wheel}=={plugin.version}' in (ROOT / "setup.py").read_text()


# Which devices


@pytest.mark.parametrize(("names", "expected"), [(["nvidia0", "nvidiactl"], True), (["nvidiactl", "null"], False)])
def test_a_gpu_is_seen_by_its_file(tmp_path, names, expected):
    for name in names:
        (tmp_path / name).touch()
    assert cuda.has_gpu(tmp_path) is expected


@pytest.mark.parametrize("given", ["CPU", "TPU", "CUDA"])
def test_what_the_user_asks_for_is_never_overridden(monkeypatch, given):
    monkeypatch.setenv("PJRT_DEVICE", given)
    monkeypatch.setattr(cuda, "has_gpu", lambda: given == "CPU")
    assert runtime.platform() == given


@pytest.mark.parametrize(("gpu", "plugin", "expected"), [(1, 1, "CUDA"), (1, 0, "CPU"), (0, 1, "CPU")])
def test_a_gpu_with_a_plugin_is_taken(monkeypatch, gpu, plugin, expected):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr(cuda, "has_gpu", lambda: bool(gpu))
    monkeypatch.setattr(cuda, "installed_plugin", lambda: ("jax-cuda12-pjrt", "0.7.1") if plugin else None)
    assert runtime.platform() == expected


@pytest.mark.xla
def test_a_plugin_that_does_not_fit_is_refused_before_anything_starts(site, monkeypatch):
    install(site, "0.7.2", Path(__file__))
    monkeypatch.setenv("PJRT_DEVICE", "CUDA")
    with pytest.raises(ConfigError, match=r"jax-cuda12-pjrt 0\.7\.2 is installed"):
        registry.choose(Config(backend="xla"), ALONE)


@pytest.mark.xla
def test_pjrt_device_decides_for_xla_where_pytorch_has_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr(cuda, "check_plugin", lambda: Path())
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert registry.choose(Config(), ALONE).engine == "native"
    monkeypatch.setenv("PJRT_DEVICE", "CPU")  # as importing torch_xla sets it
    assert registry.choose(Config(), ALONE).engine == "native"
    monkeypatch.setenv("PJRT_DEVICE", "CUDA")
    assert registry.choose(Config(), ALONE).engine == "xla-spmd"


# What the client is made with


def test_a_process_takes_the_first_gpu_or_all():
    memory = Config().memory
    assert cuda.client_options(memory, drives_all=False) == {"preallocate": True, "visible_devices": [0]}
    assert cuda.client_options(memory, drives_all=True) == {"preallocate": True}


def test_the_config_says_how_memory_is_taken():
    memory = Config.from_dict({"memory": {"gpu_fraction": 0.5, "gpu_preallocate": False}}).memory
    assert cuda.client_options(memory, drives_all=True) == {"preallocate": False, "memory_fraction": 0.5}


@pytest.mark.parametrize("fraction", [0, 1.5, True, "half"])
def test_a_fraction_that_is_none_is_refused(fraction):
    with pytest.raises(ConfigError, match=r"memory\.gpu_fraction"):
        Config().memory.gpu_fraction = fraction


# What torch_xla makes of it


def run(*arguments: str, site: Path | None = None) -> dict:
    """Run the program without any GPU in sight, and return how it ended."""
    path = os.pathsep.join(filter(None, [site and str(site), str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env={**os.environ, "PYTHONPATH": path, "PJRT_DEVICE": "CUDA", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 1, done.stdout + done.stderr
    return found[0]


@pytest.mark.slow
@pytest.mark.xla
def test_a_library_that_is_no_plugin_is_reported(tmp_path):
    install(tmp_path, "0.7.1", Path(importlib.util.find_spec("_XLAC").origin))
    found = run("one", site=tmp_path)
    assert found["error"] == "EngineError"
    assert "XLA cannot start on CUDA" in found["message"]
    assert "nvidia-smi" in found["message"]
    assert found["devices"] is None


@pytest.mark.xla
@needs_plugin
@pytest.mark.parametrize("mode", ["one", "spmd"])
def test_without_a_gpu_the_plugins_client_says_so(mode):
    found = run(mode, "0.5")
    assert found["error"] == "EngineError"
    assert found["message"].startswith("XLA cannot start on CUDA: No visible GPU devices.")
