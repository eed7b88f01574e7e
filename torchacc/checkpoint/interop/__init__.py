"""Checkpoints of others: rank files, .pth files, and folders of `torch.distributed.checkpoint`."""
