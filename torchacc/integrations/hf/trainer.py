"""transformers' `Trainer`, and trainers that are made of it, with torchacc's devices, data and checkpoints."""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from torchacc import api, arguments
from torchacc.config import Config
from torchacc.data import AsyncLoader, tree
from torchacc.engines import registry
from torchacc.engines.device_losses import local_losses, weighed
from torchacc.engines.sharded_model import sharded_model
from torchacc.env import read_job
from torchacc.errors import ConfigError
from torchacc.integrations.hf.data import EvalLoader, masked, num_own, uneven
from torchacc.integrations.hf.known_trainers import check_losses, is_zero_without_labels
from torchacc.integrations.hf.loop import Loop, is_lazy
from torchacc.integrations.hf.losses import MeanOf, Smoother, are_classes, class_name, find_mean, rows_of
from torchacc.integrations.hf.training_arguments import Devices, TrainingArguments, adopt
from torchacc.logging import get_logger

_log = get_logger(__name__)

_Above: Any = object  # a mixin; what is below it is transformers', or a trainer that is made of it

_UNKNOWN = "it was found to be neither a mean over the labels that are not -100 nor one over rows"


class ShardedTrainer(_Above):  # type: ignore[misc]
    """What surrounds a trainer: its model and its data are sharded, and its losses weighed."""

    label_smoother: Any

    def __init__(self, *positional: Any, torchacc_config: Config | None = None, **kwargs: Any) -> None:
        if "config" in kwargs:
            raise ConfigError("Trainer(config=…): transformers has no such argument; write torchacc_config=…")
        arguments.check_config("torchacc_config", torchacc_config)
        kwargs |= _named(super().__init__, positional)
        args = kwargs.get("args")
        if args is None:
            args = self._default_arguments()
        args, self._config = adopt(args, torchacc_config if torchacc_config is not None else Config())
        if isinstance(kwargs.get("model"), nn.Module):
            _refuse_placed(kwargs["model"])
        _refuse_several_hosts(self._config)
        _refuse_loss_of_logits(args, kwargs.get("compute_loss_func"), self._config)
        self._given_optimizer = (kwargs.get("optimizers") or (None, None))[0]
        self._train_loader: AsyncLoader | None = None
        self._num_parameters = 0
        self._mean_of: dict[bool, MeanOf] = {}
        self._is_built = False
        super().__init__(**{**kwargs, "args": args})
        self._is_built = True
        self._shard()

    def _default_arguments(self) -> Any:
        raise ConfigError(
            f"{type(self).__name__} needs its arguments: args=arguments_for(SFTConfig)(output_dir=…), with the class "
            "of arguments that is this trainer's in place of SFTConfig"
        )

    # ---- Devices

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Shard the model, once the trainer is built: what it does to the model's forward comes first."""
        if self._is_built:
            self._shard_model(model)

    def _shard(self) -> None:
        """Shard the model, and those that are only evaluated. Collective: every process."""
        self._shard_model(self.model)
        for model in self.accelerator.evaluated:
            _refuse_placed(model)
            api.accelerate(model.requires_grad_(False).eval(), config=self._config)
        check_losses(self, self._num_losses)
        if self.label_smoother is not None:
            self.label_smoother = Smoother(self.label_smoother.epsilon, self._class_name)

    def _shard_model(self, model: nn.Module) -> None:
        _refuse_placed(model)
        count = getattr(model, "num_parameters", None)
        self._num_parameters = count(exclude_embeddings=True) if count is not None else 0
        self._class_name = class_name(model)
        api.accelerate(model, config=self._config, optimizer=self._given_optimizer)
        # compute_loss() weighs the losses, or what a script has in its place.
        model.forward = local_losses()(model.forward)
        self.accelerator.sharded = sharded_model(model)
        self.args._devices = Devices(self._engine.device, self._engine.mesh.data_parallel_size)

    # ---- Data

    def get_train_dataloader(self) -> AsyncLoader:
        """Return the training loader, sharded over the devices."""
        self._train_loader = api.shard_loader_for_trainer(super().get_train_dataloader(), self.model, fills_count=False)
        return self._train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> EvalLoader:
        """Return an evaluation loader, sharded over the devices, whose rows count once."""
        return EvalLoader(super().get_eval_dataloader(eval_dataset), self.accelerator, self.model)

    def get_test_dataloader(self, test_dataset: Any) -> EvalLoader:
        """Return a loader for predictions, sharded over the devices, whose rows count once."""
        return EvalLoader(super().get_test_dataloader(test_dataset), self.accelerator, self.model)

    # ---- Loss

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the micro-batches of a step, and their number of labels."""
        return super().get_batch_samples(map(self._without_repeated, epoch_iterator), num_batches, device)

    def _without_repeated(self, batch: Any) -> Any:
        """Mask the rows of an epoch's start that complete its last batch, where masked rows do not count."""
        loader = self._train_loader
        is_counted = loader is not None and not isinstance(loader.dataset, IterableDataset) and loader.batch_size
        if not is_counted or not are_classes(batch.get("labels")):
            return batch
        assert loader is not None
        num_repeated = loader.state_dict()["batches"] * loader.batch_size - len(loader.sampler)
        is_masked = num_repeated > 0 and self._find_mean(self.model, batch, is_training=True).ignores_masked
        return masked(batch, self._engine, num_repeated, self._num_examples(is_training=True)) if is_masked else batch

    def _num_examples(self, *, is_training: bool) -> int:
        """Return of how many examples this process makes a whole batch."""
        loader = self._train_loader if is_training else self.callback_handler.eval_dataloader
        of_arguments = self._train_batch_size if is_training else self.args.eval_batch_size
        of_device: int = getattr(loader, "batch_size", None) or of_arguments
        return of_device * len(self._engine.data_parallel_ranks)

    def _has_rows_of_pairs(self, inputs: Any, *, is_training: bool) -> bool:
        """Tell whether a batch has more rows than examples, as one of answers that were chosen and rejected."""
        return (tree.num_rows(inputs) or 0) > self._num_examples(is_training=is_training)

    def _get_num_items_in_batch(self, batch_samples: Any, device: torch.device) -> Any:
        """Return the number of labels in all devices' batches of this step, divided by the losses that are averaged."""
        num_items = super()._get_num_items_in_batch(batch_samples, device)
        if num_items is None or not self.args.average_tokens_across_devices:
            return num_items
        # Not the loss is multiplied, as transformers does it: some models do not use the number.
        return num_items / self._num_losses

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Return the loss over all devices, once for each that this process feeds, and this process's outputs."""
        num_filling = self._num_filling()
        has_labels = self._check_filled_up(model, inputs) if num_filling else True
        if not prediction_loss_only and self._has_rows_of_pairs(inputs, is_training=False):
            raise ConfigError(
                f"the batches of {type(self).__name__} have several rows for each example, whose predictions would "
                "come in another order than that of one device: leave compute_metrics out, or set "
                "prediction_loss_only=True"
            )
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if loss is None:
            return loss, logits, labels
        if not has_labels:
            raise uneven("they have no labels, by which a loss could leave them out")
        if num_filling and self._mean_of.get(True) is MeanOf.ROWS:
            loss = self._loss_of_rows(model, inputs, num_filling)
        return self.accelerator.mean(loss).repeat(len(self._engine.data_parallel_ranks)), logits, labels

    @weighed()
    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return this process's loss, such that the mean over all of them is that of the batch of all. Collective.

        Raises:
            ConfigError: Of what it is the mean is not known, and devices have different numbers of labels.
        """
        compute_loss = super().compute_loss
        if self._num_losses == 1:
            has_pairs = self._has_rows_of_pairs(inputs, is_training=model.training)
            if has_pairs and len(self._engine.data_parallel_ranks) > 1:
                raise ConfigError(
                    f"the batches of {type(self).__name__} have several rows for each example, and one process that "
                    "drives all devices (dist.fsdp.use_spmd=True) puts the devices' rows one after another, so that "
                    "what belongs together is apart: use a process for each device (torchacc launch)"
                )
            return compute_loss(model, inputs, return_outputs, num_items_in_batch)
        kind = self._find_mean(model, inputs, is_training=model.training, is_counted=num_items_in_batch is not None)
        if kind is MeanOf.UNKNOWN:
            if model.training:
                self._check_evaluations()
            self._check_same_counts(inputs)
        if not kind.is_of_labels:
            return compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs, weight = self._weighed(inputs, kind)
        found = compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return (found[0] * weight, *found[1:]) if return_outputs else found * weight

    def _weighed(self, inputs: dict[str, Any], kind: MeanOf) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the inputs, and what their loss counts in the mean of all devices'. Collective."""
        labels = inputs["labels"].cpu() if is_lazy() else inputs["labels"]
        count = kind.count(labels)
        is_zero_of_none = is_zero_without_labels(self)
        num_of_all = self.accelerator.gather(count).sum()
        if is_zero_of_none:
            num_of_all = num_of_all.clamp(min=1)  # where no device has a label, each has the loss zero, as one device
        weight = count * self._num_losses / num_of_all
        if not count and not is_zero_of_none:  # the mean of none is not a number, also times nothing: let it be of one
            labels = labels.clone()
            labels[(-1,) * labels.dim()] = 0
            inputs = {**inputs, "labels": self._engine.to_device(labels)}
        return inputs, self._engine.to_device(weight)

    def _loss_of_rows(self, model: nn.Module, inputs: dict[str, Any], num_filling: int) -> torch.Tensor:
        """Return the loss of the rows that count, times what it counts in the mean of all devices'."""
        inputs = self._prepare_inputs(inputs)
        num_rows = tree.num_rows(inputs)
        assert num_rows is not None
        own = num_own(self._engine, num_rows, num_filling)
        with torch.no_grad():
            loss = self.compute_loss(model, rows_of(inputs, slice(max(own, 1))))
        return loss * (own * self._num_losses / (num_rows * self._num_losses - num_filling))  # type: ignore[no-any-return]

    def _find_mean(
        self, model: nn.Module, inputs: dict[str, Any], *, is_training: bool, is_counted: bool = True
    ) -> MeanOf:
        """Find out what a loss is the mean of, with the first batch. Collective: every process.

        Args:
            model: The model.
            inputs: A batch.
            is_training: Whether it is of the training loader.
            is_counted: Whether the loss is told the number of items of the step.
        """
        if is_counted not in self._mean_of:
            is_of_pairs = self._has_rows_of_pairs(inputs, is_training=is_training)
            self._mean_of[is_counted] = MeanOf.UNKNOWN if is_of_pairs else self._tried_mean(model, inputs, is_counted)
            if self._mean_of[is_counted] is MeanOf.UNKNOWN and not is_of_pairs and self._engine.job.launched:
                self._warn_of_unequal_weights()
        return self._mean_of[is_counted]

    def _warn_of_unequal_weights(self) -> None:
        _log.warning(
            "the loss of %s is a mean neither over labels nor over rows: the mean of the devices' losses, which is "
            "trained on, is that of all samples only where each part weighs the same, and another number with weights "
            "of classes, or where samples are compared with one another. Divide a sum by num_items_in_batch, or let "
            "one process drive all devices (config.dist.fsdp.use_spmd = True)",
            type(self).__name__,
        )

    def _tried_mean(self, model: nn.Module, inputs: dict[str, Any], is_counted: bool) -> MeanOf:
        inputs = tree.map_tensors(torch.Tensor.cpu, dict(inputs))
        prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if prepare is not None and torch.is_tensor(inputs.get("labels")):
            inputs.setdefault("decoder_input_ids", prepare(labels=inputs["labels"]))

        def loss_of(tried: dict[str, Any], num_items: float) -> float:
            tried = self._engine.to_device({**tried})
            items = self._engine.to_device(torch.tensor(num_items)) if is_counted else None
            return float(super(ShardedTrainer, self).compute_loss(model, tried, num_items_in_batch=items))

        training, metrics = model.training, copy.deepcopy(getattr(self, "_metrics", None))
        model.eval()  # draws no random numbers
        with torch.no_grad():
            found = find_mean(loss_of, inputs, self.label_names, self._engine.group.all_gather_objects)
        model.train(training)
        if metrics is not None:
            self._metrics = metrics  # trl's trainers note in it what each loss has seen
        return found

    def _check_same_counts(self, inputs: dict[str, Any]) -> None:
        labels = {name: inputs[name] for name in self.label_names if name in inputs}
        counts = self._engine.group.all_gather_objects({name: _num_labels(value) for name, value in labels.items()})
        if any(count != counts[0] for count in counts):
            raise ConfigError(
                f"the processes have different numbers of labels in this batch ({counts}), so that the mean of their "
                f"losses is not that of all labels, and the loss of {self._class_name} cannot be weighed: "
                f"{_UNKNOWN}. Run all devices from one process (dist.fsdp.use_spmd=True), give each batch the same "
                "number of labels, or divide the sum of the losses by num_items_in_batch, in the model or in "
                "compute_loss_func"
            )

    def _check_evaluations(self) -> None:
        """Refuse an evaluation that will not be possible before anything is trained."""
        datasets = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        num_rows = self.args.eval_batch_size * self.args.world_size
        uneven_rows = any(hasattr(dataset, "__len__") and len(dataset) % num_rows for dataset in datasets)
        if uneven_rows and not self.args.dataloader_drop_last:
            raise uneven(_UNKNOWN)

    def _num_filling(self) -> int:
        """Return how many rows complete this batch of all devices."""
        loader = self.callback_handler.eval_dataloader
        return loader.num_rows - self.accelerator.num_rows if getattr(loader, "num_filling", 0) else 0

    def _check_filled_up(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        """Refuse rows that complete a batch and would count; return whether it has labels."""
        names = [name for name in self.label_names if name in inputs]
        if not names:
            return False
        if self._num_losses > 1:
            if self._find_mean(model, inputs, is_training=False) is MeanOf.UNKNOWN:
                raise uneven(_UNKNOWN)
        elif unmasked := [name for name in names if name != "labels" or not are_classes(inputs[name])]:
            raise uneven(f"{', '.join(unmasked)} have no value which means that a row does not count")
        return True


class Trainer(ShardedTrainer, Loop):
    """`transformers.Trainer` on torchacc's engines: the same loop, callbacks and logs, with the model sharded.

    Args:
        model: As transformers has it, on the CPU; it is sharded here, in place.
        args: A `torchacc.integrations.hf.TrainingArguments`.
        torchacc_config: How to shard; None for data parallelism over all processes.
        optimizers: An optimizer of the model, whose groups move to the shards, and its scheduler.
        **kwargs: As transformers has them.

    Raises:
        ConfigError: An argument cannot be carried out, or contradicts the config, the model or the job.
    """

    def _default_arguments(self) -> TrainingArguments:
        return TrainingArguments(output_dir="tmp_trainer")


def _named(function: Any, positional: tuple[Any, ...]) -> dict[str, Any]:
    """Return positional arguments of a trainer by their names."""
    if not positional:
        return {}
    parameters = list(inspect.signature(function).parameters.values())
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(positional) > len(names) or any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise ConfigError(
            f"{len(positional)} arguments have no names, and the trainer's __init__ does not say what they are: pass "
            "them as model=…, args=…"
        )
    return dict(zip(names, positional, strict=False))


def _refuse_placed(model: nn.Module) -> None:
    if getattr(model, "hf_device_map", None) is not None:
        raise ConfigError("the model was opened with device_map, and torchacc places it: open it without device_map")
    if getattr(model, "is_quantized", False):
        raise ConfigError("the model is quantized, and its packed weights cannot be sharded: open it unquantized")


def _refuse_several_hosts(config: Config) -> None:
    """Refuse one program for several hosts, where neither process has the rows of a batch in a row."""
    job = read_job()
    if job.launched and registry.engine_class(registry.choose(config, job).engine).drives_all_devices:
        raise ConfigError(
            f"config.dist.fsdp.use_spmd = True in a job of {job.num_processes} processes: the Trainer does not count "
            "the rows of several hosts of one program yet. Leave use_spmd out, with a process for each device, or "
            "write the loop yourself"
        )


def _refuse_loss_of_logits(args: TrainingArguments, compute_loss_func: Any, config: Config) -> None:
    """Refuse a loss that the Trainer would compute from logits, which only the last of several stages has."""
    given = {"label_smoothing_factor": args.label_smoothing_factor, "compute_loss_func": compute_loss_func}
    name = next((name for name, value in given.items() if value), None)
    if name is not None and config.dist.pp.size > 1:
        raise ConfigError(
            f"{name} with config.dist.pp.size = {config.dist.pp.size}: the Trainer would compute the loss from logits, "
            f"which only the last stage has. Leave {name} out, so that the model computes the loss, or set "
            "config.dist.pp.size = 1"
        )


def _num_labels(labels: Any) -> int:
    if not torch.is_tensor(labels):
        raise ConfigError(
            f"the labels are a {type(labels).__name__}, of which nobody knows how many each process has, and each "
            "device's loss is a mean over its own: run all devices from one process (dist.fsdp.use_spmd=True)"
        )
    return labels.numel() if labels.is_floating_point() else int(labels.cpu().ne(-100).sum())
