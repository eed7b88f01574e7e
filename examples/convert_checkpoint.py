"""A tour of checkpoints: train on four devices, go on with two in another engine, and take the weights everywhere.

    python examples/convert_checkpoint.py

It starts two short jobs by itself and runs the commands that it prints, about a minute in all:

1. Four native processes train a small GPT-2, and save a checkpoint, and rank files as TorchAcc and torch_xla do.
2. Two XLA devices, driven by one process, go on from the checkpoint with the losses that the four had. (Without
   torch_xla, two native processes do.)
3. Rank files -> one file, rank files of two ranks, a Hugging Face folder.
4. Checkpoint -> torch.distributed.checkpoint, which plain PyTorch loads, and back.

Each result is compared with the first checkpoint, and has to have the same bits in every tensor.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import sysconfig
from itertools import islice
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from common import cycle, is_master, make_config
from corpus import blocks_of
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import torchacc
from torchacc.cli.main import main as torchacc_command

GLOBAL_BATCH = 8
STEPS = 6  # of each of the two jobs; the first goes on for as many, to compare with the second
CONTEXT = 64  # bytes of text in an example

State = dict[str, torch.Tensor]


def main() -> None:
    """Run the tour, or, as one of its two jobs, train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/convert"), help="folder to fill, empty or not there yet")
    parser.add_argument("--processes", type=int, default=4, help="that train first, 2 or more")
    parser.add_argument("--job", choices=["train", "resume"], help=argparse.SUPPRESS)
    parser.add_argument("--engine", choices=["xla", "native"], help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.job:
        run_job(args)
    elif args.processes < 2 or GLOBAL_BATCH % args.processes:
        parser.error(f"--processes {args.processes}: 2 or more, which divide the {GLOBAL_BATCH} examples of a step")
    elif args.out.is_dir() and any(args.out.iterdir()):
        parser.error(f"--out {args.out} is there already: name another folder, or remove it first")
    else:
        tour(args.out, args.processes)


def tour(out: Path, processes: int) -> None:
    """Train, go on elsewhere, convert; fail at the first thing that is not as it was."""
    checkpoint, ranks = out / "checkpoint", out / "ranks"

    start_job(processes, "--job=train", "--engine=native", f"--devices={processes}", f"--out={out}")
    if importlib.util.find_spec("torch_xla"):
        start_job(1, "--job=resume", "--engine=xla", "--devices=2", f"--out={out}")
    else:
        start_job(2, "--job=resume", "--engine=native", "--devices=2", f"--out={out}")
    trained, resumed = (json.loads((out / f"{job}.json").read_text()) for job in ("train", "resume"))
    difference = max(abs(a - b) for a, b in zip(trained[STEPS:], resumed, strict=True))
    assert difference < 1e-4, (trained[STEPS:], resumed)
    print(f"    losses of steps {STEPS + 1} to {2 * STEPS} differ by {difference:.1e} from those of the first job")

    weights = from_folder(checkpoint)
    run("consolidate", ranks, "--output", out / "model.pth")
    check_same(torch.load(out / "model.pth")["model"], weights)
    run("reshard", ranks, "--ranks", 2 * processes, "--output", out / "ranks-other")
    run("consolidate", out / "ranks-other", "--output", out / "model-other.pth")
    check_same(torch.load(out / "model-other.pth")["model"], weights)
    run("convert", ranks, out / "hf", "--to", "hf", "--config-from", checkpoint)
    check_same(from_folder(out / "hf"), weights)

    run("convert", checkpoint, out / "dcp", "--to", "dcp")
    plain = GPT2LMHeadModel.from_pretrained(checkpoint)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    dcp.load({"model": plain.state_dict()}, checkpoint_id=out / "dcp", no_dist=True)  # into these tensors
    check_same(plain.state_dict(), weights)
    run("convert", out / "dcp", out / "back", "--to", "torchacc", "--config-from", checkpoint)
    torchacc.checkpoint.verify(out / "back")
    check_same(from_folder(out / "back"), weights)
    check_same(optimizer_tensors(out / "back"), optimizer_tensors(checkpoint))
    print(f"all as it was; the folders are in {out}")


def run_job(args: argparse.Namespace) -> None:
    """Train from the start and save after some steps, or go on from there."""
    torch.manual_seed(0)
    text = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    blocks = blocks_of(torch.tensor(list(text)), CONTEXT)  # a byte is a token
    loader = DataLoader(blocks, batch_size=GLOBAL_BATCH // args.devices, shuffle=True, drop_last=True)
    shape = {"n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **shape, **no_dropout))
    model, loader = torchacc.accelerate(model, loader, make_config(args))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    batches = cycle(loader)

    def train() -> list[float]:
        losses = []
        for batch in islice(batches, STEPS):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    checkpoint = args.out / "checkpoint"
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if args.job == "train":
        losses = train()
        torchacc.checkpoint.save(checkpoint, **state)
        metadata = model.get_shard_metadata()
        for name, part in {"model": model.state_dict(), "optimizer": optimizer.state_dict()}.items():
            torchacc.save({name: part, "shard_metadata": metadata}, args.out / "ranks", master_only=False)
        losses += train()
    else:
        torchacc.checkpoint.load(checkpoint, **state)
        weights = torchacc.full_state_dict(model)
        if is_master():
            check_same(weights, from_folder(checkpoint))
        losses = train()
    if is_master():
        (args.out / f"{args.job}.json").write_text(json.dumps(losses))


def start_job(processes: int, *args: str) -> None:
    """Start this script again as a job of so many processes; end where it fails."""
    command = ["torchacc", "launch", "-n", str(processes), __file__, *args]
    print("$", *command, flush=True)
    subprocess.run([sys.executable, "-m", *command], check=True)


def run(*command: object) -> None:
    """Run a command of torchacc, as a shell would, and print it; end where it fails."""
    words = [str(word) for word in command]
    print("$ torchacc", *words, flush=True)
    if torchacc_command(words):
        sys.exit(1)


def from_folder(folder: Path) -> State:
    """Open a folder with transformers, and return its weights, tied ones under each of their names."""
    return GPT2LMHeadModel.from_pretrained(folder).state_dict()


def optimizer_tensors(folder: Path) -> State:
    """Return an optimizer's state in a torchacc checkpoint, by parameter and key."""
    files = [load_file(path) for path in folder.glob("optimizer*.safetensors")]
    return {name: value for file in files for name, value in file.items()}


def check_same(found: State, expected: State) -> None:
    """Fail unless two states have the same names and the same bits."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        assert value.numpy().tobytes() == expected[name].numpy().tobytes(), name
    print(f"    {len(found)} tensors, the same bits in each", flush=True)


if __name__ == "__main__":
    main()
