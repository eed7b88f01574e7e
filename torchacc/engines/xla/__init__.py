"""The XLA engines: what runs on torch_xla, but for what `engines/patches/` changes in it."""
