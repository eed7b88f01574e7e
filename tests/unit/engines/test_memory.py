import resource
import subprocess
import sys

import psutil
import pytest
import torch

from torchacc.engines.memory import keep_freed_memory, memory_of_process

STEPS_OF_80_MB = """
import resource
import torch
from torchacc.engines.memory import keep_freed_memory

kept = keep_freed_memory()
for step in range(10):
    if step == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(5_000_000) for _ in range(4)]
    del held
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_the_peak_of_a_process_stays_when_its_memory_is_freed():
    held = torch.ones(2**26)
    resident = psutil.Process().memory_info().rss
    del held
    found = memory_of_process()
    assert found.of == "process"
    # The kernel adds up what its cores have counted at different moments.
    assert 2**28 < 0.99 * resident < found.peak_bytes < psutil.virtual_memory().total


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_what_a_step_frees_is_there_for_the_next_one():
    ended = subprocess.run([sys.executable, "-c", STEPS_OF_80_MB], capture_output=True, text=True, check=True)
    kept, faults = ended.stdout.split()
    assert kept == "True"
    # Of the pages of all eight steps. How many it is without depends on what lies on top of the heap, mostly a quarter.
    assert int(faults) < 0.1 * 8 * 80_000_000 / resource.getpagesize()


def test_a_c_library_that_the_user_has_tuned_is_left_alone(monkeypatch):
    class Library:
        def mallopt(self, option, value):
            raise AssertionError("it is tuned")

    monkeypatch.setattr("ctypes.CDLL", lambda name: Library())
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert not keep_freed_memory()
