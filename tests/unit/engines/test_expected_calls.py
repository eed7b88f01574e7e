import pytest
import torch.distributed as dist

from torchacc.engines import expected_calls
from torchacc.env import Job
from torchacc.errors import EngineError


def test_a_call_that_a_process_has_ended_without_is_an_error_at_once(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(expected_calls, "_get_default_store", lambda: store)
    monkeypatch.setattr(expected_calls, "_LOOK_SECS", 0.1)
    store.set(expected_calls._ended(1), "")
    with pytest.raises(EngineError, match="rank 1 has ended and not come to it: every process has to make this call"):
        expected_calls._Expected(Job(rank=0, num_processes=2), "checkpoint.save()", None).wait()
