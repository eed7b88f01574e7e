"""Measure and draw the picture of the README: the same training in each engine, and in plain PyTorch.

`python docs/engine_losses.py` writes docs/images/engine_losses.json and .png, in a minute or two on two free cores.
`python docs/engine_losses.py --draw` draws the picture anew from the numbers that are there.
"""

import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch.utils.data import DataLoader, Subset
from transformers import LlamaConfig, LlamaForCausalLM

IMAGES = Path(__file__).parent / "images"
NUMBERS, PICTURE = IMAGES / "engine_losses.json", IMAGES / "engine_losses.png"
NUM_STEPS = 60
GLOBAL_BATCH = 32
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
RUNS = {
    "plain PyTorch, not sharded": ([], "pytorch"),
    "xla-spmd, 4 devices": ([], "xla"),
    "xla-multiprocess, 2 processes": (TORCHRUN, "xla"),
    "native, 2 processes": (TORCHRUN, "native"),
}


def main() -> None:
    """Start each run, or be one, or draw."""
    match sys.argv[1:]:
        case []:
            NUMBERS.write_text(json.dumps({name: measure(*run) for name, run in RUNS.items()}) + "\n")
            draw(json.loads(NUMBERS.read_text()))
        case ["--draw"]:
            draw(json.loads(NUMBERS.read_text()))
        case [backend, out]:
            train(backend, Path(out))
        case _:
            sys.exit(__doc__)


def measure(launcher: list[str], backend: str) -> list[float]:
    """Train in processes of their own, and return the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "losses.json"
        subprocess.run([sys.executable, *launcher, __file__, backend, str(out)], check=True)
        return json.loads(out.read_text())


def train(backend: str, out: Path) -> None:
    """Train a small Llama on the modules of Python's standard library; the global batch is the same everywhere."""
    import torchacc
    from torchacc.train.config import TextConfig
    from torchacc.train.text import load_text

    processes = torchacc.dist.world_size()
    one_drives_all = backend == "xla" and processes == 1
    devices = 4 if one_drives_all else processes
    files = sysconfig.get_path("stdlib") + "/*.py"
    options = TextConfig(dataset="text", files=files, vocab_size=1024, block_size=64, packing="concat")
    text = load_text(options, seed=0)
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(text.tokenizer), **shape))
    order = torch.Generator().manual_seed(0)
    full = Subset(text.train, range(len(text.train) - 1))  # the last block has fewer targets: a mean of means differs
    loader = DataLoader(full, batch_size=GLOBAL_BATCH // devices, shuffle=True, generator=order)
    if backend != "pytorch":
        config = torchacc.Config()
        config.backend = backend
        config.dist.fsdp.use_spmd = one_drives_all
        config.dist.fsdp.size = devices
        model, loader = torchacc.accelerate(model, loader, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step, batch in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step == NUM_STEPS:
            break
    if torchacc.dist.rank() == 0:
        out.write_text(json.dumps(losses))


def draw(losses: dict[str, list[float]]) -> None:
    """Draw the losses of all runs, and below how far each is from the first."""
    reference, *others = losses
    steps = range(1, len(losses[reference]) + 1)
    colours = dict(zip(losses, ("#c9c9c9", "#1f77b4", "#d62728", "#2ca02c"), strict=True))
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, width, dashes in zip(losses, (7, 1.6, 1.6, 1.6), ("", (4, 8), (4, 8), (4, 8)), strict=True):
        offset = 4 * list(losses).index(name)
        style = (offset, dashes) if dashes else "-"
        above.plot(steps, losses[name], color=colours[name], linewidth=width, linestyle=style, label=name)
    for name in others:
        pairs = zip(losses[name], losses[reference], strict=True)
        below.plot(steps, [max(abs(a - b) / b, 1e-8) for a, b in pairs], color=colours[name], linewidth=1.2)
    above.set_ylabel("loss of the step")
    above.legend(frameon=False, fontsize=9)
    below.set_yscale("log")
    below.set_ylabel("relative\ndifference")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
