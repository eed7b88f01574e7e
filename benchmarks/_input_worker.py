"""One process of `input_pipeline.py`: each of its steps is an epoch."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from _input_cases import GLOBAL_BATCH, HEADS, LAYERS, LONGEST, PAD, VOCABULARY, WIDTH, Case, documents
from _models import make_gpt2
from _training import Steps
from _worker import serve
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import torchacc
from torchacc.parallel.sequence_split import IGNORE_INDEX
from torchacc.train.blocks import StreamedBlocks


def run(case: Case) -> None:
    """Set a case up, and take epochs as `_worker.serve()` is told.

    Its facts are `positions` of the batches of an epoch, `batches` in it, `wait`, the share of the latest epoch that
    went into waiting for batches, and `loader_secs` of an epoch of the loader alone.
    """
    epochs = Epochs(case)
    serve(epochs.take, epochs.facts)


class Epochs:
    """Trains on all documents again and again."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def take(self) -> Steps:
        """Set up, and return what trains an epoch each time that it is asked."""
        torch.manual_seed(0)
        model: Any = make_gpt2(LAYERS, WIDTH, HEADS, VOCABULARY, LONGEST)
        batches = make_batches(self._case)
        if self._case.kind == "eager":
            self._loader: Any = batches
        else:
            model, self._loader = torchacc.accelerate(model, batches, make_config(self._case))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def epochs() -> Steps:
            while True:
                yield self._epoch(model, optimizer)

        return epochs()

    def _epoch(self, model: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        self._positions = self._batches = 0
        self._waited, started = 0.0, time.perf_counter()
        for batch in self._timed(iter(self._loader)):
            self._positions += batch["input_ids"].numel()
            self._batches += 1
            optimizer.zero_grad()
            loss: torch.Tensor = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
        self._secs = time.perf_counter() - started
        return loss.detach()

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            self._waited += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    def facts(self) -> dict[str, Any]:
        """Return what is known of the latest epoch, and the time of an epoch of the loader alone."""
        started = time.perf_counter()
        for _ in self._loader:
            pass
        loader_secs = time.perf_counter() - started
        wait = self._waited / self._secs
        return {"positions": self._positions, "batches": self._batches, "wait": wait, "loader_secs": loader_secs}


def make_batches(case: Case) -> "DataLoader[Any]":
    """Return the loader of a case, with the batch size of one device."""
    tokens = documents()
    if case.packed:
        blocks: Any = list(StreamedBlocks(lambda order: map(np.asarray, tokens), LONGEST, True, PAD, seed=0))
        return DataLoader(blocks, GLOBAL_BATCH // case.devices)
    samples: Any = [torch.tensor(document) for document in tokens]
    return DataLoader(samples, GLOBAL_BATCH // case.devices, collate_fn=collate)


def collate(rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad documents to the longest of them, as most do."""
    ids = pad_sequence(list(rows), batch_first=True, padding_value=PAD)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORE_INDEX)}


def make_config(case: Case) -> torchacc.Config:
    """Return the config of an engine of torchacc."""
    fsdp = {"size": case.devices, "use_spmd": case.kind == "xla-spmd"}
    backend = "native" if case.kind == "native" else "xla"
    return torchacc.Config.from_dict({"backend": backend, "dataloader": dict(case.dataloader), "dist": {"fsdp": fsdp}})
