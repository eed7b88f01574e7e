"""What the commands make of rank files opens in transformers as it is."""

import pytest
import torch

from torchacc.cli import consolidate_sharded_model_checkpoints

transformers = pytest.importorskip("transformers")


@pytest.fixture
def model():
    """A small model with a tied head."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=12, n_head=2, vocab_size=29, n_positions=8)
    return transformers.GPT2LMHeadModel(config)


def save_shards(model, folder, world):
    """Save each rank's rows, as torchacc does."""
    params = dict(model.named_parameters())
    info = {"": {name: {"_orig_size": list(param.shape), "_orig_name": name} for name, param in params.items()}}
    metadata = {"shard_info": info, "flatten_info": {}, "buffer_info": {}, "world_size": world}
    metadata |= {"tied": {"lm_head.weight": "transformer.wte.weight"}}
    for rank in range(world):
        state = {}
        for name, param in params.items():
            padded = torch.cat([param.detach(), param.new_zeros(-len(param) % world, *param.shape[1:])])
            state[name] = padded.chunk(world)[rank].clone()
        content = {"model": state, "shard_metadata": metadata | {"rank": rank}}
        torch.save(content, folder / f"rank-{rank}-of-{world}-model.pth")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)


def test_from_pretrained(tmp_path, model):
    save_shards(model, tmp_path, 3)
    args = ["--ckpt_prefix", str(tmp_path), "--format", "safetensors", "--max-shard-size", "8KB"]
    assert consolidate_sharded_model_checkpoints.main(args) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "consolidated")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_load_state_dict(tmp_path, model):
    save_shards(model, tmp_path, 2)
    assert consolidate_sharded_model_checkpoints.main(["--ckpt_prefix", str(tmp_path)]) == 0
    loaded = transformers.GPT2LMHeadModel(model.config)
    loaded.load_state_dict(torch.load(tmp_path / "consolidated.pth", weights_only=True)["model"])
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
