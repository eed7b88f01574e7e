"""The functions of transformers that are replaced for a forward under XLA."""

from transformers import masking_utils

from torchacc.engines.patches.transformers_masks import _REPLACEMENTS


def test_the_installed_transformers_has_all_functions_that_are_replaced() -> None:
    # Where one has another name its replacement is left out, and masks may come out wrong without an error.
    assert [name for name in _REPLACEMENTS if not hasattr(masking_utils, name)] == []
