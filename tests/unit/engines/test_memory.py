import psutil
import torch

from torchacc.engines.memory import memory_of_process


def test_the_peak_of_a_process_stays_when_its_memory_is_freed():
    held = torch.ones(2**26)
    resident = psutil.Process().memory_info().rss
    del held
    found = memory_of_process()
    assert found.of == "process"
    # The kernel adds up what its cores have counted at different moments.
    assert 2**28 < 0.99 * resident < found.peak_bytes < psutil.virtual_memory().total
