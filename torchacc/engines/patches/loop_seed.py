"""The seed of random numbers inside of a loop over layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def seed_is_recognised() -> Iterator[None]:
    """Patch torch_xla's scan to find the seed among the data of a loop's body, and to give each layer its own.

    It looks for a mark on the seed, which is lost when the seed is laid out for several devices. There it is known by
    its value.
    """
    from torch_xla import _XLAC

    original = _XLAC._get_tensors_xla_device_data_node

    def marked(outputs: Any) -> tuple[list[int], list[torch.Tensor]]:
        ids, values = original(outputs)
        base = int(_XLAC._get_base_seed_as_tensor("xla:0"))

        def is_seed(value: torch.Tensor) -> bool:
            return value.dtype == torch.int64 and not value.dim() and int(value) == base

        return [
            _XLAC._get_seed_info_id() if is_seed(value) else id_ for id_, value in zip(ids, values, strict=True)
        ], values

    _XLAC._get_tensors_xla_device_data_node = marked
    try:
        yield
    finally:
        _XLAC._get_tensors_xla_device_data_node = original
