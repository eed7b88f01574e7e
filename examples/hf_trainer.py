"""Train GPT-2 fully sharded with the Hugging Face Trainer: one import and one argument differ from the ordinary script.

One process that drives four XLA devices:

    python examples/hf_trainer.py

Two processes with PyTorch's own FSDP, on GPUs where there are any:

    torchrun --standalone --nproc_per_node=2 examples/hf_trainer.py --engine native

The model is a small GPT-2 and the text is Python's standard library; it takes about a minute on two cores. Interrupt it
and add --resume, in the same way or in the other one: it goes on where it was.

Needs `pip install 'torchacc[hf,examples]'`.
"""

import argparse

from corpus import blocks_of, load_corpus
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator

import torchacc
from torchacc.integrations.hf import Trainer, TrainingArguments

GLOBAL_BATCH = 16  # sequences in a step, whatever number of devices shares them


def main() -> None:
    """Train, evaluate, and save what from_pretrained() opens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=["xla", "native"], default="xla")
    parser.add_argument("--files", type=int, help="of the standard library, to read at most (default: all)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--context", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--out", default="runs/hf")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    processes = torchacc.dist.world_size()
    config = torchacc.Config()
    config.backend = options.engine
    config.dist.fsdp.use_spmd = options.engine == "xla" and processes == 1
    config.dist.fsdp.size = devices = 4 if config.dist.fsdp.use_spmd else processes

    corpus = load_corpus("stdlib", "small", options.files)
    shape = {"n_positions": options.context, "n_embd": 128, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(corpus.tokenizer), bos_token_id=0, eos_token_id=0, **shape))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.out,
            max_steps=options.steps,
            per_device_train_batch_size=GLOBAL_BATCH // devices,
            per_device_eval_batch_size=GLOBAL_BATCH // devices,
            learning_rate=2e-3,
            warmup_steps=10,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=options.steps // 2,
            save_steps=options.steps // 2,
            save_total_limit=2,
            report_to="none",
        ),
        train_dataset=blocks_of(corpus.train, options.context),
        eval_dataset=blocks_of(corpus.held_out, options.context, limit=200),
        processing_class=corpus.tokenizer,
        data_collator=default_data_collator,  # all sequences have one length
        torchacc_config=config,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(torchacc.describe(trainer.model))
        print(f"written     {options.out}: GPT2LMHeadModel.from_pretrained() opens it")


if __name__ == "__main__":
    main()
