"""The tour in `examples/`: one loss on one device, on four SPMD devices and in two native processes."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests import forkrun

pytest.importorskip("transformers")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("tour_worker.py")
ALL = ("resnet_acc", "resnet_group", "bert_classification", "t5_summarise", "llama_lora")
OF_ENGINE = {"native": ALL, "xla": tuple(name for name in ALL if name != "resnet_group")}
"""Under SPMD batch norm is that of all devices, and group norm is of the model `cnn` of the contract."""
SAME_LOSS = 1e-4  # relative, in float32, after a few steps

NATIVE_2 = pytest.param("native_2", id="native-2")
SPMD_4 = pytest.param("spmd_4", id="spmd-4", marks=pytest.mark.xla)

pytestmark = pytest.mark.slow


def run(*command, cwd, num_ranks=0, imports=()):
    return forkrun.run(*command, num_ranks=num_ranks, imports=imports, cwd=cwd)


def tour(folder, engine, *, num_ranks=0):
    imports = ["torch_xla"] if engine == "xla" else []
    names = OF_ENGINE[engine]
    done = run(WORKER, folder, engine, *names, cwd=folder, num_ranks=num_ranks, imports=imports)
    assert done.returncode == 0, done.stderr[-5000:]
    metrics = {name: json.loads((folder / name / "metrics.json").read_text()) for name in names}
    return metrics | {"names": names, "lines": done.stdout.splitlines(), "folder": folder, "num_ranks": num_ranks}


@pytest.fixture(scope="module")
def native_1(tmp_path_factory):
    return tour(tmp_path_factory.mktemp("native-1"), "native")


@pytest.fixture(scope="module")
def native_2(tmp_path_factory):
    return tour(tmp_path_factory.mktemp("native-2"), "native", num_ranks=2)


@pytest.fixture(scope="module")
def spmd_4(tmp_path_factory):
    return tour(tmp_path_factory.mktemp("spmd-4"), "xla")


@pytest.fixture
def launched(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("launched", [NATIVE_2, SPMD_4], indirect=True)
def test_losses_are_those_of_one_device(launched, native_1):
    for name in launched["names"][1:]:
        assert launched[name]["losses"] == pytest.approx(native_1[name]["losses"], rel=SAME_LOSS), name
    for name in ("t5_summarise", "llama_lora"):
        for when in ("untrained", "trained"):
            assert launched[name][when] == pytest.approx(native_1[name][when], rel=SAME_LOSS), name


@pytest.mark.parametrize("launched", [pytest.param("native_1", id="native-1"), NATIVE_2, SPMD_4], indirect=True)
def test_examples_learn_and_come_back_as_they_were(launched):
    lines = launched["lines"]
    for name in {"resnet_acc", "resnet_group"}.intersection(launched["names"]):
        is_same = launched[name]["loaded back"] == launched[name]["trained"]
        assert is_same == (name == "resnet_group" or launched["num_ranks"] < 2), "both ranks load rank 0's statistics"
    assert launched["bert_classification"]["losses"][-1] < launched["bert_classification"]["losses"][0] - 0.05
    assert 0 < launched["bert_classification"]["accuracy"] < 1
    assert launched["t5_summarise"]["trained"] < launched["t5_summarise"]["untrained"] - 0.5
    lora = launched["llama_lora"]
    assert lora["trained"] < lora["untrained"] - 0.01
    assert lora["opened"] == pytest.approx(lora["trained"], rel=1e-5)
    assert lora["merged"] == pytest.approx(lora["trained"], rel=1e-5)
    adapters = {path.name for path in (launched["folder"] / "llama_lora" / "adapters").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= adapters
    assert not any(name.startswith("model") for name in adapters), "the base is not saved with the adapters"
    for once in ("accuracy   ", "loaded back", "opened   "):
        assert any(line.startswith(once) for line in lines), once
    assert sum(line.startswith("opened") for line in lines) == 1, "rank 0 alone reports"


def test_tour_of_checkpoints(tmp_path):
    done = run(
        ROOT / "examples" / "convert_checkpoint.py",
        "--processes",
        2,
        "--out",
        "out",
        cwd=tmp_path,
        imports=["torch_xla"],
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("tensors, the same bits in each") == 7
    assert "$ torchacc reshard" in done.stdout
    assert done.stdout.endswith("all as it was; the folders are in out\n")
    resumed_by = "-n 1" if importlib.util.find_spec("torch_xla") else "-n 2"
    assert f"$ torchacc launch {resumed_by}" in done.stdout
    assert {path.name for path in (tmp_path / "out").glob("ranks-other/*")} == {
        f"rank-{rank}-of-4-{part}.pth" for rank in range(4) for part in ("model", "optimizer")
    }


def test_wrong_options_are_refused_before_anything_is_read(tmp_path):
    done = run(WORKER, "--errors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    batch, devices, steps, peft, processes = done.stdout.split("----\n")[1:]
    assert "--batch-size 3 does not divide by 2 devices, which share it" in batch
    assert "--devices 2 with 1 process, and each drives one device" in devices
    assert "--nproc_per_node=2" in devices
    assert "--steps 0: it starts at 1" in steps
    assert "`pip install peft`" in peft
    assert "--processes 3: 2 or more, which divide the 8 examples" in processes
    assert not list(tmp_path.iterdir())
