"""Hugging Face checkpoints into sharded models and back: to the bit what `from_pretrained()` makes of them."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import torchacc
from tests import forkrun
from tests.unit.checkpoint.hf_models import (
    AUTO,
    MODELS,
    VOCAB,
    accelerate,
    change,
    check_equal,
    every_model,
    loaded,
    make,
    tied,
)
from torchacc.checkpoint import hf
from torchacc.errors import CheckpointError

transformers = pytest.importorskip("transformers", minversion="5")
conversion_mapping = pytest.importorskip("transformers.conversion_mapping")
core_model_loading = pytest.importorskip("transformers.core_model_loading")

pytestmark = pytest.mark.usefixtures("quiet")

PROGRAM = Path(__file__).with_name("hf_program.py")


class TestIntoAShardedModel:
    @every_model
    def test_several_files(self, tmp_path, name):
        model = make(name)
        model.save_pretrained(tmp_path, max_shard_size="8KB")
        assert (tmp_path / "model.safetensors.index.json").exists()
        check_equal(loaded(tmp_path, name), model.state_dict())

    def test_names_on_the_hub_are_not_those_in_memory(self, tmp_path):
        make("mixtral").save_pretrained(tmp_path)
        stored = load_file(tmp_path / "model.safetensors")
        assert "model.layers.0.block_sparse_moe.experts.11.w1.weight" in stored
        assert not stored.keys() & {"model.layers.0.mlp.experts.gate_up_proj"}

    @pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
    def test_names_in_memory(self, tmp_path, name):
        model = make(name)
        model.save_pretrained(tmp_path, save_original_format=False)
        check_equal(loaded(tmp_path, name), model.state_dict())

    @pytest.mark.parametrize("name", ["mixtral", "gpt2"])
    def test_flattened_parameters(self, tmp_path, name):
        model = make(name)
        model.save_pretrained(tmp_path)
        sharded = accelerate(make(name), flatten_parameters=True)
        torchacc.checkpoint.load(tmp_path, model=sharded)
        check_equal(torchacc.full_state_dict(sharded), model.state_dict())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["mixtral", "gpt2", "t5"])
    def test_half_precision_becomes_float32_exactly(self, tmp_path, name, dtype):
        model = make(name).to(dtype)
        model.save_pretrained(tmp_path)
        check_equal(loaded(tmp_path, name), {key: value.float() for key, value in model.state_dict().items()})

    def test_gamma_and_beta(self, tmp_path):
        model = make("bert-masked-lm")
        model.save_pretrained(tmp_path)
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

        def rename(tensors):
            for key in [*tensors]:
                for new_end, old_end in old.items():
                    if key.endswith(new_end):
                        tensors[key.removesuffix(new_end) + old_end] = tensors.pop(key)

        change(tmp_path, rename)
        assert "bert.embeddings.LayerNorm.gamma" in load_file(tmp_path / "model.safetensors")
        check_equal(loaded(tmp_path, "bert-masked-lm"), model.state_dict())

    def test_one_tensor_becomes_several(self, tmp_path, register, monkeypatch):
        split = core_model_loading.WeightConverter(
            "self_attn.qkv_proj.weight",
            ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
            [core_model_loading.Split(dim=0)],
        )
        register("LlamaForCausalLM", split)
        model = make("llama")
        model.save_pretrained(tmp_path)
        fused = [key for key in load_file(tmp_path / "model.safetensors") if "qkv_proj" in key]
        assert len(fused) == 2
        reads = []
        read = hf._Converter._read
        monkeypatch.setattr(hf._Converter, "_read", lambda self, key: (reads.append(key), read(self, key))[1])
        check_equal(loaded(tmp_path, "llama"), model.state_dict())
        assert sorted(reads) == sorted(set(reads))

    def test_the_same_name_in_another_layout(self, tmp_path, register):
        transpose = core_model_loading.WeightConverter(
            "self_attn.q_proj.weight", "self_attn.q_proj.weight", [core_model_loading.Transpose(0, 1)]
        )
        register("LlamaForCausalLM", transpose)
        model = make("llama")
        model.save_pretrained(tmp_path)
        key = "model.layers.0.self_attn.q_proj.weight"
        assert torch.equal(load_file(tmp_path / "model.safetensors")[key], model.state_dict()[key].T)
        check_equal(loaded(tmp_path, "llama"), model.state_dict())

    def test_only_what_one_tensor_is_made_of_is_read_at_once(self, tmp_path, monkeypatch):
        make("mixtral").save_pretrained(tmp_path)
        events = []
        read, run = hf._Converter._read, hf._Conversion.run
        monkeypatch.setattr(hf._Converter, "_read", lambda self, key: (events.append(key), read(self, key))[1])
        monkeypatch.setattr(hf._Conversion, "run", lambda self, *args: (events.append(self), run(self, *args))[1])
        sharded = accelerate(make("mixtral", meta=True))
        torchacc.checkpoint.load(tmp_path, model=sharded)
        conversions = {event for event in events if not isinstance(event, str)}
        assert len(conversions) == 4
        for conversion in conversions:
            last = max(index for index, event in enumerate(events) if event is conversion)
            keys = [key for _, key in conversion.sources]
            assert sorted(events[last + 1 : last + 1 + len(keys)]) == sorted(keys)
            assert not {*keys} & {event for event in events[:last] if isinstance(event, str)}

    def test_nothing_is_drawn(self, tmp_path):
        make("mixtral").save_pretrained(tmp_path)
        sharded = accelerate(make("mixtral", meta=True))
        before = torch.get_rng_state()
        torchacc.checkpoint.load(tmp_path, model=sharded)
        assert torch.equal(torch.get_rng_state(), before)


class TestBaseModelsAndHeads:
    @pytest.mark.parametrize("name", ["gpt2", "llama-tied", "mixtral-tied"])
    def test_the_base_model_into_one_with_a_tied_head(self, tmp_path, name):
        model = make(name)
        model.base_model.save_pretrained(tmp_path)
        assert not any(key.startswith("lm_head") for key in load_file(tmp_path / "model.safetensors"))
        check_equal(loaded(tmp_path, name), model.state_dict())

    def test_what_torchacc_saved_with_and_without_a_tied_head(self, tmp_path):
        model = make("mixtral-tied")
        wanted = {key: value.clone() for key, value in model.state_dict().items()}
        torchacc.checkpoint.save(tmp_path / "base", model=accelerate(model.base_model))
        check_equal(loaded(tmp_path / "base", "mixtral-tied"), wanted)
        torchacc.checkpoint.save(tmp_path / "full", model=accelerate(make("mixtral-tied")))
        base = accelerate(make("mixtral-tied", meta=True).base_model)
        torchacc.checkpoint.load(tmp_path / "full", model=base)
        without_head = {key.removeprefix("model."): value for key, value in wanted.items() if key != "lm_head.weight"}
        check_equal(torchacc.full_state_dict(base), without_head)

    @pytest.mark.parametrize(
        ("name", "lacking"),
        [
            ("llama", "lm_head.weight"),
            ("mixtral", "lm_head.weight"),
            ("gpt2-untied", "lm_head.weight"),
            ("bert-classifier", "classifier.weight, classifier.bias"),
        ],
    )
    def test_the_base_model_into_one_with_a_head_of_its_own(self, tmp_path, name, lacking):
        make(name).base_model.save_pretrained(tmp_path)
        with pytest.raises(
            CheckpointError, match=rf"lacks \d of the \d+ tensors .*: {lacking}\..*without this one's head"
        ):
            loaded(tmp_path, name)

    def test_tied_and_saved_as_tied_into_one_that_is_not(self, tmp_path):
        make("qwen2-tied").save_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match=r"lacks 1 of the \d+ tensors of Qwen2ForCausalLM: lm_head\.weight\."):
            loaded(tmp_path, "qwen2")

    def test_a_tied_tensor_under_both_of_its_names(self, tmp_path):
        model = make("llama-tied")
        model.save_pretrained(tmp_path)
        change(
            tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
        )
        check_equal(loaded(tmp_path, "llama-tied"), model.state_dict())

    @pytest.mark.parametrize("name", ["llama", "mixtral"])
    def test_an_untied_head_into_a_tied_one(self, tmp_path, name):
        make(name).save_pretrained(tmp_path)
        with pytest.raises(
            CheckpointError, match=r"lm_head\.weight and .* are different, .* tie_word_embeddings=False"
        ):
            loaded(tmp_path, name, tie_word_embeddings=True)


class TestExtraTensors:
    @pytest.mark.parametrize(
        ("name", "extra"),
        [
            ("gpt2", "transformer.h.0.attn.bias"),
            ("gpt2", "transformer.h.1.attn.masked_bias"),
            ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
            ("mixtral", "model.layers.1.self_attn.rotary_emb.inv_freq"),
            ("bert-masked-lm", "bert.embeddings.position_ids"),
        ],
    )
    def test_what_transformers_passes_over(self, tmp_path, name, extra):
        model = make(name)
        model.save_pretrained(tmp_path)
        change(tmp_path, lambda tensors: tensors.update({extra: torch.zeros(3)}))
        check_equal(loaded(tmp_path, name), model.state_dict())

    @pytest.mark.parametrize(
        ("name", "extra"),
        [("gpt2", "transformer.h.0.attn.scale"), ("mixtral", "model.layers.2.block_sparse_moe.experts.0.w2.weight")],
    )
    def test_others_raise(self, tmp_path, name, extra):
        make(name).save_pretrained(tmp_path)
        change(tmp_path, lambda tensors: tensors.update({extra: torch.zeros(3, 3)}))
        with pytest.raises(CheckpointError, match="holds 1 tensors that .* does not have: "):
            loaded(tmp_path, name)


class TestBuffers:
    """Persistent ones that a checkpoint lacks, and transformers does without."""

    @pytest.fixture(autouse=True)
    def _may_be_missing(self, monkeypatch):
        monkeypatch.setattr(transformers.GPT2LMHeadModel, "_keys_to_ignore_on_load_missing", ["count"])

    def load(self, folder, *, meta):
        make("gpt2").save_pretrained(folder)
        model = make("gpt2", meta=meta)
        model.register_buffer("count", torch.arange(5, device="meta" if meta else "cpu"))
        sharded = accelerate(model)
        torchacc.checkpoint.load(folder, model=sharded)
        return torchacc.full_state_dict(sharded)

    def test_stay_as_they_were_computed(self, tmp_path):
        assert torch.equal(self.load(tmp_path, meta=False)["count"], torch.arange(5))

    def test_are_asked_for_where_nothing_was_computed(self, tmp_path):
        with pytest.raises(CheckpointError, match="lacks 1 of .*: count"):
            self.load(tmp_path, meta=True)


class TestFromPretrained:
    @every_model
    def test_it_opens_what_torchacc_saves(self, tmp_path, name):
        model = make(name)
        wanted = {key: value.clone() for key, value in model.state_dict().items()}
        ties = tied(model)
        torchacc.checkpoint.save(tmp_path / "new", model=accelerate(model), max_shard_size=8000)
        auto = getattr(transformers, AUTO.get(MODELS[name][0], "AutoModelForCausalLM"))
        opened, info = auto.from_pretrained(tmp_path / "new", output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
        assert type(opened).__name__ == MODELS[name][0]
        assert {p.dtype for p in opened.parameters()} == {torch.float32}
        check_equal(opened.state_dict(), wanted)
        assert tied(opened) == ties

    def test_adapters_are_refused_and_saved_by_peft(self, tmp_path, caplog, monkeypatch):
        peft = pytest.importorskip("peft")
        base = make("llama")
        base.save_pretrained(tmp_path / "base")
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        self.check_refused(tmp_path / "checkpoint", model, "names of peft's adapters", caplog, monkeypatch)
        with pytest.raises(CheckpointError, match=r"which writes the adapters"):
            model.save_pretrained(tmp_path / "adapter")
        model.save_pretrained(tmp_path / "adapter", state_dict=torchacc.full_state_dict(model))
        opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        opened = peft.PeftModel.from_pretrained(opened, tmp_path / "adapter")
        check_equal(opened.state_dict(), torchacc.full_state_dict(model))

    def check_refused(self, folder, model, reason, caplog, monkeypatch):
        """Check that it is said, that `from_pretrained()` opens nothing, and that torchacc loads it."""
        monkeypatch.setattr(logging.getLogger("torchacc"), "propagate", True)
        wanted = {key: value.clone() for key, value in model.state_dict().items()}
        sharded = accelerate(model)
        torchacc.checkpoint.save(folder, model=sharded)
        assert "gets no config.json" in caplog.text
        assert reason in caplog.text
        with pytest.raises((OSError, ValueError), match=r"config\.json|model_type"):
            transformers.AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.zero_()
        torchacc.checkpoint.load(folder, model=sharded)
        check_equal(torchacc.full_state_dict(sharded), wanted)

    def test_what_it_would_convert(self, tmp_path, register, caplog, monkeypatch):
        transpose = core_model_loading.WeightConverter(
            "self_attn.q_proj.weight", "self_attn.q_proj.weight", [core_model_loading.Transpose(0, 1)]
        )
        register("LlamaForCausalLM", transpose)
        reason = "it would convert model.layers.0.self_attn.q_proj.weight"
        self.check_refused(tmp_path / "new", make("llama"), reason, caplog, monkeypatch)

    def test_what_it_would_not_tie(self, tmp_path, caplog, monkeypatch):
        model = make("llama")
        model.lm_head.weight = model.model.embed_tokens.weight
        reason = "it would not find lm_head.weight, and make up values"
        self.check_refused(tmp_path / "new", model, reason, caplog, monkeypatch)

    def test_a_head_that_was_taken_off(self, tmp_path, caplog, monkeypatch):
        model = make("llama")
        model.lm_head = nn.Identity()
        self.check_refused(tmp_path / "new", model, "it would not find lm_head.weight", caplog, monkeypatch)

    def test_buffers_of_the_users_own_are_no_reason(self, tmp_path):
        model = make("gpt2")
        model.register_buffer("count", torch.arange(5))
        torchacc.checkpoint.save(tmp_path / "new", model=accelerate(model))
        assert (tmp_path / "new" / "config.json").exists()


@pytest.mark.slow
class TestSeveralDevices:
    @pytest.mark.parametrize(
        ("engine", "num_processes"),
        [
            ("native", 2),
            pytest.param("xla-multiprocess", 2, marks=pytest.mark.xla),
            pytest.param("xla-spmd", 1, marks=pytest.mark.xla),
        ],
    )
    @pytest.mark.parametrize("flat", [False, True], ids=["", "flattened"])
    def test_mixtral_from_the_hub_and_back(self, tmp_path, engine, num_processes, flat):
        if engine == "xla-spmd" and flat:
            pytest.skip("xla-spmd flattens nothing")
        model = make("mixtral")
        model.save_pretrained(tmp_path / "hub", max_shard_size="8KB")
        fsdp = {"size": 2, "use_spmd": engine == "xla-spmd", "flatten_parameters": flat}
        config = {"backend": engine.partition("-")[0], "dist": {"fsdp": fsdp}}
        done = forkrun.run(
            PROGRAM, json.dumps(config), tmp_path / "hub", tmp_path / "new",
            num_ranks=num_processes if num_processes > 1 else 0,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-5000:]
        torchacc.checkpoint.verify(tmp_path / "new")
        opened, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        check_equal(opened.state_dict(), model.state_dict())
        ids = torch.arange(12).reshape(2, 6) % VOCAB
        wanted = model(input_ids=ids, labels=ids).loss.item()
        losses = [float(found) for found in re.findall(r"LOSS ([\d.]+)", done.stdout)]  # ranks may share a line
        assert losses == [pytest.approx(wanted, rel=1e-5)] * num_processes
