"""Print what each device of a training needs, by sharding strategy: `torchacc plan --model gpt2 --devices 8`."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import get_args

from torchacc.aot.step_report import in_gibibytes
from torchacc.cli import _compile_step, _plan_input, _search_layouts
from torchacc.cli._options import named, path, positive, size
from torchacc.cli._tables import in_columns
from torchacc.config.option_types import RecomputePolicy
from torchacc.engines.xla import runtime
from torchacc.errors import ConfigError
from torchacc.layouts import DEVICES
from torchacc.memory_plan import PLANNED_BACKENDS, DeviceBytes, Step, study
from torchacc.parallel.mesh import STRATEGIES
from torchacc.parallel.plan import ShardingPlan

EXAMPLES = (
    "torchacc plan --model gpt2 --devices 8",
    "torchacc plan --model config.json --devices 8 --batch 4 --seq 2048 --bf16 --gc --memory 80GiB",
    "torchacc plan --config config.yaml --model-config model_config_small --devices 8",
    "torchacc plan --search --model config.json --devices 64 --seq 131072 --bf16 --device h100",
    "torchacc plan --model gpt2 --batch 8 --bf16 --compile-for v5e:2x4 --html gpt2.html",
    "torchacc plan --model gpt2 --batch 8 --bf16 --compile-for h100x8",
)
PLATFORMS = ("cpu", "cuda", "tpu")
_OF_CLIPPING = "gradients: all of them wait for their norm, of which the trainer clips; that much at most"
_WITHOUT_CLIPPING = "not planned: clipping, whose norm waits for all gradients; add the column parameters once more"
_PARTS = ("parameters", "optimizer", "gradients", "gathered", "activations")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument_group("the training").add_argument
    add("--model", type=named, metavar="MODEL", help="a checkpoint's folder, a config.json or .yaml, or a hub name")
    add("--config", type=path, metavar="FILE", help="a training file, which says the rest as well")
    add("--stage", type=named, metavar="NAME", help="of the training file (default: its first)")
    add("--model-config", type=named, metavar="NAME", help="of the training file (default: the stage's)")
    add("--batch", type=positive, metavar="N", help="samples on each device (default: 1)")
    add("--seq", type=positive, metavar="N", help="tokens of a sample (default: 1024, or what the model can)")
    add("--vocab", type=positive, metavar="N", help="tokens of the vocabulary (default: the model's)")
    add("--lora", type=positive, metavar="RANK", help="train adapters of peft alone, in layers of its choice")
    add("--optimizer", type=named, metavar="NAME", help="a class of torch.optim (default: adamw)")
    add("--bf16", action="store_true", help="compute in bfloat16; parameters stay in float32")
    policies = get_args(RecomputePolicy)
    again = f"compute activations again in backward, by a policy: {' or '.join(policies)} (default: {policies[0]})"
    add("--gc", nargs="?", const=policies[0], choices=policies, metavar="POLICY", help=again)
    add = parser.add_argument_group("the devices").add_argument
    add("--devices", type=positive, metavar="N", help="all of them together (default: the training file's, else 1)")
    add("--dp", type=positive, metavar="N", help="copies of the model (default: 1; with HYBRID_SHARD 2)")
    for axis, what in _plan_input.SPLITS.items():
        add(f"--{axis}", type=positive, metavar="N", help=f"{what} (default: the training file's, else 1)")
    choices = ", ".join(STRATEGIES)
    add("--strategy", nargs="+", choices=STRATEGIES, metavar="NAME", help=f"of {choices} (default: all)")
    add("--memory", type=size, metavar="SIZE", help="of a device, such as 16GiB: says how many devices it takes")
    add("--engine", choices=PLANNED_BACKENDS, help="whose memory is planned (default: the training file's, else xla)")
    add("--platform", choices=PLATFORMS, help="of XLA's devices (default: what is here; PJRT_DEVICE chooses it, too)")
    add = parser.add_argument_group("a real compiler").add_argument
    absent = "TPUs or GPUs that need not be there, such as v5e:2x4 or h100x8: one strategy"
    add("--compile-for", type=named, metavar="NAME", help=absent)
    add("--html", type=path, metavar="FILE", help="write a page of what was compiled")
    add = parser.add_argument_group("every layout").add_argument
    add("--search", action="store_true", help="try all sizes of all axes, natively: which fit, and which is fastest")
    add(
        "--global-batch",
        type=positive,
        metavar="N",
        help="samples of a forward, of all devices (default: the training file's, else --devices)",
    )
    known = f"{', '.join(DEVICES)}, or its own figures: FLOPS,MEMORY,NEAR,FAR,PER_MACHINE in bytes per second"
    add("--device", type=named, metavar="NAME", help=f"whose speeds rank the layouts: {known} (default: h100)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes")


def run(args: argparse.Namespace) -> int:
    """Print the plan, and return the exit status."""
    if args.search:
        return _search_layouts.run(args)
    for option, value in (("--global-batch", args.global_batch), ("--device", args.device)):
        if value is not None:
            raise ConfigError(f"{option} is of the search for layouts: write --search, too")
    if args.compile_for is not None:
        return _compile_step.run(args)
    if args.html is not None:
        raise ConfigError("--html is of what was compiled: write --compile-for, too")
    _plan_input.take_devices(args)
    args.platform = _platform(args)
    training = _plan_input.read(args)
    step = study(
        training.model,
        training.make_batch(training.batch),
        training.config,
        num_states=training.num_states,
        backend=args.engine,
        platform=args.platform or "cuda",
        adds_gradients=training.adds_gradients,
        clips=training.clips,
    )
    replicas = {name: _plan_input.replicas(args, training.config, name) for name in STRATEGIES}
    found = {name: step.on(args.devices, name, replicas=replicas[name]) for name in _strategies(args, step, replicas)}
    fewest = {}
    if args.memory is not None:
        fewest = {name: step.smallest(args.memory, name, replicas=replicas[name]) for name in found}
    describe = _as_json if args.json else _as_text
    sys.stdout.write(describe(args, training, step, found, fewest) + "\n")
    return 0


def _platform(args: argparse.Namespace) -> str | None:
    """Return what XLA's devices are; None where XLA does not run the step."""
    if not PLANNED_BACKENDS[args.engine].runs_eagerly:
        return args.platform or runtime.platform().lower()
    if args.platform is not None:
        raise ConfigError(f"--platform {args.platform} is of XLA's devices: leave it out with --engine {args.engine}")
    return None


def _strategies(args: argparse.Namespace, step: Step, replicas: Mapping[str, int]) -> list[str]:
    """Return the strategies that are asked for, else those that can be had on the devices.

    Raises:
        ConfigError: None can be had.
    """
    if args.strategy:
        return list(args.strategy)
    refused: dict[str, ConfigError] = {}
    for name in STRATEGIES:
        try:
            step.plan_on(args.devices, name, replicas=replicas[name])
        except ConfigError as error:
            refused[name] = error
    if len(refused) == len(STRATEGIES):
        raise refused["FULL_SHARD"]
    return [name for name in STRATEGIES if name not in refused]


def _recomputed(plan: ShardingPlan) -> str:
    kept = " but for matrix products" if plan.keeps_products else ""
    return f", activations computed again{kept}" if plan.recomputed else ""


def _as_text(
    args: argparse.Namespace,
    training: _plan_input.Training,
    step: Step,
    found: Mapping[str, DeviceBytes],
    fewest: Mapping[str, int | None],
) -> str:
    plan = step.plan
    precision = f"{plan.compute_dtype}{_recomputed(plan)}"
    trained = plan.num_trained
    parameters = f"{plan.numel:,} parameters{f', {trained:,} of them trained,' if trained < plan.numel else ''}"
    title = f"{training.name}: {parameters} in {len(plan.units)} units, {training.optimizer}, {precision}"
    each = f"each of {args.devices} devices" if args.devices > 1 else "one device"
    sizes = {axis: getattr(training.config.dist, axis).size for axis in _plan_input.SPLITS}
    each += "".join(f", {axis} {size}" for axis, size in sizes.items() if size > 1)
    lines = [title, f"{training.batch} x {training.length} tokens on {each}, engine {args.engine}", ""]
    rows = [["strategy", *_PARTS, "total"] + (["fits"] if fewest else [])]
    for name, needed in found.items():
        row = [name, *(in_gibibytes(getattr(needed, part)) for part in _PARTS), in_gibibytes(needed.total)]
        rows.append(row + ([_fits(fewest[name])] if fewest else []))
    lines += in_columns(rows)
    if "HYBRID_SHARD" in found:
        copies = _plan_input.replicas(args, training.config, "HYBRID_SHARD")
        lines += ["", f"HYBRID_SHARD: {copies} copies of the model; --dp says how many"]
    if args.platform == "cpu" and plan.compute_dtype == "bfloat16":
        lines += [
            "",
            "XLA's CPU client holds bfloat16 in float32. For TPUs: --platform tpu; for GPUs, natively: --engine native",
        ]
    if not PLANNED_BACKENDS[args.engine].runs_eagerly:
        lines += ["", _OF_CLIPPING if training.clips else _WITHOUT_CLIPPING]
    if fewest:
        lines += ["", f"fits: the fewest devices with {in_gibibytes(args.memory)} each"]
        if None in fewest.values() and not plan.recomputed:
            lines += ["`--gc`, which computes activations again in backward, needs less of them; `--search` tries all"]
    return "\n".join(lines)


def _fits(num_devices: int | None) -> str:
    if num_devices is None:
        return "on no number"
    return f"from {num_devices} device{'s' * (num_devices > 1)}"


def _as_json(
    args: argparse.Namespace,
    training: _plan_input.Training,
    step: Step,
    found: Mapping[str, DeviceBytes],
    fewest: Mapping[str, int | None],
) -> str:
    strategies = {
        name: {**asdict(needed), "total": needed.total, **({"fewest_devices": fewest[name]} if fewest else {})}
        for name, needed in found.items()
    }
    described = {
        "model": training.name,
        "num_parameters": step.plan.numel,
        "num_trained": step.plan.num_trained,
        "devices": args.devices,
        "batch": training.batch,
        "seq": training.length,
        "engine": args.engine,
        "platform": args.platform,
        "strategies": strategies,
    }
    return json.dumps(described, indent=2)
