"""What stands for an output that no device has says why, however it is used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchacc.engines.native.missing_output import MissingOutput
from torchacc.errors import ConfigError, EngineError


@pytest.mark.parametrize(
    "use",
    [
        lambda missing: torch.argmax(missing),
        lambda missing: torch.argmax(input=missing),
        lambda missing: torch.cat([missing, torch.ones(1)]),
        lambda missing: torch.cat(tensors=(torch.ones(1), missing)),
        lambda missing: torch.ones(1) + missing,
        lambda missing: missing.shape,
        lambda missing: missing[0],
        list,
        len,
    ],
)
def test_each_use_says_why(use: Callable[[Any], object]) -> None:
    with pytest.raises((ConfigError, EngineError), match="nobody has it"):
        use(MissingOutput("logits", "nobody has it"))
