"""Formats that others made: rank files and `.pth` files, which `torchacc.save()` also writes, and folders of
`torch.distributed.checkpoint`.
"""
