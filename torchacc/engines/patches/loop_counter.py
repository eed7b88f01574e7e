"""The counter of a loop over layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def counter_has_32_bits() -> Iterator[None]:
    """Patch torch_xla's scan to count in 32 bits.

    A TPU has no numbers of 64: its compiler makes two of each, and then does not see how often the loop runs, which it
    has to know to send beside the work of another layer.
    """
    from torch_xla.core import xla_builder
    from torch_xla.experimental import scan

    class Types(xla_builder.Type):  # type: ignore[misc]
        S64 = xla_builder.Type.S32

    class Names:
        """What the scan takes of `xla_builder`, where it names no other type than its counter's."""

        Type = Types

        def __getattr__(self, name: str) -> Any:
            return getattr(xla_builder, name)

    class Builder(scan.Builder):  # type: ignore[misc]
        def add_param(self, value: torch.Tensor) -> Any:
            is_counter = not self.num_params()
            return super().add_param(value.to(torch.int32) if is_counter else value)

    originals = scan.xb, scan.Builder
    scan.xb, scan.Builder = Names(), Builder
    try:
        yield
    finally:
        scan.xb, scan.Builder = originals
