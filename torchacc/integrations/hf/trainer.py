"""transformers' `Trainer` with what touches devices, data and checkpoints replaced by torchacc's."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from accelerate.data_loader import SeedableRandomSampler
from torch import nn
from torch.utils.data import IterableDataset, RandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from torchacc import api, arguments
from torchacc.checkpoint.run_state import random_state
from torchacc.config import Config
from torchacc.data import AsyncLoader, tree
from torchacc.engines import registry
from torchacc.engines.base import Engine
from torchacc.engines.device_losses import kept_by_devices, weighed
from torchacc.engines.sharded_model import sharded_model
from torchacc.errors import ConfigError
from torchacc.integrations.hf import checkpoints
from torchacc.integrations.hf.accelerator import AcceleratorAdapter
from torchacc.integrations.hf.data import EvalLoader, masked, num_own, uneven
from torchacc.integrations.hf.losses import MeanOf, Smoother, are_classes, class_name, find_mean, rows_of
from torchacc.integrations.hf.replaced_globals import with_globals_replaced
from torchacc.integrations.hf.training_arguments import Devices, TrainingArguments, adopt

_Theirs: Any = transformers.Trainer

_UNKNOWN = "it was found to be neither a mean over the labels that are not -100 nor one over rows"


def _is_lazy() -> bool:
    engine = registry.active_engine()
    return engine is not None and engine.is_lazy


# To transformers an installed torch_xla means that this process has one XLA device. What its loop would do with that is
# the engine's to do, and natively nothing may start XLA.
_DEVICE = {"is_torch_xla_available": _is_lazy, "xm": SimpleNamespace(mark_step=api.sync)}


class Trainer(_Theirs):  # type: ignore[misc]
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

    label_smoother: Any
    _tr_loss: torch.Tensor

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        torchacc_config: Config | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        **kwargs: Any,
    ) -> None:
        if "config" in kwargs:
            raise ConfigError("Trainer(config=…): transformers has no such argument; write torchacc_config=…")
        arguments.check_config("torchacc_config", torchacc_config)
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        args, self._config = adopt(args, torchacc_config if torchacc_config is not None else Config())
        if model is not None:
            _refuse_placed(model)
        self._given_optimizer, _ = optimizers
        self._train_loader: AsyncLoader | None = None
        self._num_parameters = 0
        self._draws: dict[str, Any] = {}
        self._saves_run = False
        self._mean_of: MeanOf | None = None
        self._class_name = ""
        super().__init__(model, args, *positional, optimizers=optimizers, **kwargs)
        if self.label_smoother is not None:
            self.label_smoother = Smoother(self.label_smoother.epsilon, self._class_name)

    # ---- Devices

    def create_accelerator_and_postprocess(self) -> None:
        """Put the adapter of torchacc in the place of accelerate's Accelerator."""
        self.accelerator = AcceleratorAdapter()
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = False
        self.is_fsdp_enabled = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Shard the model. Collective: every process."""
        _refuse_placed(model)
        count = getattr(model, "num_parameters", None)
        self._num_parameters = count(exclude_embeddings=True) if count is not None else 0
        self._class_name = class_name(model)
        api.accelerate(model, config=self._config, optimizer=self._given_optimizer)
        # compute_loss() weighs the losses, or what a script has in its place.
        model.forward = kept_by_devices()(model.forward)
        self.accelerator.sharded = sharded_model(model)
        self.args._devices = Devices(self._engine.device, self._engine.mesh.num_data_shards)

    @property
    def _engine(self) -> Engine:
        return self.accelerator.engine

    @property
    def _num_losses(self) -> int:
        """How many losses of a global batch there are: under SPMD one, otherwise one for each device."""
        return self._engine.mesh.num_data_shards // len(self._engine.data_shards)

    # ---- Data

    def get_train_dataloader(self) -> AsyncLoader:
        """Return the training loader, sharded over the devices."""
        self._train_loader = api.shard_loader(super().get_train_dataloader(), self.model)
        return self._train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> EvalLoader:
        """Return an evaluation loader, sharded over the devices, whose rows count once."""
        return EvalLoader(super().get_eval_dataloader(eval_dataset), self.accelerator, self.model)

    def get_test_dataloader(self, test_dataset: Any) -> EvalLoader:
        """Return a loader for predictions, sharded over the devices, whose rows count once."""
        return EvalLoader(super().get_test_dataloader(test_dataset), self.accelerator, self.model)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return transformers' sampler, with an order that follows from the seed and the epoch, as accelerate's."""
        sampler = super()._get_train_sampler(train_dataset)
        seed = self.args.data_seed
        if type(sampler) is RandomSampler:
            generator = torch.Generator()
            return SeedableRandomSampler(sampler.data_source, generator=generator, data_seed=seed)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.generator = torch.Generator().manual_seed(self.args.seed if seed is None else seed)
        return sampler

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
        is_masked = num_repeated > 0 and self._find_mean(self.model, batch).ignores_masked
        return masked(batch, self._engine, num_repeated) if is_masked else batch

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
        num_filling = self._check_filled_up(model, inputs)
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if loss is None:
            return loss, logits, labels
        if num_filling and self._mean_of is MeanOf.ROWS:
            loss = self._loss_of_rows(model, inputs, num_filling)
        return self.accelerator.mean(loss).repeat(len(self._engine.data_shards)), logits, labels

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
            return compute_loss(model, inputs, return_outputs, num_items_in_batch)
        kind = self._find_mean(model, inputs)
        if kind is MeanOf.UNKNOWN:
            if model.training:
                self._check_evaluations()
            self._check_same_counts(inputs)
        if not kind.is_of_labels:
            return compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs, weight = self._weighed(inputs, kind)
        loss, outputs = compute_loss(model, inputs, True, num_items_in_batch)
        return (loss * weight, outputs) if return_outputs else loss * weight

    def _weighed(self, inputs: dict[str, Any], kind: MeanOf) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the inputs, and what their loss counts in the mean of all devices'. Collective."""
        labels = inputs["labels"].cpu() if _is_lazy() else inputs["labels"]
        count = kind.count(labels)
        weight = count * self._num_losses / self.accelerator.gather(count)
        if not count:  # the mean of none is not a number, also times nothing: let it be of any one label
            labels = labels.clone()
            labels[(-1,) * labels.dim()] = 0
            inputs = {**inputs, "labels": self._engine.put(labels)}
        return inputs, self._engine.put(weight)

    def _loss_of_rows(self, model: nn.Module, inputs: dict[str, Any], num_filling: int) -> torch.Tensor:
        """Return the loss of the rows that count, times what it counts in the mean of all devices'."""
        inputs = self._prepare_inputs(inputs)
        num_rows = tree.num_rows(inputs)
        assert num_rows is not None
        own = num_own(self._engine, num_rows, num_filling)
        with torch.no_grad():
            loss = self.compute_loss(model, rows_of(inputs, slice(max(own, 1))))
        return loss * (own * self._num_losses / (num_rows * self._num_losses - num_filling))  # type: ignore[no-any-return]

    def _find_mean(self, model: nn.Module, inputs: dict[str, Any]) -> MeanOf:
        """Find out what a loss is the mean of, with the first batch. Collective: every process."""
        if self._mean_of is None:
            inputs = tree.map_tensors(torch.Tensor.cpu, dict(inputs))
            prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
            if prepare is not None and torch.is_tensor(inputs.get("labels")):
                inputs.setdefault("decoder_input_ids", prepare(labels=inputs["labels"]))

            def loss_of(tried: dict[str, Any], num_items: float) -> float:
                items, tried = self._engine.put(torch.tensor(num_items)), self._engine.put({**tried})
                return float(super(Trainer, self).compute_loss(model, tried, num_items_in_batch=items))

            training = model.training
            model.eval()  # draws no random numbers
            with torch.no_grad():
                self._mean_of = find_mean(loss_of, inputs, self.label_names, self._engine.group.all_gather_objects)
            model.train(training)
        return self._mean_of

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

    def _check_filled_up(self, model: nn.Module, inputs: dict[str, Any]) -> int:
        """Return how many rows complete this batch; refuse those that would count."""
        loader = self.callback_handler.eval_dataloader
        names = [name for name in self.label_names if name in inputs]
        if not getattr(loader, "num_filling", 0) or not names:
            return 0
        if self._num_losses > 1:
            if self._find_mean(model, inputs) is MeanOf.UNKNOWN:
                raise uneven(_UNKNOWN)
        elif unmasked := [name for name in names if name != "labels" or not are_classes(inputs[name])]:
            raise uneven(f"{', '.join(unmasked)} have no value which means that a row does not count")
        return loader.num_rows - self.accelerator.num_rows  # type: ignore[no-any-return]

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        is_logged = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if is_logged:
            own = self.accelerator.sharded.fetch([tr_loss])[0]  # on the host, where to work with it needs no program
            tr_loss = self._engine.group.all_reduce_mean(own)
        self._log_save_evaluate(tr_loss, *args, **kwargs)
        if is_logged:
            self._empty_loss()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._tr_loss = self.accelerator.mean(self._tr_loss)
        return super()._finalize_training(*args, **kwargs)

    def _empty_loss(self) -> None:
        """Let the sum of losses lie as a step leaves it: otherwise the next step's program would be another one."""
        self._tr_loss.data = self._engine.put(torch.zeros(()))

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return model.clip_grad_norm_(self.args.max_grad_norm)  # type: ignore[no-any-return]

    def _get_grad_norm(self, model: Any, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return model.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return about how many operations a step takes on all devices."""
        main_input = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 0 if main_input is None else 6 * main_input.numel() * self._num_losses * self._num_parameters

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        """Return the optimizer that the arguments name; a lazy engine fuses by itself, and has no fused kernels."""
        optimizer_class, kwargs = _Theirs.get_optimizer_cls_and_kwargs(args, model)
        if _is_lazy():
            kwargs.pop("fused", None)
        return optimizer_class, kwargs

    # ---- The loop, which is transformers'

    _train_epoch: Callable[..., None] = with_globals_replaced(
        _Theirs._run_epoch, skip_first_batches=lambda loader, num_batches: loader, **_DEVICE
    )
    evaluation_loop = with_globals_replaced(_Theirs.evaluation_loop, **_DEVICE)
    _log_save_evaluate: Callable[..., None] = with_globals_replaced(
        _Theirs._maybe_log_save_evaluate, nested_gather=lambda loss, mode: loss, **_DEVICE
    )
    _write_checkpoint: Callable[..., None] = with_globals_replaced(
        _Theirs._save_checkpoint, is_torch_xla_available=lambda: False
    )

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step == self._initial_global_step:
            self._empty_loss()
        self._train_epoch(*args, **kwargs)

    # ---- Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as transformers does. Collective: every process.

        Args:
            resume_from_checkpoint: A folder that this Trainer has saved, by any engine at any number of devices; True
                for the newest of `output_dir` that is complete.
            *args: As transformers has them.
            **kwargs: As transformers has them.

        Raises:
            CheckpointError: There is nothing to resume, or it does not fit.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_checkpoint()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _newest_checkpoint(self) -> str:
        group = self._engine.group

        def look() -> str | None:
            return str(checkpoints.newest(Path(self.args.output_dir))) if group.job.rank == 0 else None

        return group.broadcast_object(group.call_on_all(look))  # type: ignore[no-any-return]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check the checkpoint; `_load_optimizer_and_scheduler()` loads all of it."""
        checkpoints.check(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        run = self._run() if not self.args.ignore_data_skip else self._run(loader=None)
        fused = [group.get("fused") for group in self.optimizer.param_groups]
        extra = checkpoints.load(Path(checkpoint), run)
        for group, own in zip(self.optimizer.param_groups, fused, strict=True):
            group["fused"] = own  # it belongs to the devices, which may be others now
        saved, rows = extra["rows_per_step"], self.get_total_train_batch_size(self.args)
        if saved != rows:
            raise ConfigError(
                f"{checkpoint} was saved by a run of {saved} rows per step, and this one has {rows} = "
                f"per_device_train_batch_size({self._train_batch_size}) * gradient_accumulation_steps"
                f"({self.args.gradient_accumulation_steps}) * devices({self.args.world_size}): choose them so that the "
                "product is the same, as steps count the data"
            )
        self._draws = random_state(sharded_model(self.model))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Put the generators where they were: what comes before the first step has drawn from them."""
        if checkpoint is not None:
            self._engine.set_random_state(self._draws)
            random.setstate(self._draws["python"])
            np.random.set_state(self._draws["numpy"])

    def _load_best_model(self) -> None:
        checkpoints.load(Path(self.state.best_model_checkpoint), checkpoints.Run(self.model))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._saves_run = True
        try:
            self._write_checkpoint(model, trial)
        finally:
            self._saves_run = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save what `from_pretrained()` opens: the full weights, or the adapters'. Collective: every process.

        Args:
            output_dir: The folder; what else is in it stays. None for the one of the arguments.
            _internal_call: Whether transformers calls it.
        """
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        if self._saves_run:
            self._save_run(folder)
            return
        weights = checkpoints.full_weights(self.model)
        self._engine.group.call_on_all(lambda: self._save(str(folder), state_dict=weights))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_run(self, folder: Path) -> None:
        run = checkpoints.Run(self.model) if self.args.save_only_model else self._run()
        tokenizer = self.processing_class
        if tokenizer is None:
            tokenizer = getattr(self.data_collator, "tokenizer", None)
        extra = {"rows_per_step": self.get_total_train_batch_size(self.args)}
        checkpoints.save(folder, run, tokenizer=tokenizer, extra=extra)
        if self.args.should_save:
            torch.save(self.args, folder / "training_args.bin")

    def _run(self, **changed: Any) -> checkpoints.Run:
        parts = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler, "loader": self._train_loader}
        return checkpoints.Run(self.model, **{**parts, **changed})

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Do nothing: `save_model()` has saved them."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: `save_model()` has saved it."""

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: each trial would have to shard another model in a runtime that is set up for one.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "hyperparameter_search() would start anew in one process for each trial, where torchacc's runtime starts "
            "once: run each trial as a job of its own"
        )


def _refuse_placed(model: nn.Module) -> None:
    if getattr(model, "hf_device_map", None) is not None:
        raise ConfigError("the model was opened with device_map, and torchacc places it: open it without device_map")
    if getattr(model, "is_quantized", False):
        raise ConfigError("the model is quantized, and its packed weights cannot be sharded: open it unquantized")


def _num_labels(labels: Any) -> int:
    if not torch.is_tensor(labels):
        raise ConfigError(
            f"the labels are a {type(labels).__name__}, of which nobody knows how many each process has, and each "
            "device's loss is a mean over its own: run all devices from one process (dist.fsdp.use_spmd=True)"
        )
    return labels.numel() if labels.is_floating_point() else int(labels.cpu().ne(-100).sum())
