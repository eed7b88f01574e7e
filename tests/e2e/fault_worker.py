"""Ask a run to end by SIGTERM, and let it go on; test_checkpoint_faults.py looks at the report. Kills are in kills.py.

    python fault_worker.py sigterm KIND NUM_DEVICES FOLDER
    torchrun --nproc_per_node=NUM_DEVICES fault_worker.py train KIND NUM_DEVICES FOLDER

Each attempt forks the processes of a run from this one, which has imported everything and started nothing. What it
leaves must be complete, of the step at which it ended, and continue with the losses of an undisturbed run.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
from tests.forkrun import free_port

WIDTH = 96
ROWS_PER_DEVICE = 2
NUM_BATCHES = 14
SECONDS_TO_RUN = 500


class Attempt:
    """The processes of one run, forked from this one, and what they tell."""

    def __init__(self, act, num_processes: int, **options) -> None:
        self.num_processes = num_processes
        self.told: list[dict] = []
        self.codes: dict[int, int] = {}
        self._text = b""
        port = free_port()
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.pids = [self._fork(rank, writer, port, act, options) for rank in range(self.num_processes)]
        os.close(writer)

    def _fork(self, rank, writer, port, act, options) -> int:
        sys.stdout.flush()
        if pid := os.fork():
            return pid
        code = 1
        try:
            environ = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            environ |= {"WORLD_SIZE": self.num_processes, "LOCAL_WORLD_SIZE": self.num_processes}
            os.environ.update({name: str(value) for name, value in environ.items()})

            def tell(event, **details) -> None:
                line = json.dumps({"rank": rank, "event": event, "at": time.monotonic(), **details})
                os.write(writer, (line + "\n").encode())

            act(tell, **options)
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            with contextlib.suppress(BaseException):
                tell("error", text=f"{type(error).__name__}: {error}"[:500])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    @property
    def was_killed(self) -> bool:
        """Whether any process was, before it had come to its end."""
        return -signal.SIGKILL in self.codes.values()

    def errors(self) -> list[str]:
        """Return what the processes have ended with."""
        return [event["text"] for event in self.events("error")]

    def events(self, name: str, rank: int | None = None) -> list[dict]:
        self._read()
        return [e for e in self.told if e["event"] == name and rank in (None, e["rank"])]

    def wait_for(self, name: str, count: int, rank: int = 0) -> bool:
        """Wait until a rank has told something so often; False where it has ended before."""
        deadline = time.monotonic() + SECONDS_TO_RUN
        while len(self.events(name, rank)) < count:
            if self.codes or time.monotonic() > deadline:
                return False
            self._reap(os.WNOHANG)
            select.select([self._reader], [], [], 0.05)
        return True

    def kill(self, ranks, number=signal.SIGKILL) -> None:
        for rank in ranks:
            if rank not in self.codes:
                os.kill(self.pids[rank], number)

    def end(self) -> None:
        """Wait for the processes' end."""
        deadline = time.monotonic() + SECONDS_TO_RUN
        while len(self.codes) < self.num_processes:
            if time.monotonic() > deadline:
                self.kill(range(self.num_processes))
            self._reap(os.WNOHANG)
            self._read()
            time.sleep(0.002)
        self._read()
        os.close(self._reader)
        self._reader = -1

    def _reap(self, options: int) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                done, status = os.waitpid(pid, options)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)

    def _read(self) -> None:
        while self._reader >= 0 and select.select([self._reader], [], [], 0)[0]:
            data = os.read(self._reader, 1 << 16)
            if not data:
                return
            *lines, self._text = (self._text + data).split(b"\n")
            self.told += [json.loads(line) for line in lines]


def build(kind: str, num_devices: int) -> tuple:
    """Return a sharded model with dropout, its loader and its optimizer, the same in each run."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import torchacc

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = torchacc.Config()
    config.backend = kind.partition("-")[0]
    config.dist.fsdp.use_spmd = kind == "xla-spmd"
    config.dist.fsdp.size = num_devices
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    data = TensorDataset(torch.randn(NUM_BATCHES * ROWS_PER_DEVICE, 8))
    model, loader = torchacc.accelerate(model, DataLoader(data, ROWS_PER_DEVICE, shuffle=True), config)
    return model, loader, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(tell, *, kind, num_devices, folder=None, steps=0, every_steps=None, pause=0.0) -> None:
    """Train from the last checkpoint on, and tell of each step and each save."""
    import torchacc

    model, loader, optimizer = build(kind, num_devices)
    manager, step = None, 0
    if folder is not None:
        manager = torchacc.checkpoint.CheckpointManager(
            folder,
            model=model,
            optimizer=optimizer,
            loader=loader,
            keep=2,
            every_steps=every_steps,
        )
        restored = manager.restore()
        step = restored.step if restored else 0
        tell("restored", step=step)
    last = step + steps
    while step < last:
        for (x,) in loader:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
            tell("step", step=step, loss=loss.item())
            if manager is not None:
                manager.save_if_due(step)
            time.sleep(pause)
            if step == last:
                break
    if manager is not None:
        manager.close()
        tell("saved", step=step)


class Supervisor:
    """Ends attempts, and notes what is wrong with what they leave."""

    def __init__(self, kind: str, num_devices: int, folder: Path) -> None:
        self.kind, self.num_devices, self.folder = kind, num_devices, folder
        self.steps: list[dict] = []
        """What was told of each step, some of them made more than once."""
        self.faults: list[str] = []
        self.acknowledged = 0

    def start(self, **options) -> Attempt:
        num_processes = 1 if self.kind == "xla-spmd" else self.num_devices
        return Attempt(train, num_processes, kind=self.kind, num_devices=self.num_devices, **options)

    def look_at(self, attempt: Attempt) -> None:
        """Note what is wrong with what an attempt has told."""
        for event in attempt.events("restored"):
            if event["step"] < self.acknowledged:
                self.faults.append(f"restored step {event['step']}, and {self.acknowledged} had been saved")
        if not attempt.events("restored"):
            self.faults.append(f"nothing was restored: {attempt.codes} {attempt.errors()}")
        self.steps += attempt.events("step")
        self.acknowledged = max([self.acknowledged, *(event["step"] for event in attempt.events("saved"))])

    def end_by_signal(self) -> None:
        """Send SIGTERM to one process."""
        attempt = self.start(folder=str(self.folder), steps=1000, every_steps=10**6, pause=0.02)
        attempt.wait_for("step", 3)
        attempt.kill([attempt.num_processes - 1], signal.SIGTERM)
        attempt.end()
        if set(attempt.codes.values()) != {143}:
            self.faults.append(f"SIGTERM ended the processes with {attempt.codes}")
        steps = {max(event["step"] for event in attempt.events("step", r)) for r in range(attempt.num_processes)}
        found = [path.name for path in self.folder.iterdir()]
        if [f"step-{step:08d}" for step in steps] != found:
            self.faults.append(f"the processes ended after the steps {steps}, and there is {found}")
        self.look_at(attempt)
        self.acknowledged = max(steps)

    def go_on(self) -> None:
        """Let the run go on undisturbed."""
        attempt = self.start(folder=str(self.folder), steps=3, every_steps=1)
        attempt.end()
        self.look_at(attempt)
        if set(attempt.codes.values()) != {0}:
            self.faults.append(f"an undisturbed attempt ended with {attempt.codes}")

    def compare(self) -> None:
        """Compare all losses with those of a run that is undisturbed, and saves nothing."""
        undisturbed = self.start(steps=max(event["step"] for event in self.steps))
        undisturbed.end()
        expected = {(event["rank"], event["step"]): event["loss"] for event in undisturbed.events("step")}
        for event in self.steps:
            if event["loss"] != expected.get((event["rank"], event["step"])):
                self.faults.append(f"{event} has not the loss of an undisturbed run")


def import_everything(kind: str) -> None:
    """Import here what each attempt would import by itself."""
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    import torchacc  # noqa: F401

    if kind.startswith("xla"):
        os.environ.update(PJRT_DEVICE="CPU", TF_CPP_MIN_LOG_LEVEL="2")
        import torch_xla  # noqa: F401


def main() -> None:
    mode, kind, num_devices, folder = sys.argv[1:]
    import_everything(kind)
    if mode == "train":
        rank = os.environ["RANK"]
        options = {"folder": folder, "steps": 2000, "every_steps": 10**6, "pause": 0.02}

        def tell(event, **details) -> None:
            os.write(1, f"{rank} {event} {details}\n".encode())  # print() lets ranks write into each other's lines

        train(tell, kind=kind, num_devices=int(num_devices), **options)
        return
    run = Supervisor(kind, int(num_devices), Path(folder))
    run.end_by_signal()
    run.go_on()
    run.compare()
    print("REPORT " + json.dumps({"faults": run.faults}))


if __name__ == "__main__":
    main()
