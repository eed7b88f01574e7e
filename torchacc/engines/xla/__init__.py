"""The XLA engines: the only code that knows torch_xla."""
