"""Groups of processes that stay alive and take turns: a block of training steps each, while the others sleep."""

import argparse
import json
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from _machine import OtherWork, checkout_environment
from _report import Block, Result
from tqdm import tqdm

SETTLING_STEPS = 2  # after the first one: where the optimizer makes its state late, the second compiles again
ANSWER_TIMEOUT_SECS = 600.0


def parse_turns(doc: str | None, names: Sequence[str], quick: Sequence[str]) -> argparse.Namespace:
    """Read the command line of a program whose cases take turns.

    Args:
        doc: The program's docstring.
        names: Of its cases.
        quick: Those that `--quick` runs.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, help="turns of each case (default: 6)")
    parser.add_argument("--steps-per-round", type=int, help="steps in one turn (default: 3)")
    parser.add_argument("--cases", nargs="+", choices=names, metavar="CASE", help="; ".join(names))
    parser.add_argument("--quick", action="store_true", help="two cases and one step, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 6)
    args.steps_per_round = args.steps_per_round or (1 if args.quick else 3)
    args.cases = args.cases or (quick if args.quick else names)
    if args.rounds < 1 or args.steps_per_round < 1:
        parser.error("--rounds and --steps-per-round are at least 1")
    return args


class CaseError(Exception):
    """A process of a case ended or did not answer."""


class Team:
    """The processes of one case; they sleep until they are asked for something.

    Args:
        name: The case's.
        command: What runs it, in each process: it answers lines on stdin, as `_worker.serve()` does.
        logs: Folder for what the processes write to stderr.
        processes: How many, started as `torchrun` would; one alone is started as `python` would.
        environment: Variables that are set where the caller's environment has none.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        logs: Path,
        *,
        processes: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._command = command
        self._environment = dict(environment or {})
        self._log_paths = [logs / f"{name}.{rank}.log" for rank in range(processes)]
        self._processes: list[subprocess.Popen[str]] = []

    def start(self) -> list[dict[str, Any]]:
        """Start the processes, as a launcher would, and wait until all have set up."""
        port = _free_port()
        for rank, log_path in enumerate(self._log_paths):
            with log_path.open("w") as log:
                self._processes.append(
                    subprocess.Popen(
                        self._command,
                        env=launch_environment(rank, len(self._log_paths), port, self._environment),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                )
        return self._collect()

    def take(self, steps: int) -> list[dict[str, Any]]:
        """Let all processes take steps, and return their answers by rank."""
        return self.ask(steps=steps)

    def ask(self, **question: Any) -> list[dict[str, Any]]:
        """Ask all processes, and return their answers by rank."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise CaseError(self._last_words(self._processes.index(process))) from None
        return self._collect()

    def stop(self, *, patience_secs: float = 20.0) -> None:
        """End the processes: those that wait for a question end by themselves."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(patience_secs)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _collect(self) -> list[dict[str, Any]]:
        """Return one line from each process; a process that ends instead leaves the others waiting for it forever."""
        answers: dict[int, dict[str, Any]] = {}
        waiting: dict[IO[str], int] = {p.stdout: rank for rank, p in enumerate(self._processes) if p.stdout is not None}
        deadline = time.monotonic() + ANSWER_TIMEOUT_SECS
        while waiting:
            readable, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise CaseError(f"no answer from rank {min(waiting.values())} in {ANSWER_TIMEOUT_SECS:.0f} s")
            for stream in readable:
                rank, line = waiting.pop(stream), stream.readline()
                if not line:
                    raise CaseError(self._last_words(rank))
                answers[rank] = json.loads(line)
        return [answers[rank] for rank in sorted(answers)]

    def _last_words(self, rank: int) -> str:
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):  # its output has ended, so that it is about to
            process.wait(5.0)
        lines = self._log_paths[rank].read_text(errors="replace").strip().splitlines()
        return f"rank {rank} ended with {process.returncode}, its last line: {lines[-1] if lines else 'none'}"


@contextmanager
def running(teams: Sequence[Team]) -> Iterator[None]:
    """End all teams afterwards, whether they have been started or not."""
    try:
        yield
    finally:
        for team in teams:
            team.stop(patience_secs=20.0 if sys.exc_info()[0] is None else 0.0)


def warm_up(teams: Sequence[Team], results: Mapping[str, Result]) -> None:
    """Start each case, alone, and take its first steps, in which it compiles."""
    for team in progress(teams, "first steps"):
        result = results[team.name]
        with noting_failure(team, result):
            answers = team.start()
            result.cannot_run = answers[0].get("cannot_run")
            if result.cannot_run is not None:
                continue
            result.setup_secs = max(answer["setup_secs"] for answer in answers)
            for steps in (1, SETTLING_STEPS):
                answers = team.take(steps)
                result.first_step_secs = result.first_step_secs or max(answer["secs"] for answer in answers)
                result.compiles = int(answers[0]["compiles"])
                result.losses += mean_losses(answers)


def take_turns(teams: Sequence[Team], results: Mapping[str, Result], rounds: int, steps: int) -> None:
    """Let the cases take blocks of steps in turn, every second round backwards."""
    ended = {team.name: time.perf_counter() for team in teams}
    turns = [(index, team) for index in range(rounds) for team in (teams if index % 2 == 0 else reversed(teams))]
    for index, team in progress(turns, "rounds"):
        result = results[team.name]
        if not result.takes_part:
            continue
        with noting_failure(team, result):
            waited = time.perf_counter() - ended[team.name]
            answers, other_cores = _take_watched(team, steps)
            ended[team.name] = time.perf_counter()
            result.blocks[index] = Block(
                step_secs=max(answer["secs"] for answer in answers) / steps,
                cpu_secs=sum(answer["cpu_secs"] for answer in answers) / steps,
                idle_cpu_secs=sum(answer["idle_cpu_secs"] for answer in answers),
                wait_secs=waited,
                other_cores=other_cores,
            )
            result.losses += mean_losses(answers)
            result.late_compiles = int(answers[0]["compiles"]) - result.compiles


def mean_losses(answers: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the global batch's loss at each step of a block, whether each rank tells that or its own."""
    return [statistics.mean(of_step) for of_step in zip(*(answer["losses"] for answer in answers), strict=True)]


@contextmanager
def noting_failure(team: Team, result: Result) -> Iterator[None]:
    """End a team whose process fails, and note why; the others go on."""
    try:
        yield
    except CaseError as error:
        result.error = str(error)
        tqdm.write(f"{team.name} failed: {error}", file=sys.stderr)
        team.stop(patience_secs=0.0)


def progress(items: Sequence[Any], title: str) -> Any:
    """Return the items, and show on stderr how far a loop over them is."""
    return tqdm(items, desc=title, file=sys.stderr, dynamic_ncols=True)


def launch_environment(rank: int, processes: int, port: int, defaults: Mapping[str, str]) -> dict[str, str]:
    """Return what `torchrun` gives to a process, or `python` where there is only one.

    Args:
        rank: Of the process.
        processes: How many there are.
        port: Where they meet.
        defaults: Variables that are set where the caller's environment has none.
    """
    launcher = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    environment = {name: value for name, value in checkout_environment().items() if name not in launcher}
    if processes > 1:
        environment |= launcher
        environment.setdefault("OMP_NUM_THREADS", "1")
    return {**defaults, **environment}


def _take_watched(team: Team, steps: int) -> tuple[list[dict[str, Any]], float | None]:
    """Return the answers, and how many cores were busy meanwhile with the work of others."""
    other_work = OtherWork()
    answers = team.take(steps)
    return answers, other_work.cores(sum(answer["cpu_secs"] for answer in answers))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
