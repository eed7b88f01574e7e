"""Stages of a training file, one after the other in one process, or under torchrun.

    python train_worker.py FILE STAGE...

`STAGE@9:11` sends signal 9 to this process before the step after 11 others. `plain:STAGE` trains that model by a bare
loop of PyTorch instead; `open:STAGE` evaluates with transformers alone what a stage has left. Rank 0 prints what it
finds as JSON.
"""

import itertools
import json
import os
import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchacc
from torchacc.env import read_job
from torchacc.train.file import TrainFile
from torchacc.train.metric_sinks import read_metrics
from torchacc.train.models import model_config
from torchacc.train.optim import lr_factor
from torchacc.train.run_folder import is_finished
from torchacc.train.stage import StageRequest, StageRun, resolve_stage
from torchacc.train.stage_trainer import StageTrainer
from torchacc.train.text import load_text

JOB = read_job()


def main() -> None:
    file = TrainFile.read(sys.argv[1])
    found = {}
    for asked in sys.argv[2:]:
        action, _, rest = asked.rpartition(":") if "@" not in asked else ("", "", asked)
        name, _, ending = rest.partition("@")
        run = resolve_stage(file, StageRequest(stage=name), JOB if JOB.launched else None)
        found[asked] = {"plain": plain, "open": opened}[action](run) if action else trained(run, ending)
    if JOB.rank == 0:
        sys.stdout.write("\n" + json.dumps(found) + "\n")


def trained(run: StageRun, ending: str) -> dict:
    graphs = torchacc.compile_report().graphs
    own, code, made = StageTrainer._take_step, None, []
    signal, last = map(int, ending.split(":")) if ending else (0, None)

    def take_step(self, window):
        if self.step == last:
            os.kill(os.getpid(), signal)
        made.append(self.step + 1)
        return own(self, window)

    StageTrainer._take_step = take_step
    try:
        trainer = StageTrainer(run)
        trainer.fit()
    except SystemExit as error:
        code = error.code
    finally:
        StageTrainer._take_step = own
    rows = read_metrics(run.folder / "metrics.jsonl")
    return {
        "losses": [row["loss"] for row in rows if "loss" in row],
        "norms": [row["grad_norm"] for row in rows if "grad_norm" in row],
        "rates": [row["lr"] for row in rows if "lr" in row],
        "evaluations": {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row},
        "compiled": torchacc.compile_report().graphs - graphs,
        "finished": is_finished(run.folder),
        "code": code,
        "made": made,
        "own_losses": code is not None or trainer.losses == [row["loss"] for row in rows if "loss" in row],
    }


def plain(run: StageRun) -> dict:
    """Train on whole batches of the first epoch, with the loss written out."""
    text = load_text(run.data, seed=run.training.seed)
    torch.manual_seed(run.training.seed)
    model = AutoModelForCausalLM.from_config(model_config(run.model, text.tokenizer))
    groups = [[p for p in model.parameters() if (p.dim() > 1) == decayed] for decayed in (True, False)]
    options = dict(run.optimizer.options)
    decay = options.pop("weight_decay")
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": decay}, {"params": groups[1], "weight_decay": 0.0}], **options
    )
    generator = torch.Generator().manual_seed(run.training.seed)
    loader = DataLoader(text.train, run.examples_per_step, shuffle=True, drop_last=True, generator=generator)
    losses, norms, rates, evaluations = [], [], [], {}
    for step, batch in enumerate(itertools.islice(loader, run.training.max_steps)):
        rate = lr_factor(step, run.scheduler, run.training.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = run.optimizer.lr * rate
        optimizer.zero_grad()
        total, count = sum_of_losses(model, batch)
        loss = total / count + added_to_it(model, batch, run.training.gradient_accumulation_steps)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), run.training.max_grad_norm)))
        optimizer.step()
        losses.append(float(loss))
        rates.append(run.optimizer.lr * rate)
        if (step + 1) % run.training.eval_every_steps == 0:
            evaluations[step + 1] = validation_loss(model, text.validation)
    return {"losses": losses, "norms": norms, "rates": rates, "evaluations": evaluations, "num_rows": len(text.train)}


def added_to_it(model: torch.nn.Module, batch: dict, num_micro_batches: int) -> torch.Tensor | float:
    """Return the loss that balances experts, the mean of those of the micro-batches of all devices."""
    if not getattr(model.config, "output_router_logits", False):
        return 0.0
    parts = batch["input_ids"].chunk(num_micro_batches)
    return model.config.router_aux_loss_coef * sum(model(part).aux_loss for part in parts) / len(parts)


def opened(run: StageRun) -> dict:
    model = AutoModelForCausalLM.from_pretrained(run.final).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    text = load_text(run.data, seed=run.training.seed)
    return {
        "loss": validation_loss(model, text.validation),
        "text": tokenizer.decode(tokenizer("the quick brown fox")["input_ids"]),
        "vocab_size": model.config.vocab_size,
        "num_tokens": len(tokenizer),
        "generates_with_cache": model.config.use_cache and model.generation_config.use_cache is not False,
    }


@torch.no_grad()
def validation_loss(model: torch.nn.Module, validation: Dataset) -> float:
    sums = [sum_of_losses(model, example) for example in DataLoader(validation, 1)]
    return float(sum(total for total, _ in sums) / sum(count for _, count in sums))


def sum_of_losses(model: torch.nn.Module, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of a batch's losses, and how many targets it has."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits, targets = model(**inputs, use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
    total = cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


if __name__ == "__main__":
    main()
