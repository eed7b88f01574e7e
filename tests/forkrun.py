"""Run a script on several ranks, as `torchrun --standalone` does, in forks of a process that has imported PyTorch.

    python forkrun.py 4 script.py [argument ...]

Importing PyTorch and transformers takes each process several seconds, which is most of what a short script takes. Where
one rank fails the others are ended. Unlike torchrun's, these ranks have one seed of hashes in common: what depends on
the order of a set shows in the tests that use torchrun, such as those of the contract's engines.
"""

import importlib
import os
import runpy
import signal
import socket
import sys

IMPORTED = ("torch.distributed.fsdp", "transformers.models.gpt2.modeling_gpt2")


def start(num_ranks: int) -> None:
    """Return in each rank, with its environment; in this process, end when all have."""
    with socket.create_server(("localhost", 0)) as server:
        job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}
    pids = []
    for rank in range(num_ranks):
        pids.append(os.fork())
        if not pids[-1]:
            job |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {**job, "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
            importlib.import_module("numpy").random.seed()  # Python's own generator does that by itself
            return

    def end(*_: object) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    failed = False
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status and not failed:
            failed = True
            end()
    sys.exit(failed)


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    _, number, *sys.argv = sys.argv
    start(int(number))
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
