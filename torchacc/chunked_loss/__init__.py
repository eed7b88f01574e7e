"""The loss of language models from hidden states, in chunks of tokens, so that full logits never exist."""
