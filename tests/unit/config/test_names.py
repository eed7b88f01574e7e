"""What a message offers in the place of a wrong name."""

from torchacc.config.names import nearest


def test_nearest_ignores_case_and_falls_back_on_all_names():
    assert nearest("gpt2block", ["GPT2Block", "Linear"]) == "did you mean 'GPT2Block'?"
    assert nearest("zzz", ["b", "a"]) == "valid names: a, b"
