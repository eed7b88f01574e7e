"""The files of a checkpoint: how they are written, committed, read and removed."""
