"""What attention in a ring computes on this rank, beside attention to all tokens in float64.

For `test_ring_attention.py`, and on GPUs for `tests/gpu/test_gpu.py`:

python -m torch.distributed.run --nproc_per_node=4 ring_program.py out/
"""

import functools
import itertools
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import gpus
from torchacc.engines.native.ring_attention import Ring, attend_in_ring
from torchacc.engines.native.sequence_collectives import pass_on
from torchacc.parallel.sequence_split import chunks_of

RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CHUNK, HEADS, KV_HEADS = 64, 8, 4
ON_GPUS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
CASES = {
    "cpu": [(None, torch.float32), (None, torch.bfloat16), (None, torch.float64)],
    "cuda": [(SDPBackend.EFFICIENT_ATTENTION, torch.float32), *itertools.product(ON_GPUS, (torch.bfloat16,))],
}


def attend(query, key, value):
    repeated = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, *repeated, is_causal=True)


def with_gradients(compute, inputs, gradient):
    """Return the output and the inputs' gradients."""
    inputs = [each.detach().requires_grad_() for each in inputs]
    output = compute(*inputs)
    output.backward(gradient)
    return [output.detach(), *(each.grad for each in inputs)]


def compare(device, kernel, dtype, size):
    """Return for the ring, and for one device, by how much of the largest number each result is off."""
    torch.manual_seed(0)
    shape = (2, HEADS, 2 * CHUNK * NUM_RANKS, size)
    full = [torch.randn(2, heads, *shape[2:], dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    full, gradient = [each.to(device) for each in full], torch.randn(shape, dtype=torch.float64).to(device)
    expected = with_gradients(attend, full, gradient)
    tokens = torch.cat([torch.arange(CHUNK) + CHUNK * chunk for chunk in chunks_of(RANK, NUM_RANKS)])
    ring = Ring(NUM_RANKS, RANK, functools.partial(pass_on, group=dist.group.WORLD, index=RANK))
    with sdpa_kernel(kernel) if kernel is not None else nullcontext():
        own = [each[:, :, tokens].to(dtype) for each in (*full, gradient)]
        found = with_gradients(lambda *inputs: attend_in_ring(ring, *inputs, None), own[:3], own[3])
        alone = with_gradients(attend, [each.to(dtype) for each in full], gradient.to(dtype))
    parts = [each[:, :, tokens] for each in expected]
    return [
        max(((one.double() - of).abs().max() / of.abs().max()).item() for one, of in zip(those, wanted, strict=True))
        for those, wanted in ((found, parts), (alone, expected))
    ]


def main(out):
    if gpus.SWITCH in os.environ:
        gpus.join()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    device = os.environ.get(gpus.SWITCH, "cpu")
    found = {
        f"{kernel and kernel.name} {dtype} {size}": compare(device, kernel, dtype, size)
        for kernel, dtype in CASES[device]
        for size in (16, 64)
    }
    (Path(out) / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
