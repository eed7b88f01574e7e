"""What starting and saving on hundreds of devices costs the host that plans it. No device is there.

    python benchmarks/many_devices.py
    python benchmarks/many_devices.py --devices 64 512 2048

For Llamas on the meta device, sharded by FULL_SHARD: the plan of the model, what one process writes of it with
AdamW's state, and the end of a checkpoint, where rank 0 reads what each process reports to have written, checks that
nothing is missing, and writes the manifest, which a load reads. The files of tensors are empty space of their sizes: no
weight is made or written.

Then the native engine's groups of processes, made by one that stands for rank 0, with PyTorch's fake backend: all that
Python and PyTorch do for them, without the others, whom a process of a job meets for each group at a store and, at the
latest in the group's first exchange, over connections of the backend.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from _machine import run_alone
from _results import Report, Series, Table, emit
from _teams import progress

LAYERS = {"Llama 8B": (32, 4096, 14336, 32), "Llama 70B": (80, 8192, 28672, 64)}
"""Layers, width, width within, and heads."""
VOCABULARY, KV_HEADS, STATES = 128_256, 8, ("exp_avg", "exp_avg_sq")
SHARED = 8
"""Devices along the other axis of a layout that has one beside `fsdp`."""
GROUPS_HEADER = ["layout", "devices", "groups of all", "s"]
HEADER = ["model", "devices", "plan s", "a rank's writes s", "pieces", "manifest MB", "commit s", "load s", "host MB"]


@dataclass(frozen=True)
class Found:
    """What was measured of a model on a number of devices: seconds, counts and bytes."""

    plan: float
    writes: float
    pieces: int
    manifest: int
    commit: float
    load: float
    host: int


def main() -> int:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--devices", nargs="+", type=int, default=[64, 512], metavar="N", help="(default: 64 512)")
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS), metavar="MODEL")
    parser.add_argument("--quick", action="store_true", help="one layer on few devices, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--groups", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.groups:
        sys.stdout.write(json.dumps(make_groups(args.groups)) + "\n")
        return 0
    if args.worker:
        name, devices, layers = args.worker
        sys.stdout.write(json.dumps(vars(measure(name, int(devices), int(layers)))) + "\n")
        return 0
    sizes = [(name, count) for name in args.models for count in ([4] if args.quick else args.devices)]
    layers = {name: 1 if args.quick else LAYERS[name][0] for name in args.models}
    found = {}
    for name, count in progress(sizes, "sizes"):
        said = run_alone([__file__, "--worker", name, str(count), str(layers[name])])
        found[name, count] = Found(**{each.name: said[each.name] for each in fields(Found)})
    counts = dict.fromkeys(count for _, count in sizes)
    groups = {count: run_alone([__file__, "--groups", str(count)])["layouts"] for count in counts}
    emit(make_report(found, groups), args.json)
    return 0


def make_report(found: dict[tuple[str, int], Found], groups: dict[int, dict[str, list[float]]]) -> Report:
    """Return what was measured."""
    rows = [
        [
            name,
            str(devices),
            *(f"{seconds:.2f}" for seconds in (each.plan, each.writes)),
            f"{each.pieces:,}",
            f"{each.manifest / 1e6:.1f}",
            *(f"{seconds:.2f}" for seconds in (each.commit, each.load)),
            f"{each.host / 1e6:.0f}",
        ]
        for (name, devices), each in found.items()
    ]
    made = [
        [layout, str(devices), f"{number:,.0f}", f"{seconds:.3f}"]
        for devices, layouts in groups.items()
        for layout, (number, seconds) in layouts.items()
    ]
    return Report(
        name="many_devices",
        title="Start and save on many devices",
        setting="Llamas on the meta device, FULL_SHARD, with AdamW's state, float32; one process stands for all ranks, "
        "one after another, and the files of tensors are empty space.",
        tables=[
            Table(title="Seconds on the host, and what a checkpoint's manifest has", header=HEADER, rows=rows),
            Table(
                title="The native engine's groups, made by one process with a fake backend",
                header=GROUPS_HEADER,
                rows=made,
                note="Without what the others are needed for: to meet at a store, which each process does for each "
                "group of all, whether it is in it or not, and what the backend sets up, such as NCCL in a group's "
                "first exchange.",
            ),
        ],
        series=list(growth(found)),
    )


def growth(found: dict[tuple[str, int], Found]) -> Iterator[Series]:
    """Yield how the end of a save grows with the devices."""
    for model in dict.fromkeys(name for name, _ in found):
        points = [(devices, each.commit) for (name, devices), each in found.items() if name == model]
        if len(points) > 1:
            yield Series(
                plot="The end of a save, on rank 0",
                label=model,
                x=[float(devices) for devices, _ in points],
                y=[seconds for _, seconds in points],
                x_label="devices",
                y_label="seconds",
            )


def measure(name: str, devices: int, layers: int) -> Found:
    """Plan a model on devices, and end a save of it."""
    from torchacc import Config
    from torchacc.checkpoint.own_format.manifest import read_manifest
    from torchacc.config import resolve
    from torchacc.env import Job
    from torchacc.parallel.mesh import from_config
    from torchacc.parallel.plan import make_plan

    model, config = make_model(name, layers), Config(backend="native")
    config.dist.fsdp.size = devices
    started = time.perf_counter()
    config = resolve(config, Job(), num_devices=devices)
    plan = make_plan(model, config, from_config(config))
    planned = time.perf_counter()
    files, regions = lay_out(plan, devices)
    own = segments(plan, regions, 0)
    written = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="many_devices_") as folder:
        final = Path(folder) / "checkpoint"
        parts = [segments(plan, regions, device) for device in range(1, devices)]
        seconds = commit(final, files, [own, *parts])
        started_load = time.perf_counter()
        manifest = read_manifest(final)
        load = time.perf_counter() - started_load
        nbytes = (final / "manifest.json").stat().st_size
    return Found(
        plan=planned - started,
        writes=written - planned,
        pieces=sum(len(file["segments"]) for file in manifest["files"].values()),
        manifest=nbytes,
        commit=seconds,
        load=load,
        host=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def make_groups(devices: int) -> dict[str, dict[str, list[float]]]:
    """Return for each layout how many groups there are of all processes, and the seconds in which one makes them."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from torchacc import Config
    from torchacc.engines import registry
    from torchacc.env import Job

    shared, layouts = min(SHARED, devices), {}
    for other in (None, "dp", "tp", "ep"):
        config = Config(backend="native")
        config.dist.fsdp.size = devices if other is None else devices // shared
        if other is not None:
            getattr(config.dist, other).size = shared
        engine: Any = registry.make_engine(config, Job(num_processes=devices, local_num_processes=SHARED))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
        started = time.perf_counter()
        _ = engine.parameter_mesh, engine.expert_mesh if other == "ep" else None
        seconds = time.perf_counter() - started
        name = " x ".join([*([] if other is None else [f"{other} {shared}"]), f"fsdp {config.dist.fsdp.size}"])
        layouts[name] = [dist.distributed_c10d._world.group_count, seconds]
        dist.destroy_process_group()
    return {"layouts": layouts}


def make_model(name: str, layers: int) -> Any:
    """Return a Llama without values."""
    import torch
    import transformers

    _, width, inner, heads = LAYERS[name]
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=KV_HEADS, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).train()


def lay_out(plan: Any, devices: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the files of a checkpoint, and where each tensor lies, as a save lays them out."""
    import torch

    from torchacc.checkpoint.save_plan import _lay_out

    shapes = {parameter.name: parameter.shape for unit in plan.units for parameter in unit.parameters}
    tensors = {
        "model": {name: (torch.float32, shape) for name, shape in shapes.items()},
        "optimizer": {f"{name}.{key}": (torch.float32, shape) for name, shape in shapes.items() for key in STATES},
    }
    files = _lay_out(tensors, devices, None)
    return files, {name: region for layout in files.values() for name, region in layout.regions.items()}


def segments(plan: Any, regions: dict[str, Any], device: int) -> dict[str, list[Any]]:
    """Return what a process reports to have written, by file."""
    from torchacc.checkpoint.own_format.folder_writer import _SEGMENT_BYTES
    from torchacc.checkpoint.own_format.manifest import Segment
    from torchacc.parallel.sharding import local_shard

    found: dict[str, list[Any]] = {}
    for unit in plan.units:
        for parameter in unit.parameters:
            for part in local_shard(parameter.name, parameter.shape, plan.mesh, device).slices:
                for suffix in ("", *(f".{key}" for key in STATES)):
                    region = regions[part.name + suffix]
                    first, size = region.offset + part.start * region.dtype.itemsize, part.numel * region.dtype.itemsize
                    for begin in range(0, size, _SEGMENT_BYTES):
                        piece = Segment(first + begin, min(_SEGMENT_BYTES, size - begin), f"{first + begin:016x}")
                        found.setdefault(region.path.name, []).append(piece)
    return found


def commit(final: Path, files: dict[str, Any], parts: list[dict[str, list[Any]]]) -> float:
    """Return the seconds that rank 0 takes to end a save, once all processes have reported."""
    from torchacc.checkpoint.own_format.folder_writer import FolderWriter

    writer = FolderWriter(final, "0" * 32, 0, len(parts))
    writer.folder.mkdir(parents=True)
    for name, layout in files.items():
        with (writer.folder / name).open("wb") as file:
            file.truncate(layout.nbytes)
        parts[0].setdefault(name, []).append([0, len(layout.header), "0" * 16])
    for rank, part in enumerate(parts):
        (writer.folder / f"rank-{rank}.done").write_text(json.dumps(part))
    started = time.perf_counter()
    writer._commit(writer._wait_for_parts())
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
