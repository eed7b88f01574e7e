"""How much arithmetic a token takes, and how much a device can do: what model FLOPs utilisation (MFU) is made of."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from torchacc.engines.sharded_model import sharded_model
from torchacc.parallel.experts import count_routed
from torchacc.parallel.plan import PlannedParameter

PEAK_FLOPS: Mapping[str, float] = {
    r"B200": 2250e12,
    r"H200 NVL|H100 NVL": 835e12,
    r"H100 PCIe": 756e12,
    r"GH200|H200|H100": 989e12,
    r"A100|A800": 312e12,
    r"A40": 149.7e12,
    r"A30": 165e12,
    r"A10": 125e12,
    r"L40S": 362e12,
    r"L40": 181e12,
    r"L4": 121e12,
    r"MI355X": 2500e12,
    r"MI325X|MI300X": 1307e12,
    r"MI250X": 383e12,
    r"TPU v4": 275e12,
    r"TPU v5 lite|TPU v5e": 197e12,
    r"TPU v5p?": 459e12,
    r"TPU v6 lite|TPU v6e": 918e12,
}
"""Dense bfloat16 operations in a second, by a pattern that the device's name has as whole words; the first one counts.

From the vendors' data sheets, half of what those of NVIDIA state "with sparsity": nvidia.com/en-us/data-center for
DGX B200, H200, H100, A100, L40S, L40, L4, A40, A30 and A10; amd.com/en/products/accelerators/instinct for MI350, MI300
and MI200; cloud.google.com/tpu/docs for v4, v5e, v5p and v6e.
"""


def peak_flops(device_name: str) -> float | None:
    """Return a device's dense bfloat16 operations in a second; None where they are not known.

    Args:
        device_name: The name as the vendor's driver gives it, such as `NVIDIA H100 80GB HBM3`.
    """
    if re.search(r"\bMIG\b", device_name):  # a slice of a GPU
        return None
    found = (peak for pattern, peak in PEAK_FLOPS.items() if re.search(rf"\b({pattern})\b", device_name))
    return next(found, None)


def flops_per_token(model: nn.Module, sequence_length: int) -> float | None:
    """Return the operations of a training step for each token: 6 N + 12 L H T.

    N parameters take part in products (6: two operations forward, four backward), and attention in L layers of width H
    over T tokens adds the rest; as in appendix B of PaLM (arXiv 2204.02311). Of experts those count that a token is
    sent to, as in Switch Transformers (arXiv 2101.03961). What recompute adds does not count, and a causal mask takes
    nothing off, as is the custom.

    Args:
        model: The model that accelerate() returned.
        sequence_length: Tokens of an example.

    Returns:
        None for what the formula does not describe: no transformer, or one with experts that are not told apart.
    """
    config: Any = getattr(model, "config", None)
    layers, width = (getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size"))
    if layers is None or width is None:
        return None
    parameters = list(sharded_model(model).plan.parameters)
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    experts = {name for name, module in model.named_modules() if count_routed(module) is not None}
    are_stacked = experts and experts <= set().union(*map(_owners, parameters))  # as in parallel/experts.py
    if (experts or any(_num_experts(config))) and not (chosen and are_stacked):
        return None
    looked_up = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}

    def in_products(planned: PlannedParameter) -> float:
        owners = _owners(planned)
        if owners <= looked_up:
            return 0.0
        return planned.numel * (chosen / planned.shape[0] if owners & experts else 1.0)

    return float(6 * sum(map(in_products, parameters)) + 12 * layers * width * sequence_length)


def _owners(planned: PlannedParameter) -> set[str]:
    """Return the names of the modules that a parameter belongs to."""
    return {name.rpartition(".")[0] for name in planned.names}


def _num_experts(config: Any) -> list[int]:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return [getattr(config, name, None) or 0 for name in names]
