"""How the processes of a job start, end, and wait for one another."""

import pytest

from tests import forkrun

ENDS_RIGHT_AFTER_A_COLLECTIVE = """
import sys
import torch
import torch.distributed as dist
from torchacc.engines.process_group import ProcessGroup
from torchacc.env import read_job

if sys.argv[1] == "ours":
    ProcessGroup(read_job()).start()
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ProcessGroup(read_job()).start()
held = dist.group.WORLD  # as FSDP2 holds it in a model: destroying it then joins no thread
sys.setswitchinterval(100)  # gloo's thread gets the interpreter's lock where it is left to it, and nowhere else
for _ in range(2):
    dist.all_reduce(torch.ones(4), async_op=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("made_by", ["ours", "user"])
def test_a_process_may_end_right_after_a_collective(made_by):
    done = forkrun.run("-c", ENDS_RIGHT_AFTER_A_COLLECTIVE, made_by)
    assert (done.returncode, done.stderr) == (0, "")


PRINTS_MEANWHILE = """
import os, subprocess, threading
import torch.distributed as dist
from torchacc.engines.gloo import gloo_silenced
from torchacc.engines.process_group import ProcessGroup
from torchacc.env import read_job

ProcessGroup(read_job()).start()
with gloo_silenced():
    thread = threading.Thread(target=print, args=("of a thread",), kwargs={"flush": True})
    thread.start()
    thread.join()
    subprocess.run(["echo", "of a child"], check=True)
    os.write(1, b"of a library in C\\n")
    dist.new_group([0])
dist.new_group([0])
"""


def test_gloo_alone_is_hushed_while_groups_are_made():
    done = forkrun.run("-c", PRINTS_MEANWHILE)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[:3] == ["of a thread", "of a child", "of a library in C"]
    # What the group that was made afterwards says; a later PyTorch has a gloo that says nothing.
    assert {line.partition(" ")[0] for line in printed[3:]} <= {"[Gloo]"}


HAS_A_GROUP = """
import sys
import torch.distributed as dist
from torchacc.engines.process_group import ProcessGroup
from torchacc.env import read_job

for backend in sys.argv[1:]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        ProcessGroup(read_job()).start()
        print("taken")
    except Exception as error:
        print(type(error).__name__, error)
    dist.destroy_process_group()
"""


def test_a_group_of_the_users_without_a_backend_for_the_host_is_refused():
    done = forkrun.run("-c", HAS_A_GROUP, "cuda:gloo", "gloo", "cpu:gloo")
    assert done.returncode == 0, done.stderr
    refused, *others = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert refused.startswith("EngineError torch.distributed runs with the backends 'cuda:gloo'")
    assert "'cpu:gloo,cuda:nccl'" in refused
    assert others == ["taken", "taken"]
