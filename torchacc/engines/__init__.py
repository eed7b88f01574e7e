"""The engines: the only code that knows torch_xla or torch.distributed."""
