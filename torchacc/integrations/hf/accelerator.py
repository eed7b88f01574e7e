"""What transformers' loop asks of `accelerate.Accelerator`, answered by an engine of torchacc."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn

from torchacc import api, dist
from torchacc.data.tree import map_tensors
from torchacc.engines.base import Engine
from torchacc.engines.sharded_model import ShardedModel
from torchacc.env import read_job


class GradientState:
    """What accelerate knows of the gradients and of the data; the loop sets the first and asks for the last."""

    plugin_kwargs: dict[str, Any]

    def __init__(self) -> None:
        self.plugin_kwargs = {}
        self.sync_gradients = True
        self.end_of_dataloader = False

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients


class AcceleratorAdapter:
    """Has the interface of an `Accelerator`, and moves, wraps and starts nothing."""

    distributed_type = DistributedType.NO
    num_processes = 1
    """The number by which the loop multiplies a loss: torchacc divides the number of its items instead."""
    parallelism_config = None
    scaler = None
    optimizer_step_was_skipped = False

    sharded: ShardedModel

    def __init__(self) -> None:
        self.gradient_state = GradientState()
        self.num_rows: int | None = None
        """Rows of the global batch in evaluation that are the dataset's own; None where all are."""
        self.evaluated: list[nn.Module] = []
        """Models beside the trained one, which are sharded when the trainer is built."""

    @property
    def engine(self) -> Engine:
        """What the model runs on."""
        return self.sharded.engine

    @property
    def device(self) -> torch.device:
        """Where the batches of this process lie."""
        return self.engine.device if hasattr(self, "sharded") else torch.device("cpu")

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return read_job().rank

    @property
    def local_process_index(self) -> int:
        """This process's rank among those of its machine."""
        return read_job().local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this process is the one that speaks for all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this process is the first of its machine."""
        return self.local_process_index == 0

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here. Collective."""
        dist.rendezvous("wait_for_everyone")

    def print(self, *values: Any, **options: Any) -> None:
        """Print, as `print()` does, on the first process of each machine."""
        if self.is_local_main_process:
            print(*values, **options)  # noqa: T201

    def __getattr__(self, name: str) -> Any:
        """Say what there is instead. It is an AttributeError, as transformers and others ask by getattr and hasattr.

        Raises:
            AttributeError: Always: Python comes here for what is not there.
        """
        raise AttributeError(
            f"trainer.accelerator.{name} is not there: under torchacc's Trainer no Accelerator of accelerate moves, "
            "wraps or gathers. Use torchacc.dist (rank, world_size, rendezvous), "
            "torchacc.full_state_dict(model), trainer.save_model(), trainer.accelerator.gather()"
        )

    @property
    def _models(self) -> list[nn.Module]:
        return [self.sharded.model]

    def prepare(self, *parts: Any) -> Any:
        """Return what it gets: it is prepared."""
        return parts if len(parts) > 1 else parts[0]

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        """Return the model: it is sharded, or will be when the trainer is built."""
        if evaluation_mode and not hasattr(self, "sharded"):
            self.evaluated.append(model)
        return model

    def unwrap_model(self, model: nn.Module, keep_torch_compile: bool = True) -> nn.Module:
        """Return the model: it is not wrapped."""
        return model

    def free_memory(self) -> None:
        """Do nothing: nothing is held."""

    def end_training(self) -> None:
        """Do nothing: the process group ends with the process."""

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients."""
        loss.backward()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context for all but the last micro-batch of a step."""
        return api.accumulate(model)

    def gather(self, tensors: Any) -> Any:
        """Return tensors of all devices that see different data, in a row, on the host. Collective: every process.

        Those without dimensions become ones of shape (devices,); where one process drives all devices, (1,).
        """
        return map_tensors(self._rows_of_all, tensors)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of a number over all processes. Collective."""
        if not self.engine.job.launched:
            return value
        return self.engine.group.all_reduce_mean(self._for_collectives(value))

    def _for_collectives(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor where torch.distributed takes it: one that is still to be computed on the host."""
        return value.cpu() if self.engine.is_lazy else value

    def gather_for_metrics(self, tensors: Any, use_gather_object: bool = False) -> Any:
        """Return the dataset's rows of tensors that have one for each sample, in its order, on the host. Collective."""

        def own_rows(tensor: torch.Tensor) -> torch.Tensor:
            return self._rows_of_all(tensor)[: self.num_rows if tensor.dim() else None]

        return map_tensors(own_rows, tensors)

    def pad_across_processes(self, tensors: Any, dim: int = 0, pad_index: int = 0) -> Any:
        """Lengthen tensors along a dim to the longest of all processes. Collective."""

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() <= dim:
                return tensor
            lengths = self.engine.group.all_gather_objects(tensor.shape[dim])
            missing = max(lengths) - tensor.shape[dim]
            if not missing:
                return tensor
            shape = (*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
            return torch.cat([tensor, tensor.new_full(shape, pad_index)], dim)

        return map_tensors(padded, tensors) if self.engine.job.launched else tensors

    def _rows_of_all(self, tensor: torch.Tensor) -> torch.Tensor:
        shape = tensor.shape or (1,)
        flat = self.sharded.shards.fetch([tensor.detach()])[0]
        if not self.engine.job.launched:
            return flat.view(shape)
        gathered = self.engine.group.gather(flat, None, rank0_only=False)
        assert gathered is not None
        of_ranks = gathered.view(self.engine.job.num_processes, *shape)
        mesh = self.engine.mesh
        shards = [mesh.data_parallel_rank(rank) for rank in range(len(of_ranks))]
        return torch.cat([of_ranks[shards.index(shard)] for shard in range(mesh.data_parallel_size)])
