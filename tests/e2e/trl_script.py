"""Train with trl's trainers, as they are or on torchacc's engines; test_trl.py compares what the two print.

    trl_script.py MODE FOLDER CASE …

MODE is `plain`, `native` or `xla` (two processes), or `spmd` (two devices). The global batch is the same in each.
"""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

MODE, FOLDER, CASES = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
DEVICES = {"plain": 1, "native": 2, "xla": 2, "spmd": 2}[MODE]
GLOBAL_BATCH, STEPS = 4, 4
PLAIN_STEPS = {"optim": "sgd", "learning_rate": 0.05}
"""For DPO, where Adam's first steps multiply rounding."""

if MODE != "plain":
    from torchacc import Config, ConfigError
    from torchacc.integrations.hf import arguments_for, trainer_for

    SFTTrainer, DPOTrainer, RewardTrainer = map(trainer_for, (SFTTrainer, DPOTrainer, RewardTrainer))
    SFTConfig, DPOConfig, RewardConfig = map(arguments_for, (SFTConfig, DPOConfig, RewardConfig))


def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({sign: i for i, sign in enumerate([*alphabet, "<end>", "<pad>"])}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


SHAPE = {"vocab_size": 258, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "pad_token_id": 257}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 256, "eos_token_id": 256}


def gpt2(kind=GPT2LMHeadModel, seed=0, **changed):
    torch.manual_seed(seed)
    return kind(GPT2Config(**SHAPE, **DROPOUT, **changed))


def words(i):
    return " ".join(str(i * i % 97 + j) for j in range(2 + i % 5))


SENTENCES = [{"prompt": f"{i} {i + 1}", "completion": f" {words(i)}"} for i in range(10)]
PAIRS = [{"prompt": f"say {i}:", "chosen": f" {words(i)}", "rejected": f" {words(i + 3)[::-1]}"} for i in range(10)]


def make(kind, arguments, name, model, data, held_out=None, accumulation=1, config=(), options=(), **changed):
    given = {
        "output_dir": str(FOLDER / f"{MODE}-{name}"),
        "per_device_train_batch_size": GLOBAL_BATCH // accumulation // DEVICES,
        "per_device_eval_batch_size": 2 // DEVICES,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": 5e-3,
        "optim": "adamw_torch",
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": 64,
        "use_cpu": True,
        **changed,
    }
    if MODE != "plain":
        fsdp = {"size": DEVICES, "use_spmd": MODE == "spmd"}
        found = Config.from_dict({"backend": "native" if MODE == "native" else "xla", "dist": {"fsdp": fsdp}})
        for path, value in dict(config).items():
            section, field = path.split(".")
            setattr(getattr(found, section), field, value)
        options = {**dict(options), "torchacc_config": found}
    return kind(
        model=model,
        args=arguments(**given),
        train_dataset=Dataset.from_list(data),
        eval_dataset=None if held_out is None else Dataset.from_list(held_out),
        processing_class=tokenizer(),
        **dict(options),
    )


def trained(trainer):
    """Train and save; return what has been logged, by step, with what is left out that depends on the time."""
    trainer.train()
    trainer.save_model()
    return {"history": history(trainer)}


def history(trainer):
    ignored = ("runtime", "per_second", "epoch", "flos", "train_loss")
    entries = [
        {key: value for key, value in entry.items() if not any(word in key for word in ignored)}
        for entry in trainer.state.log_history
    ]
    return [entry for entry in entries if len(entry) > 1]


def sft(accumulation=2):
    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = make(
        SFTTrainer, SFTConfig, "sft", gpt2(), SENTENCES, SENTENCES[3:8], accumulation,
        max_steps=6, save_strategy="steps", save_steps=4, **evaluated,
    )  # fmt: skip
    return trained(trainer)


def sft_resumed():
    trainer = make(SFTTrainer, SFTConfig, "sft", gpt2(), SENTENCES, accumulation=2, max_steps=6)
    trainer.train(resume_from_checkpoint=str(FOLDER / "native-sft" / "checkpoint-4"))
    return {"history": history(trainer)}


def lora():
    return LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)


def sft_lora():
    return trained(make(SFTTrainer, SFTConfig, "sft_lora", gpt2(), SENTENCES[:8], options={"peft_config": lora()}))


def sft_recomputed():
    options = {"gradient_checkpointing": True, "label_smoothing_factor": 0.1}
    return trained(make(SFTTrainer, SFTConfig, "sft_recomputed", gpt2(), SENTENCES[:8], **options))


def dpo():
    options = {"ref_model": gpt2(seed=1)}
    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    return trained(
        make(DPOTrainer, DPOConfig, "dpo", gpt2(), PAIRS[:8], PAIRS[4:8], options=options, **evaluated, **PLAIN_STEPS)
    )


def dpo_from_folder():
    """Without a reference model: trl opens the folder that the model is from once more."""
    folder = FOLDER / "start"
    if MODE == "plain":
        gpt2().save_pretrained(folder)
    model = GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(1.5)
    return trained(make(DPOTrainer, DPOConfig, "dpo_from_folder", model, PAIRS[:8], accumulation=2, **PLAIN_STEPS))


def dpo_lora():
    return trained(
        make(DPOTrainer, DPOConfig, "dpo_lora", gpt2(), PAIRS[:8], options={"peft_config": lora()}, **PLAIN_STEPS)
    )


def dpo_adapters():
    """With adapters that were trained before: a copy of them is the reference."""
    from peft import get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(gpt2(), lora())
    return trained(make(DPOTrainer, DPOConfig, "dpo_adapters", model, PAIRS[:8], **PLAIN_STEPS))


def reward():
    options = {"center_rewards_coefficient": 0.1, "eval_strategy": "steps", "eval_steps": 2}
    model = gpt2(GPT2ForSequenceClassification, num_labels=1)
    return trained(make(RewardTrainer, RewardConfig, "reward", model, PAIRS[:8], PAIRS[4:8], **options, **PLAIN_STEPS))


def refused():
    """Return what is said to what cannot be right."""
    said = {}

    def of(name, act):
        try:
            act()
        except (ConfigError, ValueError) as error:
            said[name] = str(error)

    def build(name, **options):
        beside = {"ref_model": gpt2()}
        return lambda: make(DPOTrainer, DPOConfig, "refused", gpt2(), PAIRS[:8], options=beside, **options)

    of("uneven", lambda: build("uneven", held_out=PAIRS[:3])().evaluate())
    of("sorted", build("sorted", loss_type=["aot"]))
    of("precomputed", build("precomputed", precompute_ref_log_probs=True))
    of("synced", build("synced", sync_ref_model=True))
    if MODE == "spmd":
        of("pairs", lambda: build("pairs")().train())
    return said


for case in CASES:
    facts = globals()[case]()
    if os.environ.get("RANK", "0") == "0":
        print(f"FACTS {json.dumps({'case': case, **facts})}")
