"""One process of `trainer_overhead.py`: a loop that is not ours, which stops after each block of steps."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from _trainer_cases import GLOBAL_BATCH, LEARNING_RATE, LENGTH, LOG_EVERY_STEPS, MODEL, TEXT, Case
from _training import endless
from _worker import answer, keep_stdout_for_answers, num_compiles, wait_for
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

import torchacc
from torchacc.parallel.sequence_split import IGNORE_INDEX
from torchacc.train import train_production_mode
from torchacc.train.config import TextConfig
from torchacc.train.models import model_config
from torchacc.train.text import load_text


def run(case: Case, folder: Path, total_steps: int) -> None:
    """Carry a case out, and answer each line on stdin, `{"steps": n}`, with the timing of that many steps.

    Args:
        case: What to run.
        folder: For the text, which cases share, and for what the loops write.
        total_steps: Steps that are going to be asked for; the loop is to take more, and ends when stdin does.
    """
    Pacer()
    RUNNERS[case.loop](case, folder, total_steps + 1)


class Pacer:
    """Holds a loop at an optimizer's step until it is asked for more steps, and times those that it was asked for."""

    def __init__(self) -> None:
        """Answer that the process is there, and wait for the first question."""
        self._answers = keep_stdout_for_answers()
        self._losses: list[torch.Tensor] | None = None
        register_module_forward_hook(self._see_loss)
        answer(self._answers, setup_secs=0.0)
        self._wait()

    def _see_loss(self, module: object, args: object, output: Any) -> None:
        loss = getattr(output, "loss", None)
        if loss is None or loss.is_meta:  # a trainer runs a model without values before it starts
            return
        if self._losses is None:
            self._losses = []
            # Only now, after torchacc's own hooks: those end the step's program.
            register_optimizer_step_post_hook(self._end_step)
        self._losses.append(loss.detach())

    def _end_step(self, optimizer: object, args: object, kwargs: object) -> None:
        self._left -= 1
        if self._left:
            return
        assert self._losses is not None
        wait_for(self._losses[-1])
        secs, cpu_secs = time.perf_counter() - self._started, time.process_time() - self._cpu
        timing = {"secs": secs, "cpu_secs": cpu_secs, "idle_cpu_secs": self._idle_cpu_secs}
        losses = [loss.item() for loss in self._losses]
        self._losses.clear()
        answer(self._answers, losses=losses, compiles=num_compiles(), **timing)
        self._wait()

    def _wait(self) -> None:
        cpu = time.process_time()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # in the middle of a loop that would go on
        self._idle_cpu_secs = time.process_time() - cpu
        self._left = json.loads(line)["steps"]
        self._started, self._cpu = time.perf_counter(), time.process_time()


def _text(folder: Path) -> dict[str, Any]:
    return {
        "dataset": "json",
        "files": str(folder / TEXT),
        "block_size": LENGTH,
        "vocab_size": 300,
        "packing": "concat",
        "shuffle": False,
        "validation_share": 0.0,
        "cache_dir": str(folder / "cache"),
    }


def _staged(case: Case, folder: Path, total_steps: int) -> None:
    stage = {
        "data": _text(folder),
        "optimizer": {"name": "adamw", "lr": LEARNING_RATE, "weight_decay": 0.0},
        "scheduler": {"name": "constant"},
        "training": {
            "batch_size": GLOBAL_BATCH // case.devices,
            "max_steps": total_steps,
            "log_every_steps": case.log_every_steps,
            "save_every_steps": case.save_every_steps,
        },
        "distributed": {"devices": case.devices, "engine": case.engine},
    }
    path = folder / f"{case.name}.yaml"
    content = {
        "output_dir": str(folder / case.name),
        "training_stages": {"only": stage},
        "model_config_only": MODEL,
        "logging": {"tensorboard": case.tensorboard},
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    train_production_mode("only", config=path)


def _bare(case: Case, folder: Path, total_steps: int) -> None:
    model, blocks = _model_and_blocks(folder)
    batches: DataLoader[Any] = DataLoader(blocks, GLOBAL_BATCH // case.devices)
    model, loader = torchacc.accelerate(model, batches, _config(case))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step, batch in enumerate(endless(loader)):
        optimizer.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        if step % LOG_EVERY_STEPS == 0:
            sys.stderr.write(f"step {step}: loss {loss.item():.4f}\n")


def _hf(case: Case, folder: Path, total_steps: int) -> None:
    from torchacc.integrations.hf import Trainer, TrainingArguments

    model, blocks = _model_and_blocks(folder)
    arguments = TrainingArguments(
        output_dir=str(folder / case.name),
        max_steps=total_steps,
        per_device_train_batch_size=GLOBAL_BATCH // case.devices,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        logging_steps=LOG_EVERY_STEPS,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to="none",
    )
    examples = [{**block, "labels": _without_first(block["labels"])} for block in blocks]
    Trainer(model=model, args=arguments, train_dataset=examples, torchacc_config=_config(case)).train()


def _without_first(labels: torch.Tensor) -> torch.Tensor:
    """Mark the first label as none: it has no prediction, and transformers would divide the loss by it, too."""
    return torch.cat([torch.full_like(labels[:1], IGNORE_INDEX), labels[1:]])


RUNNERS: dict[str, Callable[[Case, Path, int], None]] = {"staged": _staged, "bare": _bare, "hf": _hf}


def _model_and_blocks(folder: Path) -> tuple[Any, Any]:
    """Return the model and the examples that the stage of the training file has."""
    from transformers import AutoModelForCausalLM

    text = load_text(TextConfig(**_text(folder)), seed=0)
    config = model_config(MODEL, text.tokenizer)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config), text.train


def _config(case: Case) -> torchacc.Config:
    fsdp = {"size": case.devices, "use_spmd": case.engine == "xla"}
    return torchacc.Config.from_dict({"backend": case.engine, "dist": {"fsdp": fsdp}})
