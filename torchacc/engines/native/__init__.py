"""The native engine: PyTorch's FSDP2."""
