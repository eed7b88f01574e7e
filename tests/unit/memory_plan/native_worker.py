"""One process of `test_native.py`: for each case it prints what is planned for the native engine, and what it holds."""

import gc
import json
import math
import os
import sys
from pathlib import Path

import torch
import transformers
from torch.profiler import ProfilerActivity, profile, record_function

import torchacc
from torchacc.memory_plan import study

ROWS, LENGTH, WIDTH, VOCABULARY = 4, 128, 128, 512
STEP = "a step that is looked at"
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
STEPS = 3 if RANKS > 1 else 2


def make_gpt2():
    config = transformers.GPT2Config(
        n_layer=3, n_embd=WIDTH, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def make_llama():
    config = transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=4, use_cache=False,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def make_mixtral():
    config = transformers.MixtralConfig(
        num_hidden_layers=3, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=4, use_cache=False,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, bos_token_id=None,
        eos_token_id=None, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).train()


def make_deepseek():
    """Values of attention have another size than its queries."""
    config = transformers.DeepseekV3Config(
        num_hidden_layers=3, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=4, use_cache=False,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, bos_token_id=None,
        eos_token_id=None, moe_intermediate_size=WIDTH, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32,
        qk_rope_head_dim=16, v_head_dim=32,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config).train()


def make_adapted():
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(r=8), make_llama())


MODELS = {
    "adapters": make_adapted,
    "deepseek": make_deepseek,
    "gpt2": make_gpt2,
    "llama": make_llama,
    "mixtral": make_mixtral,
}


def make_config(sizes, *, recomputed, bf16, policy="full", steps_in_backward=False, schedule="gpipe"):
    config = torchacc.Config(backend="native")
    for axis, size in sizes.items():
        setattr(*((config.dist.sp, "ring_size") if axis == "ring" else (getattr(config.dist, axis), "size")), size)
    config.memory.gc, config.compute.bf16 = recomputed, bf16
    config.memory.gc_policy, config.memory.step_in_backward = policy, steps_in_backward
    config.dist.pp.schedule = schedule
    config.dist.fsdp.size = RANKS // math.prod(size for axis, size in sizes.items() if axis != "ring")
    return config


def planned(make, config, *, accumulates):
    with torch.device("meta"):
        model, tokens = make(), torch.zeros(ROWS, LENGTH, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    step = study(model, batch, config, num_states=2, backend="native", platform="cpu", adds_gradients=accumulates)
    return step.on(RANKS, "FULL_SHARD").total


def held(make, config, folder, *, accumulates):
    """Return the most bytes that PyTorch's CPU allocator gives away in a step after the first: the least of `STEPS`.

    Beside what a step needs, a process that is ahead of the others holds what it has sent until they take it, and how
    much that is differs from step to step.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        torchacc.accelerate(model, None, config, optimizer)
        train(model, optimizer, tokens, accumulates=accumulates)
        for _ in range(STEPS):
            with record_function(STEP):
                train(model, optimizer, tokens, accumulates=accumulates)
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((each for each in events if each["name"] == "[memory]"), key=lambda each: each["ts"])
    steps = [each for each in events if each["name"] == STEP and each.get("ph") == "X"]
    before = memory[0]["args"]["Total Allocated"] - memory[0]["args"]["Bytes"]
    return min(most_allocated(memory, step) for step in steps) - before


def most_allocated(memory, step):
    during = [each for each in memory if step["ts"] <= each["ts"] <= step["ts"] + step["dur"]]
    return max(each["args"]["Total Allocated"] for each in during)


def train(model, optimizer, tokens, *, accumulates):
    optimizer.zero_grad()
    if accumulates:
        with torchacc.accumulate(model):
            model(input_ids=tokens, labels=tokens).loss.backward()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def main(folder, *cases):
    rank = os.environ.get("RANK", "0")
    folder = Path(folder) / rank
    folder.mkdir()
    found = {}
    for case in cases:
        name, *options = case.split()
        keeps = "products-kept" in options
        sizes = {axis: int(size) for axis, _, size in (each.partition("=") for each in options) if size}
        config = make_config(
            sizes,
            recomputed=keeps or "recomputed" in options,
            bf16="bf16" in options,
            policy="save_matmuls" if keeps else "full",
            steps_in_backward="stepping" in options,
            schedule=next((each for each in ("1f1b", "interleaved") if each in options), "gpipe"),
        )
        adds = "accumulated" in options
        make = MODELS[name]
        plan = planned(make, config, accumulates=adds) if rank == "0" else None  # one is read
        found[case] = plan, held(make, config, folder, accumulates=adds)
        gc.collect()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
