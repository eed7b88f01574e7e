"""Whose error it is: this process's own, or that of another that has ended."""

import pytest
import torch.distributed as dist

from torchacc.engines.uncaught_errors import follows_another
from torchacc.errors import CheckpointError

OF_GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:40261"


def raised_from(cause: BaseException) -> BaseException:
    try:
        raise CheckpointError(f"RuntimeError: {cause}") from cause
    except CheckpointError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(OF_GLOO),
        RuntimeError(OF_GLOO.replace("Connection closed by peer", "writev: Broken pipe")),
        dist.DistNetworkError("failed to send, Broken pipe"),
        dist.DistBackendError("Connection reset by peer"),
        raised_from(RuntimeError(OF_GLOO)),
    ],
)
def test_an_error_of_the_transport_follows_another(error):
    assert follows_another(error)


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(32, "Broken pipe"),
        RuntimeError("the feature server says: Broken pipe"),
        ConnectionResetError(104, "Connection reset by peer"),
        ValueError(OF_GLOO),
        RuntimeError("Caught BrokenPipeError in DataLoader worker process 0.\nBrokenPipeError: [Errno 32] Broken pipe"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:1] unsupported"),
        raised_from(BrokenPipeError(32, "Broken pipe")),
    ],
)
def test_an_error_with_such_words_is_its_own(error):
    assert not follows_another(error)


def test_an_error_may_be_its_own_cause():
    error = CheckpointError("the disk is full")
    error.__cause__ = error
    assert not follows_another(error)
