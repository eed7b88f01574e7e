"""Import and export of `torch.distributed.checkpoint` folders."""

from torchacc.checkpoint.other_formats.dcp_convert import export_dcp as export_dcp
from torchacc.checkpoint.other_formats.dcp_convert import import_dcp as import_dcp

__all__ = ["export_dcp", "import_dcp"]
