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
    add("--model", type=named, metavar="MODEL", help="folder of a checkpoint, config.json or .yaml, or hub name")
    add("--config", type=path, metavar="FILE", help="training file, which sets the defaults of the other options")
    add("--stage", type=named, metavar="NAME", help="stage of the training file (default: the first)")
    add("--model-config", type=named, metavar="NAME", help="model section of the training file (default: the stage's)")
    add("--batch", type=positive, metavar="N", help="batch size per device (default: 1)")
    add("--seq", type=positive, metavar="N", help="sequence length (default: 1024, at most the model's maximum)")
    add("--vocab", type=positive, metavar="N", help="vocabulary size (default: the model's)")
    add("--lora", type=positive, metavar="RANK", help="train LoRA adapters of this rank only, on peft's default layers")
    add("--optimizer", type=named, metavar="NAME", help="optimizer class of torch.optim (default: adamw)")
    add("--bf16", action="store_true", help="compute in bfloat16, with parameters in float32")
    policies = get_args(RecomputePolicy)
    again = f"recompute activations in backward: {' or '.join(policies)} (default: {policies[0]})"
    add("--gc", nargs="?", const=policies[0], choices=policies, metavar="POLICY", help=again)
    add = parser.add_argument_group("the devices").add_argument
    add("--devices", type=positive, metavar="N", help="total number of devices (default: the training file's, else 1)")
    add("--dp", type=positive, metavar="N", help="replicas of the model (default: 1, or 2 with HYBRID_SHARD)")
    for axis, what in _plan_input.SPLITS.items():
        add(f"--{axis}", type=positive, metavar="N", help=f"{what} (default: the training file's, else 1)")
    choices = ", ".join(STRATEGIES)
    add("--strategy", nargs="+", choices=STRATEGIES, metavar="NAME", help=f"of {choices} (default: all)")
    add("--memory", type=size, metavar="SIZE", help="memory of a device, such as 16GiB, to find how many are needed")
    add("--engine", choices=PLANNED_BACKENDS, help="engine to plan for (default: the training file's, else xla)")
    add("--platform", choices=PLATFORMS, help="XLA platform (default: PJRT_DEVICE, or what is found here)")
    add = parser.add_argument_group("ahead-of-time compilation").add_argument
    absent = "compile the step for TPUs or GPUs that need not be here, such as v5e:2x4 or h100x8; takes one --strategy"
    add("--compile-for", type=named, metavar="NAME", help=absent)
    add("--html", type=path, metavar="FILE", help="write an HTML page about the compiled step")
    add = parser.add_argument_group("layout search").add_argument
    add("--search", action="store_true", help="list all layouts of the native engine that fit, fastest first")
    add(
        "--global-batch",
        type=positive,
        metavar="N",
        help="samples per forward over all devices (default: the training file's, else --devices)",
    )
    figures = f"{', '.join(DEVICES)}, or FLOPS,MEMORY,NEAR,FAR,PER_MACHINE, each per second but the last"
    add("--device", type=named, metavar="NAME", help=f"device whose speed ranks the layouts: {figures} (default: h100)")
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")


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
    kept = " but for matrix products" if plan.saves_matmuls else ""
    return f", activations recomputed{kept}" if plan.recomputed else ""


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
            lines += ["`--gc` recomputes activations in backward and needs less memory; `--search` tries all layouts"]
    return "\n".join(lines)


def _fits(num_devices: int | None) -> str:
    if num_devices is None:
        return "never"
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
