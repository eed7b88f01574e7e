"""Execute one stage: build it, train it, evaluate it, save it, and go on where it was interrupted."""

import contextlib
import copy
import math
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchacc import checkpoint
from torchacc.api import accelerate, accumulate, describe, shard_loader
from torchacc.data import AsyncLoader
from torchacc.engines.scaler import GradScaler
from torchacc.engines.sharded_model import sharded_model
from torchacc.engines.uncaught_errors import follows_another
from torchacc.errors import CheckpointError, ConfigError, TrainingError
from torchacc.logging import get_logger
from torchacc.train.batches import ElasticPosition, Window, evaluation_loader, training_loader, windows
from torchacc.train.checks import tokenizer_of
from torchacc.train.config import TextConfig, TrainingConfig
from torchacc.train.evaluation import EarlyStopping, evaluate
from torchacc.train.expert_loads import ExpertLoads
from torchacc.train.flops import flops_per_token
from torchacc.train.hub import local_folder
from torchacc.train.metric_sinks import read_metrics
from torchacc.train.metrics import RunLog
from torchacc.train.models import build_model, loss_of, model_config, scaling_added_losses
from torchacc.train.optim import make_optimizer, make_scheduler
from torchacc.train.run_folder import METRICS, drop_replaced, mark_finished
from torchacc.train.stage import StageRun
from torchacc.train.text import check_model, load_text

_log = get_logger(__name__)

_SKIPPED_STEPS = 25
"""Steps in a row that a scaler may skip: it starts at 2**16 and halves at each, so that more will not help."""


class StageTrainer:
    """One stage on this job's devices.

    Attributes:
        run: What was asked for.
        tokenizer: That of the text.
        model: The model, sharded.
        optimizer: Its optimizer.
        scheduler: The learning rate's, stepped after each optimizer step.
        loader: The training set's batches.
        total_steps: Optimizer steps of the stage.
        step: How many of them are made, those of an interrupted run included.
        evaluations: The validation loss by the step before it, those of an interrupted run included.
    """

    def __init__(self, run: StageRun) -> None:
        """Load the text, build the model and shard it. Collective: every process.

        Raises:
            ConfigError: The stage contradicts itself.
            DataError: The text cannot be had.
        """
        self.run = run
        self._weights = None if run.weights is None else local_folder(str(run.weights))
        text = load_text(_text_config(run, self._weights), seed=run.training.seed)
        self.tokenizer = text.tokenizer
        config = model_config(run.model, text.tokenizer)
        _set_seeds(run.training.seed)
        model = build_model(config, initialised=self._weights is None)
        _check_model(run.data, model.config)
        loader = training_loader(
            text.train,
            batch_size=run.training.batch_size,
            examples_per_step=run.examples_per_step,
            shuffle=run.data.shuffle,
            seed=run.training.seed,
        )
        self.model, self.loader = accelerate(model, loader, run.config)
        self._sharded = sharded_model(self.model)
        self._seed()
        self._evaluation = self._shard_evaluation(text.validation)
        self.total_steps = _total_steps(run.training, self.loader)
        self.optimizer = make_optimizer(self.model, run.optimizer.name, run.optimizer.options)
        self.scheduler = make_scheduler(self.optimizer, run.scheduler, self.total_steps)
        self._scaler = GradScaler(self.model)
        self._stopping = EarlyStopping(run.training.early_stopping)
        self.step = 0
        self.evaluations: dict[int, float] = {}

    @property
    def losses(self) -> list[float]:
        """The loss of each step's batch before the step, from the stage's first step on; from `metrics.jsonl`."""
        return [row["loss"] for row in read_metrics(self.run.folder / METRICS) if "loss" in row]

    def fit(self) -> None:
        """Train to the end of the stage, and leave the finished model in its folder. Collective: every process.

        Raises:
            CheckpointError: A checkpoint does not fit, none is complete, or one cannot be written.
            SystemExit: After SIGTERM, once the run is saved.
            TrainingError: The loss is not finite any more; the checkpoints from before are kept.
        """
        training = self.run.training
        with checkpoint.CheckpointManager(
            self.run.checkpoints,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=ElasticPosition(self.loader),
            tokenizer=self.tokenizer,
            every_steps=training.save_every_steps,
            keep=training.keep_checkpoints,
            async_save=training.async_save,
        ) as manager:
            self._restore(manager)
            log = self._open_log()
            if self._is_master:
                drop_replaced(self.run)
            outcome = "failed"
            try:
                self._train(manager, log)
                manager.wait()
                checkpoint.save(self.run.final, model=self.model, tokenizer=self.tokenizer)
                outcome = "finished"
            except SystemExit:
                outcome = "stopped: SIGTERM"
                raise
            except BaseException as error:
                said = "another rank has ended" if follows_another(error) else str(error) or type(error).__name__
                outcome = f"failed: {said}"
                raise
            finally:
                finished = outcome == "finished"
                log.close(outcome, {"checkpoint": str(self.run.final if finished else self.run.checkpoints)})
        if self._is_master:
            mark_finished(self.run.folder, {"steps": self.step, "validation_loss": self.evaluations.get(self.step)})

    def evaluate(self) -> float:
        """Return the mean loss over the targets of the validation set. Collective: every process.

        Raises:
            ConfigError: The stage has no validation set.
        """
        if self._evaluation is None:
            raise ConfigError("this stage has no validation set: give it data.validation, or a data.validation_share")
        return evaluate(self.model, self._evaluation, max_batches=self.run.training.eval_steps)

    def _train(self, manager: checkpoint.CheckpointManager, log: RunLog) -> None:
        stream = windows(self.loader, self.run.training.gradient_accumulation_steps)
        is_saved = self.step > 0
        self.model.train()
        while self.step < self.total_steps and not self._stopping.is_due:
            asked = time.perf_counter()
            window = next(stream)
            waited = time.perf_counter() - asked
            lr = self.optimizer.param_groups[0]["lr"]
            loss, grad_norm = self._take_step(window)
            self.step += 1
            log.step(self.step, loss=loss, grad_norm=grad_norm, lr=lr, data_wait_secs=waited)
            if self._is_due(self.run.training.eval_every_steps):
                self._evaluate(log)
            # After the evaluation, whose result is to be in the checkpoint.
            with log.aside() if self._is_due(self.run.training.save_every_steps) else contextlib.nullcontext():
                self._check_finite(log)
                is_saved = manager.save_if_due(self.step, self._extra())
        if self.step not in self.evaluations and self._evaluation is not None:
            self._evaluate(log)
            is_saved = False
        if not is_saved:
            manager.save(self.step, self._extra())

    def _take_step(self, window: Window) -> tuple[torch.Tensor, torch.Tensor]:
        """Make one optimizer step.

        Returns:
            The mean loss over the targets of all devices and micro-batches, with the mean of what the model adds to
            each, and the norm of its gradient: tensors without dimensions, which the device may still be computing.
        """
        num_targets = self._sharded.engine.to_device(self._mean_over_processes(window.num_targets))
        self.optimizer.zero_grad()
        losses = []
        with scaling_added_losses(self.model, 1 / len(window.batches)):
            for index, batch in enumerate(window.batches):
                is_last = index == len(window.batches) - 1
                with contextlib.nullcontext() if is_last else accumulate(self.model):
                    loss = loss_of(self.model, batch, num_targets)
                    losses.append(loss.detach())
                    self._scaler.scale(loss).backward()
        self._scaler.unscale_(self.optimizer)
        grad_norm = self.model.clip_grad_norm_(self.run.training.max_grad_norm or float("inf"))
        total = sum(losses[1:], losses[0])  # before the step, which ends a program under XLA
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.scheduler.step()
        return total, grad_norm

    def _mean_over_processes(self, num_targets: int) -> torch.Tensor:
        """Return by what each process divides its sum of losses.

        A loss that a model returns, and its gradient, are means over the processes. The mean of such sums over the mean
        of the targets is the mean over all targets.
        """
        mean = self._sharded.engine.group.all_reduce_mean(torch.tensor(num_targets, dtype=torch.float64))
        return mean.clamp(min=1.0).float()

    def _is_due(self, every_steps: int | None) -> bool:
        return every_steps is not None and self.step % every_steps == 0

    def _evaluate(self, log: RunLog) -> None:
        if self._evaluation is None:
            return
        with log.aside():
            self._check_finite(log)
            loss = self.evaluations[self.step] = self.evaluate()
        self._stopping.see(loss)
        log.evaluated(self.step, loss)
        if not math.isfinite(loss):
            raise self._diverged(f"the validation loss is {loss} after step {self.step}")
        if self._stopping.is_due:
            log.event("stops early: the validation loss no longer falls")

    def _check_finite(self, log: RunLog) -> None:
        """Stop a run whose weights have become useless, as far as its log knows, before it is saved or evaluated."""
        if log.num_not_finite > (_SKIPPED_STEPS if self._scaler.is_enabled() else 0):
            raise self._diverged(
                f"from step {self.step - log.num_not_finite + 1} on, the loss or its gradient is not finite"
            )

    def _diverged(self, what: str) -> TrainingError:
        return TrainingError(
            f"{what}: the stage has not finished, and nothing was saved since. Lower optimizer.lr, raise "
            f"scheduler.warmup_steps, or look into the text, and pass --overwrite. What was saved before is kept in "
            f"{self.run.checkpoints}: with another output_dir, training.resume goes on from a checkpoint of it"
        )

    def _extra(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "examples_per_step": self.run.examples_per_step,
            "scaler": self._scaler.state_dict(),
            "stopping": self._stopping.state_dict(),
            "evaluations": self.evaluations,
        }

    def _restore(self, manager: checkpoint.CheckpointManager) -> None:
        """Go on from this run's newest checkpoint, else from the one that was named, else from the first weights."""
        restored = manager.restore()
        if restored is not None:
            self._take_up(restored.extra)
        elif self.run.resume_from is not None:
            extra = checkpoint.load(
                self.run.resume_from,
                model=self.model,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                loader=ElasticPosition(self.loader),
            )
            self._take_up(extra)
        elif self._weights is not None:
            checkpoint.load(self._weights, model=self.model)
            self._seed()  # a checkpoint has the random numbers that its own run was at

    def _take_up(self, extra: Any) -> None:
        if not isinstance(extra, Mapping) or not self._extra().keys() <= extra.keys():
            raise CheckpointError(
                f"training.resume = {self.run.training.resume!r}: no stage has written it, so that its step is not "
                "known: to start from its weights alone, write init_from"
            )
        before, now = extra["examples_per_step"], self.run.examples_per_step
        if before != now and self.run.training.max_steps is None:
            raise ConfigError(
                f"training.num_epochs = {self.run.training.num_epochs}: the interrupted run had {before} examples in a "
                f"step, and this one has {now}, so that its steps and epochs would not agree: choose devices, "
                f"batch_size and gradient_accumulation_steps whose product is {before}"
            )
        if before != now and self._is_master:
            _log.warning(
                "the run goes on with %d examples in a step, where it had %d; steps are counted on. To train on as "
                "before, choose devices, batch_size and gradient_accumulation_steps whose product is %d",
                now,
                before,
                before,
            )
        self.step = extra["step"]
        self.evaluations = dict(extra["evaluations"])
        self._stopping.load_state_dict(extra["stopping"])
        if extra["scaler"]:
            self._scaler.load_state_dict(extra["scaler"])

    def _shard_evaluation(self, validation: Any) -> AsyncLoader | None:
        if validation is None:
            return None
        data_parallel_size = self._sharded.engine.mesh.data_parallel_size
        completed = evaluation_loader(
            validation, batch_size=self.run.training.batch_size, data_parallel_size=data_parallel_size
        )
        return shard_loader(completed, self.model)

    def _seed(self) -> None:
        """Seed every generator from the stage's seed."""
        _set_seeds(self.run.training.seed)
        self._sharded.engine.seed(self.run.training.seed)

    @property
    def _is_master(self) -> bool:
        return self._sharded.engine.job.rank == 0

    def _open_log(self) -> RunLog:
        sharding = describe(self.model)
        facts = {
            "stage": self.run.stage,
            "model": self.run.model_name,
            "parameters": f"{sharding.num_parameters:,}, {sharding.num_parameters_per_device:,} on each device",
            "compute": sharding.compute_dtype,
            "configuration": self.run.identity(),
        }
        return RunLog(
            self.run.folder,
            facts,
            total_steps=self.total_steps,
            tokens_per_step=self.run.tokens_per_step,
            log_every_steps=self.run.training.log_every_steps,
            flops_per_token=flops_per_token(self.model, self.run.data.block_size),
            logging=self.run.logging,
            wandb=self.run.wandb,
            is_master=self._is_master,
            resumed_at=self.step,
            expert_loads=ExpertLoads(self.model),
        )


def _set_seeds(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _text_config(run: StageRun, weights: Path | None) -> TextConfig:
    """Return the text's section, with the tokenizer of the weights where it names none."""
    tokenizer = tokenizer_of(weights)
    if run.data.tokenizer is not None or tokenizer is None:
        return run.data
    text = copy.deepcopy(run.data)
    text.tokenizer = tokenizer
    return text


def _check_model(text: TextConfig, config: Any) -> None:
    as_run = copy.copy(config)
    as_run.use_cache = False
    check_model(text, as_run)


def _total_steps(training: TrainingConfig, loader: AsyncLoader) -> int:
    if training.max_steps is not None:
        return training.max_steps
    return (training.num_epochs or 1) * len(loader) // training.gradient_accumulation_steps
