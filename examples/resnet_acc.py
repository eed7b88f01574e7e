"""Train a small ResNet to read letters, save it in parts, put it together again, and load it back.

Four processes with one device each (XLA where torch_xla is installed, or PyTorch's own FSDP with --engine native):

    torchrun --nproc_per_node=4 examples/resnet_acc.py

One process that drives four XLA devices, and one process with one device:

    python examples/resnet_acc.py
    python examples/resnet_acc.py --engine native

The pictures are letters in the fonts that matplotlib brings; accuracy is measured on fonts that training never sees.

Batch norm. One process that drives all devices (SPMD) sees the batch of all devices, so that mean and variance are
those of an unsharded run, and so is each loss. With one process per device each has the statistics of its own part of
the batch, as in any data parallelism: the losses differ a little from those of one device, the processes' running
statistics differ from one another, and what is put together below has those of rank 0. With --norm group, whose
statistics are each picture's own, every launch gives the same losses.
"""

import time
from collections.abc import Iterable
from itertools import islice

import torch
import torch.nn.functional as F
from common import cycle, is_master, make_config, make_parser, parse, say, write_metrics
from glyphs import CLASSES, HELD_OUT_FONTS, TRAIN_FONTS, glyphs
from torch import nn
from torch.utils.data import DataLoader

import torchacc

NORMS = {"batch": nn.BatchNorm2d, "group": lambda channels: nn.GroupNorm(4, channels)}


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, norm: str, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = NORMS[norm](after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = NORMS[norm](after)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, before, H, W) to (B, after, H / stride, W / stride)."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network; its loss and accuracy are scalars, which torchacc averages over all devices."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(1, 16, norm, stride=2), Block(16, 32, norm, stride=2), Block(32, 64, norm))
        self.head = nn.Linear(64, len(CLASSES))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Take images, (B, 1, H, W), and labels, (B,)."""
        logits = self.head(self.blocks(images).mean(dim=(2, 3)))
        hits = (logits.argmax(dim=1) == labels).float()
        return {"loss": F.cross_entropy(logits, labels), "accuracy": hits.mean()}


def main() -> None:
    """Train, save, put together, load back."""
    parser = make_parser(__doc__, steps=300, batch_size=64, lr=5e-3, out="runs/resnet")
    parser.add_argument("--norm", choices=NORMS, default="batch")
    parser.add_argument("--copies", type=int, default=8, help="how often each letter of a font is drawn")
    args = parse(parser)
    torch.manual_seed(0)
    per_device = args.batch_size // args.devices

    loader = DataLoader(glyphs(TRAIN_FONTS, args.copies, seed=0), batch_size=per_device, shuffle=True, drop_last=True)
    held_out = DataLoader(glyphs(HELD_OUT_FONTS, 8, seed=1), batch_size=per_device)
    config = make_config(args)
    config.dist.fsdp.wrap_layer_cls = {"Block"}
    model, loader = torchacc.accelerate(ResNet(args.norm), loader, config)
    held_out = torchacc.shard_loader(held_out, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
    say(str(torchacc.describe(model)))
    before = evaluate(model, held_out)

    losses, started = [], time.perf_counter()
    for step, batch in enumerate(islice(cycle(loader), args.steps), start=1):
        model.train()
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        losses.append(loss.detach())
        if step % 50 == 0 or step == args.steps:
            say(f"step {step:4}   loss {loss.item():.4f}   {time.perf_counter() - started:.0f} s")
    trained = evaluate(model, held_out)

    ckpt_dir = args.out / "ckpt"
    # 1) Save model shards: a file for each rank
    torchacc.dist.rendezvous("saving_model")
    torchacc.dist.mark_step()
    ckpt = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    torchacc.save(ckpt, ckpt_dir, master_only=False)
    # 2) Save optimizer states and LR scheduler: one file each
    torchacc.dist.rendezvous("saving_optimizer_states")
    torchacc.save(optimizer.state_dict(), args.out / "optimizer.pth")
    torchacc.save(lr_scheduler.state_dict(), args.out / "lr_scheduler.pth")

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # as if this were another process, which knows nothing

    # 3) Put the shards together
    if is_master():
        torchacc.dist.fsdp.consolidate_sharded_model_checkpoints(str(ckpt_dir), "rank-*.pth")
    torchacc.dist.rendezvous("ckpt_consolidation")
    # 4) Load model, optimizer states and LR scheduler
    model.load_state_dict(torch.load(ckpt_dir / "consolidated.pth")["model"])
    optimizer.load_state_dict(torch.load(args.out / "optimizer.pth"))
    lr_scheduler.load_state_dict(torch.load(args.out / "lr_scheduler.pth"))
    loaded = evaluate(model, held_out)

    rows = {"untrained": before, "trained": trained, "loaded back": loaded}
    for name, result in rows.items():
        say(f"{name:12} loss {result['loss']:.4f}, accuracy {result['accuracy']:.1%} on fonts never seen")
    write_metrics(args.out, {"losses": [loss.item() for loss in losses], **rows})


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Return the mean loss and accuracy over a loader."""
    model.eval()
    results = [model(**batch) for batch in loader]
    return {name: torch.stack([result[name] for result in results]).mean().item() for name in ("loss", "accuracy")}


if __name__ == "__main__":
    main()
