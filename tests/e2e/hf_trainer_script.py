"""Train with transformers' Trainer, theirs or torchacc's; test_hf_trainer.py compares what the two print.

    hf_trainer_script.py MODE FOLDER CASE …

MODE is `plain`, `native` or `xla` (two processes), or `spmd` (four devices). The global batch is the same in each.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

MODE, FOLDER, CASES = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
DEVICES = {"plain": 1, "native": 2, "xla": 2, "spmd": 4}[MODE]
LENGTH, GLOBAL_BATCH, STEPS = 32, 8, 7
TEXT = Path(os.__file__).read_bytes()

if MODE == "plain":
    from transformers import Trainer, TrainingArguments
else:
    from torchacc import Config
    from torchacc.integrations.hf import Trainer, TrainingArguments


def rows(start, count):
    """Return blocks of text as bytes, whose labels stop at different places."""
    blocks = [list(TEXT[LENGTH * i : LENGTH * (i + 1)]) for i in range(start, start + count)]
    cuts = [LENGTH - 3 * (i % 5) for i in range(count)]
    return [
        {"input_ids": block, "labels": block[:cut] + [-100] * (LENGTH - cut)}
        for block, cut in zip(blocks, cuts, strict=True)
    ]


TRAIN, HELD_OUT = rows(0, 5 * GLOBAL_BATCH), rows(100, 13)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TRAIN)


class KillAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def gpt2(dropout=0.0):
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    shares = {"resid_pdrop": 0.0, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**shape, **shares, bos_token_id=0, eos_token_id=0))


def mixtral():
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    balance = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    return MixtralForCausalLM(MixtralConfig(**shape, **heads, **balance))


def with_adapters():
    options = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": ["ln_f"]}
    model = get_peft_model(gpt2(), LoraConfig(r=4, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def bert(kind=BertForSequenceClassification):
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return kind(BertConfig(**shape, **dropout, intermediate_size=32, num_labels=3))


def own_loss(outputs, labels, num_items_in_batch):
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def labelled(count):
    return [{"input_ids": row["input_ids"], "labels": i % 3} for i, row in enumerate(TRAIN[:count])]


def accuracy(prediction):
    labels, guesses = prediction.label_ids[:, 1:], prediction.predictions[:, :-1].argmax(-1)
    return {"rows": len(labels), "accuracy": float((guesses == labels)[labels != -100].mean())}


def make(
    name,
    model,
    train=TRAIN,
    callbacks=(),
    accumulation=2,
    options=(),
    held_out=HELD_OUT,
    kind=Trainer,
    axes=None,
    **changed,
):
    shares_data = axes is not None and "ep" not in axes
    parts = 1 if shares_data else DEVICES
    arguments = {
        "output_dir": str(FOLDER / name),
        "per_device_train_batch_size": GLOBAL_BATCH // accumulation // parts,
        "per_device_eval_batch_size": 4 // parts,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": 8e-3,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        **changed,
    }
    config = {}
    if MODE != "plain":
        config["torchacc_config"] = Config.from_dict(
            {
                "backend": "native" if MODE == "native" else "xla",
                "dist": axes or {"fsdp": {"size": DEVICES, "use_spmd": MODE == "spmd"}},
            }
        )
    return kind(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=train,
        eval_dataset=held_out,
        callbacks=list(callbacks),
        **dict(options),
        **config,
    )


def history(trainer):
    """Return the logged losses, gradient norms and metrics, by step."""
    wanted = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_rows", "eval_accuracy")
    entries = [{key: entry[key] for key in ("step", *wanted) if key in entry} for entry in trainer.state.log_history]
    return [entry for entry in entries if len(entry) > 1]


def whole():
    trainer = make("whole", gpt2(), options={"compute_metrics": accuracy}, eval_strategy="steps", eval_steps=3)
    trainer.train()
    predictions = trainer.predict(HELD_OUT)
    trainer.save_model()
    return {
        "history": history(trainer),
        "predictions": np.asarray(predictions.predictions).sum(-1).round(3).tolist(),
        "flos": trainer.state.total_flos,
    }


AXES = {
    "pp": {"size": DEVICES, "schedule": "1f1b", "num_microbatches": 2},
    "tp": {"size": DEVICES},
    "sp": {"size": DEVICES},
}


def axes():
    """Train over each axis by itself; over experts a model that has some, with recompute and a fused optimizer."""
    evaluated = {"options": {"compute_metrics": accuracy}, "eval_strategy": "steps", "eval_steps": 3}
    facts = {}
    for axis, options in AXES.items() if MODE != "plain" else ():
        saved = {"save_strategy": "steps", "save_steps": 3} if axis == "pp" else {}
        trainer = make(f"over-{axis}", gpt2(), axes={axis: options}, **evaluated, **saved)
        trainer.train()
        facts[axis] = history(trainer)
    if MODE != "plain":
        facts["resumed"] = again("over-others", gpt2, "over-pp/checkpoint-3", axes={"tp": AXES["tp"]})
    trainer = make("over-ep", mixtral(), axes={"ep": {"size": DEVICES}}, gradient_checkpointing=True, max_steps=3)
    trainer.train()
    return {**facts, "ep": history(trainer)}


def interrupted():
    trainer = make("run", gpt2(), callbacks=[KillAfter(5)], save_strategy="steps", save_steps=1, save_total_limit=2)
    trainer.train()


def resumed(folder="run"):
    trainer = make(folder, gpt2(), save_strategy="steps", save_steps=3, save_total_limit=2)
    trainer.train(resume_from_checkpoint=True)
    return {"history": history(trainer), "kept": sorted(path.name for path in (FOLDER / folder).glob("checkpoint-*"))}


def resumed_otherwise():
    facts = {"history": again("otherwise", gpt2, "run/checkpoint-6", accumulation=1)}
    try:
        again("otherwise", gpt2, "run/checkpoint-6", gradient_accumulation_steps=4)
    except ValueError as error:
        facts["other_batch"] = str(error)
    return facts


def again(name, build, checkpoint, **changed):
    """Return what a run logs that goes on from a checkpoint."""
    trainer = make(name, build(), **changed)
    trainer.train(resume_from_checkpoint=str(FOLDER / checkpoint))
    return history(trainer)


def adapters():
    name = f"adapters-{MODE}"
    evaluated = {"eval_strategy": "steps", "eval_steps": 4}  # what it leaves whole, a checkpoint has rank 0 shard again
    trainer = make(name, with_adapters(), save_strategy="steps", save_steps=4, **evaluated)
    trainer.train()
    trainer.save_model()
    facts = {"history": history(trainer)}
    if MODE != "plain":
        facts["resumed"] = again(f"{name}-again", with_adapters, "adapters-native/checkpoint-4", **evaluated)
    return facts


def dropout():
    name = f"dropout-{MODE}"
    trainer = make(name, gpt2(dropout=0.3), save_strategy="steps", save_steps=4)
    trainer.train()
    return {"history": history(trainer), "resumed": again(f"{name}-again", lambda: gpt2(0.3), f"{name}/checkpoint-4")}


def classification():
    trainer = make("classes", bert(), labelled(40), held_out=labelled(12), max_steps=3)
    trainer.train()
    facts = {"history": history(trainer), "even": trainer.evaluate()["eval_loss"]}
    if MODE == "plain":
        return facts
    unknown = {"options": {"compute_loss_func": mean_of_row_means}, "max_steps": 3}
    trainer = make("unknown", gpt2(), **unknown)
    facts["uneven"] = refusal(trainer.train), trainer.state.global_step
    trainer = make("unknown", gpt2(), held_out=None, **unknown)
    facts["labels_differ"] = refusal(trainer.train), trainer.state.global_step
    return facts


def mean_of_row_means(outputs, labels, num_items_in_batch):
    logits, targets = outputs["logits"][:, :-1].transpose(1, 2), labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return (losses.sum(1) / (targets != -100).sum(1)).mean()


def mask_at_random(rows):
    """Ask for some places of each row: which, depends on the row, and how many, too."""
    batch = torch.tensor([row["input_ids"] for row in rows])
    draws = [torch.rand(LENGTH, generator=torch.Generator().manual_seed(sum(row["input_ids"]))) for row in rows]
    is_asked = torch.stack(draws) < 0.1
    return {"input_ids": batch.masked_fill(is_asked, 0), "labels": batch.masked_fill(~is_asked, -100)}


def t5():
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))


def uneven(name, model, data, num_rows=19, **changed):
    """Train on rows, and evaluate on rows, that do not divide by those of a step."""
    trainer = make(
        name, model, data[:num_rows], held_out=data[19:32],
        num_train_epochs=2, max_steps=-1, optim="sgd", learning_rate=0.3, **changed,
    )  # fmt: skip
    trainer.train()
    before, after = trainer.evaluate()["eval_loss"], trainer.predict(data[19:32])
    trainer.save_model()
    rows = np.asarray(after.predictions[0] if isinstance(after.predictions, tuple) else after.predictions)
    return {"history": history(trainer), "eval_loss": before, "rows": rows.sum(tuple(range(1, rows.ndim))).tolist()}


def masked_lm():
    return uneven(f"{MODE}-masked_lm", bert(BertForMaskedLM), TRAIN, options={"data_collator": mask_at_random})


def classes():
    return uneven(f"{MODE}-classes", bert(), labelled(32))


def numbers():
    data = [{**row, "labels": [0.1 * (i % 7), 0.5, 1.0]} for i, row in enumerate(labelled(32))]
    return uneven(f"{MODE}-numbers", bert(), data, num_rows=16)


def padded():
    return uneven(f"{MODE}-padded", gpt2(), TRAIN)


def sequences():
    return uneven(f"{MODE}-sequences", t5(), TRAIN)


def smoothed_tokens():
    return uneven(f"{MODE}-smoothed_tokens", gpt2(), TRAIN, label_smoothing_factor=0.1)


def smoothed_sequences():
    data = [{**row, "decoder_input_ids": [0, *row["input_ids"][:-1]]} for row in TRAIN]
    return uneven(f"{MODE}-smoothed_sequences", t5(), data, label_smoothing_factor=0.1)


def refusal(act):
    try:
        act()
    except ValueError as error:
        return str(error)


def loss_function():
    trainer = make("function", gpt2(), options={"compute_loss_func": own_loss}, max_steps=3)
    trainer.train()
    trainer.evaluate()
    return {"history": history(trainer)}


class OwnLosses(Trainer):
    """Computes the loss by itself, from what the model returns, and remembers that."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        self.returned = [*getattr(self, "returned", []), outputs.loss.item()]
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def overridden():
    trainer = make("overridden", gpt2(), kind=OwnLosses, max_steps=2)
    trainer.train()
    trainer.evaluate(HELD_OUT[:8])
    found = [None] * DEVICES
    torch.distributed.all_gather_object(found, trainer.returned)
    return {"returned": found}


def streamed():
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    trainer = make("stream", model, Stream(), options={"optimizers": (optimizer, None)}, max_steps=3)
    trainer.train()
    return {"history": history(trainer)}


def by_length():
    asked = {"train_sampling_strategy": "group_by_length", "average_tokens_across_devices": False}
    trainer = make("length", gpt2(), max_steps=2, **asked)
    trainer.train()
    return {"history": history(trainer)}


def best():
    trainer = make(
        "best",
        gpt2(),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
        learning_rate=0.3,
        bf16=True,
        gradient_checkpointing=True,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
    )
    trainer.train()
    return {
        "steps": trainer.state.global_step,
        "best": trainer.state.best_metric,
        "eval_losses": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "after": trainer.evaluate()["eval_loss"],
        "bf16": MODE != "plain" and trainer.accelerator.sharded.plan.compute_dtype,
        "recomputed": MODE != "plain" and len(trainer.accelerator.sharded.plan.recomputed),
    }


for case in CASES:
    name, _, argument = case.partition("=")
    facts = globals()[name](*filter(None, [argument]))
    if os.environ.get("RANK", "0") == "0":
        print(f"FACTS {json.dumps({'case': name, **facts})}")
