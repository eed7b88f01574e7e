"""What `compute.attention` computes, beside the unsharded model on a CPU.

For `test_attention_kernels.py`, and on a GPU for `tests/gpu/test_gpu.py`:

python attention_program.py out/ case ...     on one rank, or under torchrun
"""

import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from program_cases import run_cases
from torch.utils._python_dispatch import TorchDispatchMode

import torchacc
from torchacc.engines import registry
from torchacc.engines.patches import transformers_attention
from torchacc.errors import EngineError

RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
VOCAB, LENGTH, WINDOW = 64, 12, 4
IDS = torch.randint(0, VOCAB, (2 * NUM_RANKS, LENGTH), generator=torch.Generator().manual_seed(1))
FUSED = "_scaled_dot_product_flash_attention_for_cpu"


def padded(ids):
    """Return a batch whose second row has four tokens of padding."""
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed(ids):
    """Return a batch with two documents in each row, which the window of a sliding attention is shorter than."""
    positions = torch.tensor([[*range(7), *range(5)], [*range(5), *range(7)]])
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


def whole(ids):
    """Return a batch without padding, of one document in each row, for kernels that take no masks."""
    return {"input_ids": ids, "labels": ids}


BATCHES = (padded, packed)
OF_DECODERS = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_DECODERS |= {"vocab_size": VOCAB, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "head_dim": 16}
OF_DECODERS |= {"use_cache": False, "tie_word_embeddings": False}


def gpt2():
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": LENGTH, "use_cache": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **off))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**OF_DECODERS))


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**OF_DECODERS, sliding_window=WINDOW))


def gemma2():
    own = {"sliding_window": WINDOW, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8}
    own["layer_types"] = ["sliding_attention", "full_attention"]
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**OF_DECODERS, **own))


def seeded(make_model, attention=None):
    torch.manual_seed(0)
    model = make_model()
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def accelerated(model, attention, *, compute=None, fsdp=None, **sections):
    compute = {"attention": attention, **(compute or {})}
    sizes = fsdp or {"size": NUM_RANKS}
    config = {"backend": "native", "compute": compute, "dist": {"fsdp": sizes, **sections.pop("dist", {})}, **sections}
    return torchacc.accelerate(model, None, torchacc.Config.from_dict(config))


def of_rank(make_batch, rank):
    return make_batch(IDS[2 * rank : 2 * rank + 2])


class Seen(TorchDispatchMode):
    """While entered, notes the names of operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def expected(make_model, batches):
    """Return the losses of two steps of plain PyTorch, by the model's own formula in float32, and the parameters."""
    model = seeded(make_model, "eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for make_batch in batches:
        optimizer.zero_grad()
        loss = torch.stack([model(**of_rank(make_batch, rank)).loss for rank in range(NUM_RANKS)]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def check_parity(make_model, attention, *, tolerance=1e-5, data_rank=RANK, batches=BATCHES, **options):
    """Train by a kernel, padded rows first and packed ones next, and compare with plain PyTorch."""
    losses, weights = expected(make_model, batches)
    model = accelerated(seeded(make_model), attention, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for make_batch in batches:
        optimizer.zero_grad()
        loss = model(**registry.active_engine().to_device(of_rank(make_batch, data_rank))).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found == pytest.approx(losses, rel=tolerance)
    for name, tensor in torchacc.full_state_dict(model).items():
        assert torch.allclose(tensor, weights[name], rtol=tolerance, atol=tolerance), name
    return model


def flex_has_the_numbers_of_a_sliding_window():
    check_parity(mistral, "flex_attention")


def flex_has_the_numbers_of_a_soft_cap():
    check_parity(gemma2, "flex_attention")


def flex_has_the_numbers_of_a_bias_that_all_samples_share():
    """T5's relative positions, and attention across from its decoder to its encoder."""
    shape = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 0}
    mask = torch.ones(2, LENGTH)
    mask[1, -4:] = 0
    batch = {"input_ids": IDS[:2], "attention_mask": mask, "labels": IDS[:2]}

    def make_t5():
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, dropout_rate=0.0, **tokens))

    plain, model = seeded(make_t5, "eager"), accelerated(seeded(make_t5), "flex_attention")
    losses = [each(**batch).loss for each in (plain, model)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter.grad, expected.grad, rtol=1e-5, atol=1e-6), name


def eager_has_the_numbers():
    for make_model in (gpt2, mistral, gemma2):
        assert check_parity(make_model, "eager").config._attn_implementation == "eager"


def pytorchs_kernels_have_the_numbers():
    for make_model in (gpt2, llama, mistral):
        for attention in ("sdpa", "sdpa_math", "sdpa_flash"):
            check_parity(make_model, attention)


def recompute_has_the_numbers():
    check_parity(gemma2, "flex_attention", memory={"gc": True})
    check_parity(mistral, "sdpa_math", memory={"gc": True})
    check_parity(mistral, "sdpa_math", memory={"gc": True, "gc_policy": "save_matmuls"})


def a_loss_in_chunks_has_the_numbers():
    check_parity(llama, "flex_attention", compute={"chunked_loss": 5})


def compiled_units_have_the_numbers():
    check_parity(mistral, "flex_attention", compute={"compile": True, "compile_backend": "aot_eager"})


def bfloat16_is_near():
    check_parity(mistral, "flex_attention", compute={"bf16": True}, tolerance=5e-2)


def kernels_of_gpus_have_the_numbers():
    for make_model in (gpt2, llama, mistral):
        for attention in ("sdpa", "sdpa_math", "sdpa_efficient"):
            check_parity(make_model, attention)
    for make_model in (llama, mistral, gemma2):
        check_parity(make_model, "flex_attention")
    check_parity(mistral, "flex_attention", memory={"gc": True})


def kernels_of_gpus_in_bfloat16_are_near():
    for make_model in (gpt2, llama):
        check_parity(make_model, "sdpa_flash", compute={"bf16": True}, tolerance=5e-2, batches=(whole, whole))
        check_parity(make_model, "sdpa_cudnn", compute={"bf16": True}, tolerance=5e-2, batches=(whole, whole))
    for make_model in (mistral, gemma2):
        check_parity(make_model, "flex_attention", compute={"bf16": True}, tolerance=5e-2)


def compiled_kernels_of_gpus_have_the_numbers():
    for attention in ("sdpa_efficient", "flex_attention"):
        check_parity(mistral, attention, compute={"compile": True})


def one_backend_runs_in_forward_and_in_backward():
    for attention, is_fused in (("sdpa_flash", True), ("sdpa_math", False)):
        model = accelerated(seeded(llama), attention, memory={"gc": True})
        with Seen() as seen:
            loss = model(**of_rank(packed, RANK)).loss
            num_in_forward = seen.names.count(FUSED)
            loss.backward()
        assert num_in_forward == (2 if is_fused else 0)
        assert seen.names.count(FUSED) == 2 * num_in_forward


def a_backend_is_given_back_after_a_forward():
    before = torch.backends.cuda.flash_sdp_enabled()
    model = accelerated(seeded(llama), "sdpa_math")
    model(**of_rank(packed, RANK)).loss.backward()
    assert torch.backends.cuda.flash_sdp_enabled() is before is True


def models_inside_of_others_are_chosen_for():
    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = seeded(llama)

        def forward(self, **batch):
            return self.inner(**batch).loss

    model = accelerated(Around(), "eager")
    assert model.inner.config._attn_implementation == "eager"
    model(**of_rank(packed, RANK)).backward()


class Attending(torch.nn.Module):
    """A plain module, whose attention is PyTorch's."""

    def __init__(self, *, dropout=0.0):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def plain_modules_run_by_one_backend():
    for attention, is_fused in (("sdpa_flash", True), ("sdpa_math", False)):
        torch.manual_seed(0)
        model = accelerated(Attending(), attention)
        with Seen() as seen:
            model(torch.ones(2, 4, 8)).sum().backward()
        assert (FUSED in seen.names) is is_fused


def a_backend_that_takes_no_dropout_says_what_to_write():
    model = accelerated(Attending(dropout=0.5), "sdpa_flash")
    with pytest.raises(EngineError, match=r"'sdpa_flash': that backend alone does .*attention = 'sdpa'"):
        model(torch.ones(2, 4, 8))


def documents_in_a_row_are_refused_for_flash_attention():
    model = seeded(llama)
    transformers_attention.refuse_packed_documents(model, "flash_attention_2")
    for make_batch in BATCHES[:1]:
        model(**of_rank(make_batch, RANK))
    model(IDS, None, torch.arange(LENGTH).expand(len(IDS), -1))
    batch = of_rank(packed, RANK)
    with pytest.raises(EngineError, match=r"'flash_attention_2': the position ids begin anew within a row"):
        model(**batch)
    with pytest.raises(EngineError, match=r"begin anew within a row"):
        model(batch["input_ids"], None, batch["position_ids"])


def masks_of_a_script_are_applied_or_refused():
    seen = torch.ones(LENGTH, LENGTH).tril().bool()
    seen[5:, :5] = False
    plain = seeded(llama, "sdpa")
    expected = plain(IDS, seen[None, None].expand(len(IDS), -1, -1, -1)).logits
    scores = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    for attention in ("eager", "flex_attention", "sdpa_math"):
        model = accelerated(seeded(llama), attention)
        assert torch.allclose(model(IDS, scores).logits, expected, rtol=1e-5, atol=1e-6), attention
        if attention != "sdpa_math":
            with pytest.raises(EngineError, match="cannot apply the attention_mask: it is boolean"):
                model(IDS, seen[None, None])
        if attention == "flex_attention":
            with pytest.raises(EngineError, match="it differs between heads"):
                model(input_ids=IDS, attention_mask=scores.expand(-1, 4, -1, -1))
    transformers_attention.refuse_masks(plain, "flash_attention_2")
    with pytest.raises(EngineError, match="FlashAttention takes none but of padding"):
        plain(IDS, scores)


def layers_split_over_devices_have_the_numbers():
    if NUM_RANKS == 2:
        # Both processes see the data of rank 0, which counts once in the mean.
        global IDS
        before, IDS = IDS, torch.cat([IDS[:2], IDS[:2]])
        check_parity(mistral, "flex_attention", fsdp={"size": 1}, dist={"tp": {"size": 2}}, data_rank=0)
        IDS = before


if __name__ == "__main__":
    folder = Path(sys.argv[1]) / (str(RANK) if NUM_RANKS > 1 else "")
    folder.mkdir(exist_ok=True)
    own = [each for name, each in list(globals().items()) if name in sys.argv[2:]]
    run_cases(own, folder)
