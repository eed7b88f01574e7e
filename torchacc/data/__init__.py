"""Shards, pads and prefetches what a training loop reads. Host side only: knows neither devices nor process groups."""

from torchacc.data.async_loader import AsyncLoader
from torchacc.data.bucketing import Bucketing, make_buckets
from torchacc.data.same_data import digest_of
from torchacc.data.sharded_loader import ShardedLoader, shard_loader
from torchacc.data.tree import concat, map_tensors, num_rows, take, tensors_in

__all__ = [
    "AsyncLoader",
    "Bucketing",
    "ShardedLoader",
    "concat",
    "digest_of",
    "make_buckets",
    "map_tensors",
    "num_rows",
    "shard_loader",
    "take",
    "tensors_in",
]
