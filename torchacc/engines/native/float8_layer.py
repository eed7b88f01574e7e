"""torchao's layer in float8, where inference mode and any number of rows can meet it. Needs torchao."""

from collections.abc import Callable

import torch
from torch.nn import functional as F
from torchao.float8.float8_linear import Float8Linear

from torchacc.parallel.float8_layers import MULTIPLE


class Float8Layer(Float8Linear):  # type: ignore[misc]
    """A linear layer whose products are in float8.

    All of it is in the class: what hung on a layer would be another object in each, and layers that are alike would not
    share a graph of torch.compile.
    """

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, computed outside of inference mode, which has no views of torchao's tensors.

        A weight that was gathered in float8 outlives an evaluation, so it is not a tensor of inference mode;
        transposing it there raises `Cannot set version_counter for inference tensor`. Asking for the mode would end a
        graph of torch.compile; `compiled_units` runs none in inference mode.
        """
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return self._forward(given)
        with torch.inference_mode(False), torch.no_grad():
            return self._forward(given)

    def _forward(self, given: torch.Tensor) -> torch.Tensor:
        forward = super().forward
        return forward(given) if self.config.emulate else with_complete_rows(forward, given)


def with_complete_rows(forward: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    """Run a float8 layer with rows of zeros added to the 16 that its kernels take, which change none of its numbers."""
    rows = given.numel() // given.shape[-1]
    if not rows % MULTIPLE:
        return forward(given)
    completed = F.pad(given.reshape(rows, -1), (0, 0, 0, -rows % MULTIPLE))
    return forward(completed)[:rows].reshape(*given.shape[:-1], -1)
