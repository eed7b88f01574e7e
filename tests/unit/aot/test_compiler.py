"""The compilers of TPUs and GPUs, of the extras `plan-tpu` and `plan-cuda`; what needs one is skipped without it."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from torchacc.env import installed_version

pytestmark = [pytest.mark.xla, pytest.mark.slow]

MODEL = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
MODEL |= {"bos_token_id": None, "eos_token_id": None, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}

WHEELS = {"plan-tpu": "libtpu", "plan-cuda": "jax-cuda12-pjrt"}


def is_installed(extra):
    return all(installed_version(wheel) is not None for wheel in ("jax", "jaxlib", WHEELS[extra]))


def needs(extra):
    return pytest.mark.skipif(not is_installed(extra), reason=f"no compiler: pip install 'torchacc[{extra}]'")


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def start(cache, *arguments, program=("-m", "torchacc")):
    command = [sys.executable, *program, "plan", *arguments]
    return subprocess.Popen(
        command,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored where a shell runs pytest with &
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def compiled(model, cache, name, *arguments):
    return ended(start(cache, "--model", str(model), "--compile-for", name, "--bf16", *arguments))


def ended(process):
    out, errors = process.communicate(timeout=500)
    return process.returncode, out, errors


@pytest.mark.parametrize(("extra", "name"), [("plan-tpu", "v5e:2x2"), ("plan-cuda", "h100x2")])
def test_without_a_compiler_the_message_says_how_to_install_it(model, tmp_path, extra, name):
    if is_installed(extra):
        pytest.skip("a compiler is installed")
    status, _, errors = compiled(model, tmp_path, name)
    assert status == 2
    assert f"pip install 'torchacc[{extra}]'" in errors


@needs("plan-tpu")
def test_a_step_is_compiled_once_and_told_as_text_json_and_a_page(model, tmp_path):
    page = tmp_path / "page.html"
    status, out, errors = compiled(model, tmp_path / "cache", "v5e:2x2", "--html", str(page))
    assert status == 0, errors
    assert "compiled for v5e:2x2: 4 x TPU v5e" in out
    assert "<svg" in page.read_text()
    status, out, errors = compiled(model, tmp_path / "cache", "v5e:2x2", "--json")  # which finds the program
    assert status == 0, errors
    found = json.loads(out)
    assert 0 < found["peak_bytes"] < 1e7
    assert {each["kind"] for each in found["exchanges"]} & {"all-gather", "collective-permute"}
    assert any(each["module"].startswith("transformer") for each in found["largest"])
    assert found["device_bytes"] == 16 * 2**30
    assert len(list((tmp_path / "cache" / "torchacc" / "compiled").iterdir())) == 1


@needs("plan-tpu")
def test_a_step_is_compiled_for_several_hosts_with_neighbours_on_the_last_axis(model, tmp_path):
    status, out, errors = compiled(model, tmp_path, "v5e:2x4", "--tp", "2", "--dp", "2", "--json")
    assert status == 0, errors
    assert {each["group_size"] for each in json.loads(out)["exchanges"]} >= {2, 4}
    (request,) = tmp_path.glob("torchacc/compiled/*/request.json")
    places = json.loads(request.read_text())["places"]
    assert [place[1:3] for place in places[:4]] == [[0, 0], [1, 0], [0, 1], [1, 1]]


@needs("plan-cuda")
@pytest.mark.parametrize("name", ["h100x1", "h100x2"])
def test_a_step_is_compiled_for_gpus(model, tmp_path, name):
    status, out, errors = compiled(model, tmp_path, name, "--json")
    assert status == 0, errors
    found = json.loads(out)
    assert found["chip"] == "NVIDIA H100 SXM"
    assert 0 < found["peak_bytes"] < 1e7
    assert found["cycles"] is None
    assert found["flops"] > 0
    assert found["bytes_accessed"] > 0
    assert any(each["module"].startswith("transformer") for each in found["largest"])
    assert ("all-gather" in {each["kind"] for each in found["exchanges"]}) is (name != "h100x1")
    (kept,) = (tmp_path / "torchacc" / "compiled").iterdir()
    assert {path.name for path in kept.iterdir()} == {"compiled.json", "optimized.txt", "output.txt", "request.json"}


@pytest.mark.parametrize(
    "name", [pytest.param("v5e:2x2", marks=needs("plan-tpu")), pytest.param("h100x2", marks=needs("plan-cuda"))]
)
def test_a_loop_of_layers_computes_what_as_many_layers_do_that_are_recomputed(tmp_path, name):
    llama = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128}
    llama |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 64}
    flops = {}
    for what, options in {
        "loop": {"compute": {"scan_layers": True}},
        "layers": {"memory": {"gc": True}},
    }.items():
        stage = {"model_config": "llama", "data": {"block_size": 64, "vocab_size": 320}, "torchacc": options}
        stage |= {"training": {"batch_size": 1}, "optimizer": {"name": "adamw", "lr": 1e-3}}
        file = tmp_path / f"{what}.yaml"
        file.write_text(json.dumps({"training_stages": {"one": stage}, "model_config_llama": llama}))
        command = ["--config", str(file), "--compile-for", name, "--bf16", "--json"]
        status, out, errors = ended(start(tmp_path, *command))
        assert status == 0, errors
        flops[what] = json.loads(out)["flops"]
    assert flops["loop"] == pytest.approx(flops["layers"], rel=0.02)


@needs("plan-cuda")
def test_what_is_no_longer_whole_is_compiled_again(model, tmp_path):
    first = compiled(model, tmp_path, "h100x1", "--json")
    assert first[0] == 0, first[2]
    (kept,) = (tmp_path / "torchacc" / "compiled").iterdir()
    for broken in ("compiled.json", "optimized.txt"):
        path = kept / broken
        size = path.stat().st_size
        os.truncate(path, size // 2)
        status, out, errors = compiled(model, tmp_path, "h100x1", "--json")
        assert status == 0, errors
        assert json.loads(out)["peak_bytes"] == json.loads(first[1])["peak_bytes"]
        assert path.stat().st_size == pytest.approx(size, rel=0.1)


@needs("plan-cuda")
def test_a_model_that_does_not_train_with_such_a_batch_is_refused(tmp_path):
    path = tmp_path / "config.json"
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    path.write_text(json.dumps({"model_type": "t5", **sizes}))
    status, _, errors = compiled(path, tmp_path, "h100x1")
    assert status == 2
    assert "cannot be compiled, as it does not train with input_ids, labels" in errors


TERMINATED_AS_THE_COMPILER_STARTS = """
import signal, sys
from torchacc.cli.main import main

def interrupt(event, arguments):
    if event == "subprocess.Popen" and "compile_deviceless" in str(arguments):
        signal.raise_signal(signal.SIGTERM)

sys.addaudithook(interrupt)
sys.exit(main())
"""


@needs("plan-tpu")
def test_sigterm_as_the_compiler_starts_leaves_nothing(model, tmp_path):
    script = tmp_path / "terminated.py"
    script.write_text(TERMINATED_AS_THE_COMPILER_STARTS)
    process = start(tmp_path, "--model", str(model), "--compile-for", "v5e:2x4", program=(str(script),))
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 143, errors
    assert list((tmp_path / "torchacc" / "compiled").iterdir()) == []


@needs("plan-tpu")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_compiler_and_leaves_nothing(model, tmp_path, number, status):
    folder = tmp_path / "torchacc" / "compiled"
    process = start(tmp_path, "--model", str(model), "--compile-for", "v5e:2x4")
    for _ in range(1200):
        if list(folder.glob("*/output.txt")):
            break
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert ("stopped compiling for v5e:2x4: nothing of it is kept" in errors) is (number == signal.SIGINT)
    assert list(folder.iterdir()) == []
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(str(folder).encode() in command for command in commands)
