"""Rank files of a model with one weight, and of its optimizer, which the commands convert."""

from pathlib import Path

import torch

WEIGHT = torch.arange(20.0).view(5, 4)


def write_rank_files(folder: Path) -> None:
    """Write those of two ranks, of which the second one's last row is padding."""
    for rank, rows in enumerate((WEIGHT[:3], torch.cat([WEIGHT[3:], torch.zeros(1, 4)]))):
        info = {"": {"w": {"_orig_size": [5, 4], "_orig_name": "w"}}}
        metadata = {"shard_info": info, "flatten_info": {}, "buffer_info": {}, "world_size": 2, "rank": rank}
        state = {0: {"step": torch.tensor(1.0), "exp_avg": rows * 2}}
        optimizer = {"state": state, "param_groups": [{"params": [0], "param_names": ["w"]}]}
        torch.save({"model": {"w": rows.clone()}, "shard_metadata": metadata}, folder / f"rank-{rank}-of-2-model.pth")
        torch.save({"optimizer": optimizer, "shard_metadata": metadata}, folder / f"rank-{rank}-of-2-optimizer.pth")
