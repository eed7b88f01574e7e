"""Run by test_several_hosts.py, on one rank with four devices, or on two ranks that are made-up hosts.

python hosts_program.py FOLDER LAYOUT
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "contract"))
import checkpoint_worker
from checkpoint_worker import STEPS_AFTER, STEPS_BEFORE, Run
from layouts import Layout

import torchacc
from tests import made_up_hosts
from torchacc import api
from torchacc.checkpoint.model_state import StateDictType
from torchacc.checkpoint.save_plan import plan_save
from torchacc.engines.sharded_model import sharded_model
from torchacc.env import read_job
from torchacc.errors import CheckpointError, DataError, EngineError


@dataclass(frozen=True)
class OneProgram(Layout):
    """Four devices of one program."""

    tp: int = 1
    sp: int = 1

    def config(self) -> dict[str, Any]:
        found = super().config()
        found["dist"]["fsdp"]["size"] = 4 // (self.dp * self.tp * self.sp)
        found["dist"] |= {"tp": {"size": self.tp}, "sp": {"size": self.sp}}
        found["dataloader"] = {"prefetch": 0}  # what is made up is collective, and has no thread of its own
        return found


LAYOUTS = {
    "fsdp": OneProgram("xla-spmd", 4),
    "hybrid": OneProgram("xla-spmd", 4, dp=2),
    "tp": OneProgram("xla-spmd", 4, tp=2),
    "sp": OneProgram("xla-spmd", 4, sp=2),
}


def written(run: Run) -> list[str]:
    """Return what the processes would not write exactly once, of the model and of its optimizer."""
    sharded = sharded_model(run.model)
    plan = plan_save(sharded, run.optimizer)
    own = [(str(each.region), each.start, each.data.numel(), each.region.shape) for each in plan.writes(sharded)]
    counts: dict[str, Counter[int]] = {}
    shapes = {}
    for name, start, numel, shape in chain(*sharded.engine.group.all_gather_objects(own)):
        counts.setdefault(name, Counter()).update(range(start, start + numel))
        shapes[name] = shape
    return [name for name, each in counts.items() if each != Counter(range(torch.Size(shapes[name]).numel()))]


def through_full_states(run: Run, folder: Path) -> list[str]:
    """Return what is not as it was once full states have been saved to one file each, and loaded from memory."""
    before = torchacc.full_state_dict(run.model)
    of_optimizer = run.model.full_optim_state_dict(run.optimizer, rank0_only=False)
    torchacc.save(run.model.state_dict(), folder / "weights.pth")
    in_file = torchacc.load(folder / "weights.pth")
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    run.model.load_state_dict(in_file)
    run.optimizer.load_state_dict(run.model.optim_state_dict_to_load(run.optimizer, of_optimizer))
    after = torchacc.full_state_dict(run.model)
    again = run.model.full_optim_state_dict(run.optimizer, rank0_only=False)
    wrong = [name for name, value in before.items() if not torch.equal(value, after[name])]
    for index, entry in of_optimizer["state"].items():
        wrong += [key for key, value in entry.items() if not torch.equal(value, again["state"][index][key])]
    return wrong


def refused(act: Any) -> str:
    try:
        act()
    except (CheckpointError, DataError, EngineError) as error:
        return str(error)
    return "nothing"


def main() -> None:
    folder, layout = Path(sys.argv[1]), LAYOUTS[sys.argv[2]]
    job = read_job()
    if job.launched:
        made_up_hosts.stand_in()
    run = Run(layout)
    batches = run.batches()
    found: dict[str, Any] = {"before": run.train(batches, STEPS_BEFORE)}
    torchacc.checkpoint.save(folder / "saved", **run.parts())
    found["not_written_once"] = written(run)
    found["after"] = run.train(batches, STEPS_AFTER)
    again = Run(layout)
    torchacc.checkpoint.load(folder / "saved", **again.parts())
    found["differences"] = again.differences(folder / "saved")
    found["resumed"] = again.train(again.batches(), STEPS_AFTER)
    found["of_full_states"] = through_full_states(run, folder)
    engine = sharded_model(run.model).engine
    found["data_parallel_ranks"] = list(engine.data_parallel_ranks)
    found["held"] = sum(part.numel for each in sharded_model(run.model).shards.values() for part in each.slices)
    rows = torch.arange(2.0 * len(engine.data_parallel_ranks)).view(-1, 1) + 100 * job.rank
    found["gathered"] = torchacc.dist.all_gather(rows).view(-1).tolist()
    if job.launched:
        ids = torch.zeros(2 * len(engine.data_parallel_ranks), 4 + job.rank, dtype=torch.long)
        found["in_order"] = [each["xla"] for each in engine.group.all_gather_objects(engine.random_state())]
        found["of_other_shapes"] = refused(lambda: run.model(input_ids=ids))
        with torch.set_grad_enabled(job.rank == 0):
            found["in_other_modes"] = refused(lambda: run.model(input_ids=ids[:, :4]))
        found["without_rows"] = refused(lambda: engine.to_device({"number": torch.tensor(3.0)}))
        found["in_shards"] = refused(lambda: api.state_dict(run.model, StateDictType.SHARDED_STATE_DICT))
    (folder / f"rank{job.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    checkpoint_worker.transformers.logging.set_verbosity_error()
    main()
