"""What `torchacc plan` plans: a model on the meta device, and how it is trained."""

import argparse
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from torchacc.config import Config
from torchacc.config.names import did_you_mean
from torchacc.config.text_file import read_json, read_text
from torchacc.config.yaml_file import parse
from torchacc.engines import attention_kernels
from torchacc.engines.optimizers import find_optimizer
from torchacc.engines.xla import runtime
from torchacc.errors import ConfigError, in_one_line, shown
from torchacc.memory_plan import PLANNED_BACKENDS, count_states
from torchacc.parallel.axes import Role, axis_with
from torchacc.train.device_layout import sharding_strategy
from torchacc.train.families import unknown_options
from torchacc.train.file import TrainFile
from torchacc.train.hub import check_hub, is_on_hub

SPLITS = {
    axis_with(Role.TENSOR): "devices that each layer is split over",
    axis_with(Role.SEQUENCE, Role.SHARD): "devices that each sequence is split over",
    axis_with(Role.PIPELINE): "pipeline stages",
    axis_with(Role.BATCH, Role.SHARD, Role.EXPERT): "devices that the experts are spread over",
}
"""The axes along which devices compute parts of a step, and what their sizes are."""
_DEFAULT_LENGTH = 1024
_WITH_A_LOSS = ("HeadModel", "LM", "ForConditionalGeneration", "ForSequenceClassification", "ForTokenClassification")
_OF_A_CHECKPOINT = {"architectures", "transformers_version"}
"""Where a file has these, transformers has written it, maybe an older one with options that are gone."""
_OF_FILES = (".json", ".yaml", ".yml")
_AUTOMATIC = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")


@dataclass(frozen=True)
class Training:
    """A model, and how it is trained on each device."""

    name: str
    """Of the model."""
    model: nn.Module
    """On the meta device."""
    batch: int
    """Samples on each device."""
    length: int
    """Tokens of a sample."""
    config: Config
    """Precision, units and recompute."""
    optimizer: str
    num_states: int
    """Tensors in a parameter's shape that the optimizer keeps for it."""
    optimizer_options: Mapping[str, Any]
    """Its arguments, beside the parameters."""
    adds_gradients: bool = False
    """Whether a step is of several batches."""
    clips: bool = False
    """Whether gradients are clipped by their norm."""
    strategy: str = "FULL_SHARD"
    """What is sharded, where no option names another."""
    is_packed: bool = False
    """Whether a sample is several documents, which do not see one another."""

    def make_batch(self, rows: int, *, with_positions: bool = False) -> dict[str, torch.Tensor]:
        """Return a batch of so many samples, without values, with labels.

        Args:
            rows: Their number.
            with_positions: Whether it has the positions of tokens in their documents.
        """
        tokens = torch.zeros(rows, self.length, dtype=torch.long, device="meta")
        labels = tokens[:, 0] if type(self.model).__name__.endswith("ForSequenceClassification") else tokens
        return {"input_ids": tokens, "labels": labels, **({"position_ids": tokens} if with_positions else {})}


def read(args: argparse.Namespace) -> Training:
    """Return what the options of `torchacc plan` describe.

    Raises:
        ConfigError: There is no such model, or it cannot be trained so.
    """
    if (args.model is None) == (args.config is None):
        raise ConfigError("name what is planned: either --model, or --config with a training file")
    if args.config is None and (args.stage or args.model_config):
        raise ConfigError("--stage and --model-config choose from a training file: name it with --config")
    runtime.prepare_import()  # transformers does, by way of accelerate
    return _from_options(args) if args.config is None else _from_file(args)


def eager_engine() -> str:
    """Return the engine that runs without a compiler, and has all axes."""
    return next(name for name, each in PLANNED_BACKENDS.items() if each.runs_eagerly)


def take_devices(args: argparse.Namespace) -> None:
    """Complete the options of devices and engine by what the training file says, else one device under XLA."""
    distributed = TrainFile.read(args.config).stage(args.stage)[1].distributed if args.config is not None else None
    if args.devices is None:
        each = distributed.devices if distributed is not None else 1
        least = prod(getattr(args, axis) or 1 for axis in SPLITS)
        args.devices = each * distributed.num_nodes if distributed is not None and isinstance(each, int) else least
    if args.engine is None:
        named = distributed.engine if distributed is not None else None
        default = eager_engine() if any(getattr(args, axis) for axis in SPLITS) else "xla"
        args.engine = named if named in PLANNED_BACKENDS else default


def _from_options(args: argparse.Namespace) -> Training:
    config = _model_config(args.model, {"vocab_size": args.vocab})
    options: Mapping[str, Any] = {"lr": 1e-3}
    return _training(args, args.model, config, Config(), args.batch or 1, args.seq, args.optimizer or "adamw", options)


def _from_file(args: argparse.Namespace) -> Training:
    file = TrainFile.read(args.config)
    _, stage = file.stage(args.stage)
    chosen = args.model_config or stage.model or next(iter(file.models), "")
    name, section = file.model(chosen)
    of_text = stage.data.vocab_size if stage.data.tokenizer is None else None
    vocabulary = args.vocab or (None if "vocab_size" in section else of_text)
    source = section.get("pretrained", section)
    config = Config.from_dict(dict(stage.torchacc))
    config.dist.fsdp.cpu_offload = stage.distributed.fsdp.cpu_offload
    config.memory.gc = config.memory.gc or stage.distributed.fsdp.activation_checkpointing
    options = {"lr": 1e-3} if args.optimizer else stage.optimizer.options
    training = _training(
        args,
        name,
        _model_config(source, {"vocab_size": vocabulary}),
        config,
        args.batch or stage.training.batch_size,
        args.seq or stage.data.block_size,
        args.optimizer or stage.optimizer.name,
        options,
    )
    # The trainer asks for the norm of the gradients in each step, whatever it clips them to.
    sums = stage.training.gradient_accumulation_steps > 1
    return replace(
        training,
        adds_gradients=sums,
        clips=True,
        strategy=sharding_strategy(stage.distributed),
        is_packed=stage.data.packing is True,
    )


def replicas(args: argparse.Namespace, config: Config, strategy: str) -> int:
    """Return how many copies of a model there are on `args.devices`, as a run takes it from what is given."""
    dist = config.dist
    given = args.dp or dist.dp.size
    if given is None and "size" in dist.fsdp.model_fields_set:
        given = max(1, args.devices // (dist.fsdp.size * prod(getattr(dist, axis).size for axis in SPLITS)))
    return int(given or (2 if strategy == "HYBRID_SHARD" else 1))


def _training(
    args: argparse.Namespace,
    name: str,
    model_config: Any,
    config: Config,
    batch: int,
    length: int | None,
    optimizer: str,
    options: Mapping[str, Any],
) -> Training:
    config.compute.bf16 = config.compute.bf16 or args.bf16
    for axis in SPLITS:
        if getattr(args, axis) is not None:
            getattr(config.dist, axis).size = getattr(args, axis)
    if args.gc is not None:
        config.memory.gc, config.memory.gc_policy = True, args.gc
    if attention_kernels.keeps_scores(config.compute.attention):
        model_config._attn_implementation = "eager"
    kind = find_optimizer(optimizer)
    model = _build(model_config)
    if args.lora is not None:
        name = f"{name} with LoRA of rank {args.lora}"
        _add_adapters(model, args.lora)
    return Training(
        name=name,
        model=model,
        batch=batch,
        length=_length(model_config, length),
        config=config,
        optimizer=kind.__name__,
        num_states=count_states(kind, options),
        optimizer_options=options,
    )


def _length(config: Any, asked: int | None) -> int:
    most = getattr(config, "max_position_embeddings", None) or asked or _DEFAULT_LENGTH
    if asked is not None and asked > most:
        raise ConfigError(
            f"--seq {asked}: the model has {most} positions. Ask for no more, or give it more of them: "
            f"max_position_embeddings: {asked} in its file"
        )
    return asked or min(_DEFAULT_LENGTH, most)


def _model_config(source: str | Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a model: from its options, a file of them, a checkpoint, or the hub."""
    from transformers import AutoConfig

    changes = {name: value for name, value in changes.items() if value is not None}
    if isinstance(source, str) and Path(source).is_file():
        path, source = source, _read_options(Path(source))
        _check_names(path, source)
    if isinstance(source, str) and Path(source).suffix in _OF_FILES:
        raise ConfigError(f"--model {source}: there is no such file")
    try:
        if isinstance(source, Mapping):
            return AutoConfig.for_model(**{**source, "use_cache": False, **changes})
        if is_on_hub(source):
            check_hub("--model", source)
        return AutoConfig.from_pretrained(source, use_cache=False, trust_remote_code=False, **changes)
    except ConfigError:
        raise
    except Exception as error:  # transformers has several classes for it
        reason = in_one_line(error)
        if isinstance(source, Mapping):
            raise ConfigError(f"transformers refuses the model's options: {reason}") from error
        raise ConfigError(
            f"--model {source}: there is no such model. It is a checkpoint's folder, a file of the options of its "
            f"configuration with model_type, or a name on the Hugging Face hub. {reason}"
        ) from error


def _read_options(path: Path) -> dict[str, Any]:
    name = f"--model {path}"
    options = read_json(path) if path.suffix == ".json" else parse(read_text(path), name)[0]
    if isinstance(options, dict) and "training_stages" in options:
        raise ConfigError(f"--model {path} is a training file: write --config {path}, and --model-config for its model")
    if not isinstance(options, dict) or "model_type" not in options:
        raise ConfigError(f"--model {path} has no model_type, such as `model_type: gpt2`, beside the model's options")
    return options


def _check_names(path: str, options: Mapping[str, Any]) -> None:
    """Refuse a family that transformers does not have, and options that the family does not have."""
    from transformers import CONFIG_MAPPING

    family = options["model_type"]
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        hint = did_you_mean(str(family), CONFIG_MAPPING) or "choose one such as gpt2 or llama"
        raise ConfigError(
            f"--model {path}: model_type = {shown(family)} is not a family of models in transformers; {hint}"
        )
    if _OF_A_CHECKPOINT & options.keys():
        return
    for name, hint in unknown_options(options):
        raise ConfigError(f"--model {path}: {family} has no option {shown(name)}; {hint}")


def _build(config: Any) -> nn.Module:
    """Build a model with a loss on the meta device: the class that the configuration names, else a language model."""
    import transformers

    transformers.logging.set_verbosity_error()
    names = [name for name in getattr(config, "architectures", None) or () if name.endswith(_WITH_A_LOSS)]
    named = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    automatic = [getattr(transformers, name) for name in _AUTOMATIC]
    known = [kind for kind in automatic if type(config) in kind._model_mapping]
    if not named and not known:
        raise ConfigError(f"transformers has no language model of model_type {shown(config.model_type)}: name another")
    try:
        with torch.device("meta"):
            model: Any = named[0](config) if named else known[0].from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever a model's code comes upon where its options contradict each other
        raise ConfigError(f"a {config.model_type} cannot be built with these options: {in_one_line(error)}") from error
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("batched_mm")  # the one that runs without values, and under XLA
    return cast(nn.Module, model.train())


def _add_adapters(model: nn.Module, rank: int) -> None:
    """Put adapters of LoRA into the layers that peft chooses for the model's family; nothing else is trained then."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("--lora plans adapters of peft: pip install peft") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of layers whose weights are transposed
            inject_adapter_in_model(LoraConfig(r=rank), model)
    except ValueError as error:
        raise ConfigError(f"--lora {rank}: peft puts no adapters into {type(model).__name__}: {error}") from error
