"""Hugging Face checkpoints that do not fit a model, and conversions that nobody knows."""

import json
import logging

import pytest
import torch
from packaging.specifiers import SpecifierSet

import torchacc
from tests.unit.checkpoint.hf_models import accelerate, change, check_equal, loaded, make
from torchacc.checkpoint import hf
from torchacc.engines.sharded_model import sharded_model
from torchacc.errors import CheckpointError

transformers = pytest.importorskip("transformers", minversion="5")
conversion_mapping = pytest.importorskip("transformers.conversion_mapping")
core_model_loading = pytest.importorskip("transformers.core_model_loading")

pytestmark = pytest.mark.usefixtures("quiet")


class TestRefusals:
    def test_an_expert_is_missing(self, tmp_path):
        make("mixtral").save_pretrained(tmp_path)
        change(tmp_path, lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.4.w2.weight"))
        with pytest.raises(
            CheckpointError, match=r"made of .* has the shape \(11, 16, 24\), and the model's .*\(12, 16"
        ):
            loaded(tmp_path, "mixtral")

    def test_an_expert_of_another_shape(self, tmp_path):
        make("mixtral").save_pretrained(tmp_path)
        key = "model.layers.1.block_sparse_moe.experts.4.w2.weight"
        change(tmp_path, lambda tensors: tensors.update({key: torch.zeros(2, 2)}))
        with pytest.raises(CheckpointError, match=r"transformers cannot make model.layers.1.mlp.experts.down_proj of"):
            loaded(tmp_path, "mixtral")

    def test_a_tensor_and_what_it_is_made_of(self, tmp_path):
        make("mixtral").save_pretrained(tmp_path)
        key = "model.layers.1.mlp.experts.down_proj"
        change(tmp_path, lambda tensors: tensors.update({key: torch.zeros(12, 16, 24)}))
        with pytest.raises(CheckpointError, match="which is it"):
            loaded(tmp_path, "mixtral")

    def test_a_refused_checkpoint_leaves_the_model_usable(self, tmp_path):
        make("llama").save_pretrained(tmp_path)
        model = make("gpt2")
        wanted = {key: value.clone() for key, value in model.state_dict().items()}
        sharded = accelerate(model)
        with pytest.raises(CheckpointError, match="lacks"):
            torchacc.checkpoint.load(tmp_path, model=sharded)
        check_equal(torchacc.full_state_dict(sharded), wanted)
        assert sharded_model(sharded).status.has_weights

    def test_a_pickle(self, tmp_path):
        torch.save(make("gpt2").state_dict(), tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="only pytorch_model.bin, a pickle.*convert it to safetensors"):
            loaded(tmp_path, "gpt2")

    def test_a_quantized_checkpoint(self, tmp_path):
        make("gpt2").save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="is quantized: .*dequantize"):
            loaded(tmp_path, "gpt2")

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
    @pytest.mark.parametrize(
        ("name", "end"), [("gpt2", "attn.c_attn.weight"), ("mixtral", "w1.weight")], ids=["as it is", "converted"]
    )
    def test_quantized_weights(self, tmp_path, name, end, dtype):
        make(name).save_pretrained(tmp_path)
        change(
            tmp_path, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items() if k.endswith(end)})
        )
        with pytest.raises(CheckpointError, match=f"is {dtype}, and without what it was quantized with"):
            loaded(tmp_path, name)


class TestUnknownInternals:
    @pytest.fixture(params=["version", "signature"])
    def unknown(self, request, monkeypatch):
        if request.param == "version":
            monkeypatch.setattr(hf, "_CONVERSIONS", SpecifierSet("<5"))
        else:
            monkeypatch.setattr(core_model_loading, "rename_source_key", lambda source_key, mapping: None)

    @pytest.mark.usefixtures("unknown")
    def test_what_needs_them_is_refused(self, tmp_path):
        make("mixtral").save_pretrained(tmp_path)
        message = r"lacks 6 of .*gate_up_proj.*How transformers 5.* converts .*save_original_format=False"
        with pytest.raises(CheckpointError, match=message):
            loaded(tmp_path, "mixtral")

    @pytest.mark.usefixtures("unknown")
    def test_what_fits_by_name_is_loaded_with_a_warning(self, tmp_path, caplog, monkeypatch):
        monkeypatch.setattr(logging.getLogger("torchacc"), "propagate", True)
        model = make("gpt2")
        model.save_pretrained(tmp_path)
        check_equal(loaded(tmp_path, "gpt2"), model.state_dict())
        assert "is loaded by the names in it. How transformers" in caplog.text

    @pytest.mark.usefixtures("unknown")
    def test_torchacc_checkpoints_do_not_need_them(self, tmp_path, caplog, monkeypatch):
        monkeypatch.setattr(logging.getLogger("torchacc"), "propagate", True)
        model = make("mixtral")
        wanted = {key: value.clone() for key, value in model.state_dict().items()}
        torchacc.checkpoint.save(tmp_path / "new", model=accelerate(model))
        check_equal(loaded(tmp_path / "new", "mixtral"), wanted)
        assert "How transformers" not in caplog.text
