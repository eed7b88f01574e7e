import pytest

from torchacc.train.families import unknown_options

TAKEN = {
    "declared": {"model_type": "gpt2", "n_layer": 2, "hidden_size": 8},
    "read by the models alone": {"model_type": "qwen3_moe", "head_dim": 8},
    "read of an encoder and decoder": {"model_type": "t5", "decoder_start_token_id": 0},
    "turned into others": {"model_type": "llama", "rope_theta": 1e4, "torch_dtype": "float32", "num_labels": 3},
    "a wrong value": {"model_type": "llama", "rope_scaling": 3},
    "no defaults": {"model_type": "gemma4_assistant", "anything": 1},
}
REFUSED = {
    "misspelt": ({"model_type": "gpt2", "n_layers": 2}, "n_layers", "did you mean 'n_layer'?"),
    "misspelt, read by the models": ({"model_type": "qwen3_moe", "hed_dim": 8}, "hed_dim", "did you mean 'head_dim'?"),
    "kept, and read by nobody": ({"model_type": "gpt2", "rope_theta": 1e4}, "rope_theta", "valid names: activation_"),
    "dropped": ({"model_type": "gpt2", "temperature": 0.5}, "temperature", "valid names: activation_"),
    "of the class's own": ({"model_type": "gpt2", "_commit_hash": "x"}, "_commit_hash", "valid names: activation_"),
}


@pytest.mark.parametrize("options", TAKEN.values(), ids=TAKEN)
def test_an_option_is_what_a_configuration_or_its_models_use(options):
    assert list(unknown_options(options)) == []


@pytest.mark.parametrize(("options", "name", "hint"), REFUSED.values(), ids=REFUSED)
def test_other_names_are_unknown(options, name, hint):
    [(unknown, said)] = unknown_options(options)
    assert unknown == name
    assert said.startswith(hint)


def test_what_is_passed_stays_as_it_is():
    scaling = {"rope_type": "linear", "factor": 2.0}
    assert list(unknown_options({"model_type": "llama", "rope_scaling": scaling})) == []
    assert scaling == {"rope_type": "linear", "factor": 2.0}
