"""Run a script on two workers of Ray Train, on a cluster of this machine: `ray_script.py TEMP SCRIPT ARGUMENT …`."""

import contextlib
import runpy
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

temporary, script = sys.argv[1:3]
printed = Path(sys.argv[-1]) / "printed"  # Ray puts a prefix before each line that a worker prints


def run(arguments: list[str]) -> None:
    """Run the script as it would run by itself; what rank 0 prints goes to a file."""
    sys.argv = arguments
    rank = ray.train.get_context().get_world_rank()
    with Path(f"{printed}-{rank}").open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(arguments[0], run_name="__main__")


ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, _temp_dir=temporary, object_store_memory=100 << 20)
TorchTrainer(
    run,
    train_loop_config=[script, *sys.argv[3:]],
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=f"{temporary}/storage", failure_config=FailureConfig(max_failures=1)),
).fit()
sys.stdout.write(Path(f"{printed}-0").read_text())
