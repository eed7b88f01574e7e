import socket

import pytest

from torchacc.errors import ConfigError
from torchacc.launch import LaunchOptions, options


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


@pytest.fixture
def taken():
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_processes": 0}, "num_processes = 0: write a whole number of 1 or more"),
        ({"num_processes": 1.5}, "num_processes = 1.5"),
        ({"num_nodes": True}, "num_nodes = True"),
        ({"node_rank": -1}, "node_rank = -1: write a whole number of 0 or more"),
        ({"node_rank": 1}, "node_rank = 1 with num_nodes = 1: nodes are numbered from 0 to 0"),
        ({"num_nodes": 2}, "needs master_addr, the address of node 0, and master_port"),
        ({"num_nodes": 2, "master_addr": "127.0.0.1"}, "needs master_addr"),
        ({"master_port": 70000}, "master_port = 70000: ports are numbered from 1 to 65535"),
        ({"master_addr": "no host at all", "master_port": 2000}, "not a host that is known here"),
        ({"grace_secs": 0}, "grace_secs = 0"),
        ({"heartbeat_secs": -1.0}, "heartbeat_secs = -1.0: write a number of seconds above 0"),
        ({"max_restarts": -1}, "max_restarts = -1: write a whole number of 0 or more"),
        ({"min_processes": 2, "max_restarts": 1}, "min_processes = 2: write a number from 1 to num_processes, 1"),
        ({"min_processes": 1}, "max_restarts is 0: set it too"),
        (
            {"num_nodes": 2, "min_processes": 1, "max_restarts": 1, "master_addr": "127.0.0.1", "master_port": 2000},
            "min_processes is for a single node",
        ),
    ],
)
def test_what_cannot_be_is_refused(script, wrong, message):
    with pytest.raises(ConfigError, match=message):
        options.check([script], LaunchOptions(**wrong))


def test_a_port_in_use_is_refused_where_it_would_be_opened(script, taken):
    nodes = {"num_nodes": 2, "master_addr": "127.0.0.1", "master_port": taken}
    with pytest.raises(ConfigError, match=f"port {taken} cannot be used on this machine"):
        options.check([script], LaunchOptions(**nodes))
    options.check([script], LaunchOptions(**nodes, node_rank=1))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "there is nothing to run"),
        (["missing.py"], "missing.py is not there"),
        (["."], "is a folder"),
        (["--nprocs"], "'--nprocs' is not an option"),
        (["-m"], "no module of this name"),
        (["-m", "not_a_module.at_all"], "-m not_a_module.at_all: no module of this name"),
    ],
)
def test_what_is_no_program_is_refused(command, message):
    with pytest.raises(ConfigError, match=message):
        options.check(command, LaunchOptions())


@pytest.mark.parametrize("content", [b"#!/bin/sh\nif true; then echo; fi\n", b"\x7fELF\x00\x00", b"print('a'\n"])
def test_what_is_not_python_is_refused(tmp_path, content):
    path = tmp_path / "train"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not Python that this Python can run"):
        options.check([str(path)], LaunchOptions())


def test_a_module_is_found_in_the_working_directory_too(tmp_path, monkeypatch):
    (tmp_path / "own_training.py").write_text("")
    monkeypatch.chdir(tmp_path)
    options.check(["-m", "own_training", "--flag"], LaunchOptions())
    options.check(["-m", "json.tool"], LaunchOptions())


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"PJRT_DEVICE": "CPU"}, None),
    ],
)
def test_gpus_are_those_that_a_process_would_see(tmp_path, variables, count):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environ = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "PJRT_DEVICE")) | variables
    assert options.count_gpus(tmp_path, environ) == count


def test_more_processes_than_gpus_are_refused(script, monkeypatch):
    monkeypatch.setattr(options, "count_gpus", lambda: 2)
    options.check([script], LaunchOptions(num_processes=2))
    with pytest.raises(ConfigError, match="4 processes, and 2 GPUs on this machine"):
        options.check([script], LaunchOptions(num_processes=4))
