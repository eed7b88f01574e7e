import subprocess
import time

import pytest

from tests import forkrun
from torchacc.env import Job
from torchacc.launch import progress
from torchacc.launch.progress import Phase

PROGRAM = """
import sys, time
import torch
import torchacc
from torchacc.launch import progress
from torchacc.launch.progress import Phase

def standing():
    record = progress.read(folder, 0)
    return record.step, record.own_steps, record.phase

folder = progress.Path(sys.argv[1])
config = torchacc.Config()
config.backend = "native"
batches = [torch.randn(2, 4) for _ in range(6)]
assert progress.read(folder, 0) is None
model, loader = torchacc.accelerate(torch.nn.Linear(4, 1), batches, config)
assert standing() == (0, 0, Phase.START)
seen = []
optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
progress.resumed(100)
for index, x in enumerate(loader):
    assert standing() == (100 + index, index, Phase.DATA)
    optimizers[0].register_step_pre_hook(lambda *_: seen.append(standing())) if index == 0 else None
    loss = model(x).mean()
    assert standing() == (100 + index, index, Phase.BACKWARD)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert (100 + index, index, Phase.OPTIMIZER) in seen
    assert standing() == (101 + index, index + 1, Phase.STEPPED)
with torch.no_grad():
    model(x)
assert standing() == (106, 6, Phase.EVALUATION)
with progress.during(Phase.SAVING):
    assert standing()[2] == Phase.SAVING
assert standing()[2] == Phase.EVALUATION
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def process(tmp_path):
    """A training loop that has come to its end, and waits there."""
    environ = forkrun.environment(**{progress.FOLDER: str(tmp_path)})
    with subprocess.Popen(
        [forkrun.python(), "-c", PROGRAM, str(tmp_path)], env=environ,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        yield running
        running.kill()


def test_a_training_loop_tells_how_far_it_is_and_where(process, tmp_path):
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    process.send_signal(progress.DUMP_SIGNAL)
    deadline = time.monotonic() + 60
    while "<module>" not in progress.stack_path(tmp_path, 0).read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert 'File "<string>"' in progress.stack_path(tmp_path, 0).read_text()
    assert process.poll() is None
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert progress.read(tmp_path, 0).phase is Phase.ENDING


def test_nothing_is_written_without_a_launcher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    progress.start()
    progress.mark(Phase.FORWARD)
    progress.stepped()
    with progress.during(Phase.SAVING):
        pass
    assert not list(tmp_path.iterdir())
    assert progress.read(tmp_path, 0) is None


def test_a_neighbour_is_read_and_none_of_another_machine(process, tmp_path, monkeypatch):
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    second = Job(rank=5, num_processes=8, local_rank=1, local_num_processes=4)
    assert progress.read_neighbour(second, 4) is None  # no launcher
    monkeypatch.setenv(progress.FOLDER, str(tmp_path))
    assert progress.read_neighbour(second, 4) == progress.read(tmp_path, 0) is not None
    assert progress.read_neighbour(second, 6) is None  # it has not begun
    assert progress.read_neighbour(second, 3) is None
    assert progress.read_neighbour(second, 8) is None
