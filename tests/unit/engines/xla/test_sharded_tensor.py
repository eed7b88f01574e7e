"""What of a sharded parameter is refused before anything is exchanged."""

import pytest
import torch

from torchacc.engines.xla.sharded_tensor import ShardOrigin, as_shard
from torchacc.errors import EngineError
from torchacc.parallel.sharding import RowLayout


def test_autograd_grad_says_what_to_write():
    shard = as_shard(torch.ones(2, 3), ShardOrigin(RowLayout((4, 3), 2), reader=None)).requires_grad_()
    loss = torch.ones(1, requires_grad=True).sum()
    with pytest.raises(EngineError, match=r"torch\.autograd\.grad\(\).*loss\.backward\(\) and read parameter\.grad"):
        torch.autograd.grad(loss, [shard], allow_unused=True)
