"""What transformers' own loop does, with torchacc's devices and checkpoints in place of accelerate's."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from accelerate.data_loader import SeedableRandomSampler
from torch import nn
from torch.utils.data import RandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from torchacc import api
from torchacc.checkpoint.run_state import random_state
from torchacc.data import AsyncLoader
from torchacc.engines import registry
from torchacc.engines.base import Engine
from torchacc.engines.sharded_model import sharded_model
from torchacc.errors import ConfigError
from torchacc.integrations.hf import checkpoints
from torchacc.integrations.hf.accelerator import AcceleratorAdapter
from torchacc.integrations.hf.replaced_globals import method_of, with_globals_replaced
from torchacc.integrations.hf.training_arguments import TrainingArguments

_Theirs: Any = transformers.Trainer


def is_lazy() -> bool:
    """Tell whether the engine that runs computes later than the script says."""
    engine = registry.active_engine()
    return engine is not None and engine.is_lazy


# To transformers an installed torch_xla means that this process has one XLA device. What its loop would do with that is
# the engine's to do, and natively nothing may start XLA.
_DEVICE = {"is_torch_xla_available": is_lazy, "xm": SimpleNamespace(mark_step=api.sync)}


class Loop(_Theirs):  # type: ignore[misc]
    """transformers' Trainer, whose loop starts no devices and whose checkpoints are torchacc's.

    A trainer that is made of transformers' has it below, so that what it overrides of the loop calls this.
    """

    _train_loader: AsyncLoader | None
    _num_parameters: int
    _saves_run = False
    _draws: dict[str, Any]
    _tr_loss: torch.Tensor

    def create_accelerator_and_postprocess(self) -> None:
        """Put the adapter of torchacc in the place of accelerate's Accelerator."""
        self.accelerator = AcceleratorAdapter()
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = False
        self.is_fsdp_enabled = False

    @property
    def _engine(self) -> Engine:
        return self.accelerator.engine

    @property
    def _num_losses(self) -> int:
        """How many losses of a global batch there are: under SPMD one, otherwise one for each device."""
        return self._engine.mesh.data_parallel_size // len(self._engine.data_parallel_ranks)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return transformers' sampler, with an order that follows from the seed and the epoch, as accelerate's."""
        sampler = super()._get_train_sampler(train_dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed  # whatever a rank has seeded
        if type(sampler) is RandomSampler:
            return SeedableRandomSampler(sampler.data_source, generator=torch.Generator(), data_seed=seed)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.generator = torch.Generator().manual_seed(seed)
        return sampler

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        is_logged = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if is_logged:
            # On the host, where to work with it needs no program.
            own = self.accelerator.sharded.shards.fetch([tr_loss])[0]
            tr_loss = self._engine.group.all_reduce_mean(own)
        self._log_save_evaluate(tr_loss, *args, **kwargs)
        if is_logged:
            self._empty_loss()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._tr_loss = self.accelerator.mean(self._tr_loss)
        return super()._finalize_training(*args, **kwargs)

    def _empty_loss(self) -> None:
        """Lay the sum of losses out as a step leaves it: otherwise the next step's program would be another one."""
        self._tr_loss.data = self._engine.to_device(torch.zeros(()))

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
        if is_lazy():
            kwargs.pop("fused", None)
        return optimizer_class, kwargs

    # ---- The loop, which is transformers'

    _train_epoch: Callable[..., None] = with_globals_replaced(
        method_of(_Theirs, "_run_epoch"), skip_first_batches=lambda loader, num_batches: loader, **_DEVICE
    )
    evaluation_loop = with_globals_replaced(method_of(_Theirs, "evaluation_loop"), **_DEVICE)
    _log_save_evaluate: Callable[..., None] = with_globals_replaced(
        method_of(_Theirs, "_maybe_log_save_evaluate"), nested_gather=lambda loss, mode: loss, **_DEVICE
    )
    _write_checkpoint: Callable[..., None] = with_globals_replaced(
        method_of(_Theirs, "_save_checkpoint"), is_torch_xla_available=lambda: False
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
