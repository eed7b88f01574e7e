"""Time a training step of each engine beside plain PyTorch, hand-written torch_xla and raw FSDP2, in one run.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --rounds 3 --cases eager torch_xla xla-spmd-1

All cases train the same GPT-2 on the same batches, each in processes of its own that stay alive. They take turns, a
block of steps each, while the others sleep. A ratio is the median over rounds of the ratio within one round, so that
what slows the machine down for a while does not end up in it. Compiling happens before the first round.

Exits with 1 if a case fails or ends with another loss than the others; a slow case is reported, not an error.
"""

import argparse
import json
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from _cases import CASES, EXPECTATIONS, GLOBAL_BATCH, HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, Case
from _machine import PACKAGES, OtherWork, checkout_environment, describe_other_work, machine_facts
from _markdown import render_table
from _report import HEADER, Block, Result, differing_losses, judge, table_row
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
SETTLING_STEPS = 2  # after the first one: where the optimizer makes its state late, the second compiles again
ANSWER_TIMEOUT_SECS = 600.0


def main() -> int:
    """Run the cases and print the report."""
    args = parse_args()
    total_steps = 1 + SETTLING_STEPS + args.rounds * args.steps_per_round
    cases = [case for case in CASES if case.name in args.cases]
    if args.worker:
        import _worker  # here, as the parent needs no torch

        _worker.run(next(case for case in CASES if case.name == args.worker), args.total_steps)
        return 0
    results = {case.name: Result() for case in cases}
    with tempfile.TemporaryDirectory(prefix="step_time_") as logs, running(cases, total_steps, Path(logs)) as teams:
        warm_up(teams, results)
        take_turns(teams, results, args.rounds, args.steps_per_round)
    wrong = differing_losses(results)
    sys.stdout.write(make_report(cases, results, wrong, args))
    if args.json:
        args.json.write_text(json.dumps(raw(results, args), indent=1) + "\n")
    return 1 if wrong or any(result.error for result in results.values()) else 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("--rounds", type=int, default=20, help="turns of each case (default: 20)")
    parser.add_argument("--steps-per-round", type=int, default=5, help="steps in one turn (default: 5)")
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all timings there")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--total-steps", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1 or args.steps_per_round < 1:
        parser.error("--rounds and --steps-per-round are at least 1")
    return args


class CaseError(Exception):
    """A process of a case ended or did not answer."""


class Team:
    """The processes of one case; they sleep until they are asked for steps."""

    def __init__(self, case: Case, total_steps: int, logs: Path) -> None:
        self.case = case
        self._total_steps = total_steps
        self._log_paths = [logs / f"{case.name}.{rank}.log" for rank in range(case.processes)]
        self._processes: list[subprocess.Popen[str]] = []

    def start(self) -> list[dict[str, float]]:
        """Start the processes, as a launcher would, and wait until all have set up."""
        port = _free_port()
        command = [sys.executable, __file__, "--worker", self.case.name, "--total-steps", str(self._total_steps)]
        for rank, log_path in enumerate(self._log_paths):
            with log_path.open("w") as log:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=_environment(self.case, rank, port),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                )
        return self._collect()

    def take(self, steps: int) -> list[dict[str, float]]:
        """Let all processes take steps, and return their answers by rank."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"steps": steps}) + "\n")
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

    def _collect(self) -> list[dict[str, float]]:
        """Return one line from each process; a process that ends instead leaves the others waiting for it forever."""
        answers: dict[int, dict[str, float]] = {}
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
def running(cases: Sequence[Case], total_steps: int, logs: Path) -> Iterator[list[Team]]:
    """Yield a team for each case, not yet started, and end them all afterwards."""
    teams = [Team(case, total_steps, logs) for case in cases]
    try:
        yield teams
    finally:
        for team in teams:
            team.stop(patience_secs=20.0 if sys.exc_info()[0] is None else 0.0)


def warm_up(teams: Sequence[Team], results: dict[str, Result]) -> None:
    """Start each case, alone, and take its first steps, in which it compiles."""
    for team in _progress(teams, "first steps"):
        result = results[team.case.name]
        with _noting_failure(team, result):
            result.setup_secs = max(answer["setup_secs"] for answer in team.start())
            result.first_step_secs = max(answer["secs"] for answer in team.take(1))
            result.compiles = int(team.take(SETTLING_STEPS)[0]["compiles"])


def take_turns(teams: Sequence[Team], results: dict[str, Result], rounds: int, steps: int) -> None:
    """Let the cases take blocks of steps in turn, every second round backwards."""
    ended = {team.case.name: time.perf_counter() for team in teams}
    turns = [(index, team) for index in range(rounds) for team in (teams if index % 2 == 0 else reversed(teams))]
    for index, team in _progress(turns, "rounds"):
        result = results[team.case.name]
        if result.error is not None:
            continue
        with _noting_failure(team, result):
            waited = time.perf_counter() - ended[team.case.name]
            answers, other_cores = _take_watched(team, steps)
            ended[team.case.name] = time.perf_counter()
            result.blocks[index] = Block(
                step_secs=max(answer["secs"] for answer in answers) / steps,
                cpu_secs=sum(answer["cpu_secs"] for answer in answers) / steps,
                idle_cpu_secs=sum(answer["idle_cpu_secs"] for answer in answers),
                wait_secs=waited,
                other_cores=other_cores,
            )
            result.loss = statistics.mean(answer["loss"] for answer in answers)
            result.late_compiles = int(answers[0]["compiles"]) - result.compiles


def make_report(cases: Sequence[Case], results: dict[str, Result], wrong: list[str], args: argparse.Namespace) -> str:
    """Return the table, and below it what failed, the losses, the checks, and how far the timings can be trusted."""
    facts = machine_facts()
    lines = [
        f"GPT-2, {LAYERS} layers x {WIDTH}, {HEADS} heads, vocabulary {VOCABULARY}, global batch {GLOBAL_BATCH} x "
        f"{LENGTH}, float32, AdamW; {args.rounds} rounds of {args.steps_per_round} steps on {facts['cores']} cores; "
        + ", ".join(f"{name} {facts[name]}" for name in PACKAGES),
        "",
        render_table(HEADER, [table_row(case, results) for case in cases]),
        "",
        *(f"- FAILED {name}: {result.error}" for name, result in results.items() if result.error is not None),
        *([f"- WRONG LOSS {line}" for line in wrong] or ["- the losses agree"]),
        *(f"- {judge(expectation, results)}" for expectation in EXPECTATIONS if expectation.case in results),
        *(f"- {line}" for line in _trust(results)),
    ]
    return "\n".join(lines) + "\n"


def raw(results: dict[str, Result], args: argparse.Namespace) -> dict[str, Any]:
    """Return everything that was measured, for `--json`."""
    return {
        "machine": machine_facts(),
        "rounds": args.rounds,
        "steps_per_round": args.steps_per_round,
        "cases": {name: asdict(result) for name, result in results.items()},
    }


def _trust(results: dict[str, Result]) -> list[str]:
    """Say what else the machine did: other work, and cases that did not sleep while they waited."""
    blocks = [block for result in results.values() for block in result.blocks.values()]
    lines = []
    others = [block.other_cores for block in blocks if block.other_cores is not None]
    if others:
        lines.append(describe_other_work(others))
    waits = sum(block.wait_secs for block in blocks)
    if waits:
        lines.append(f"a waiting case took {sum(block.idle_cpu_secs for block in blocks) / waits:.4f} cores")
    return lines


@contextmanager
def _noting_failure(team: Team, result: Result) -> Iterator[None]:
    try:
        yield
    except CaseError as error:
        result.error = str(error)
        tqdm.write(f"{team.case.name} failed: {error}", file=sys.stderr)
        team.stop(patience_secs=0.0)


def _take_watched(team: Team, steps: int) -> tuple[list[dict[str, float]], float | None]:
    """Return the answers, and how many cores were busy meanwhile with the work of others."""
    other_work = OtherWork()
    answers = team.take(steps)
    return answers, other_work.cores(sum(answer["cpu_secs"] for answer in answers))


def _environment(case: Case, rank: int, port: int) -> dict[str, str]:
    """Return what `torchrun` gives to a process, or `python` where there is only one."""
    launcher = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(case.processes),
        "LOCAL_WORLD_SIZE": str(case.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    environment = {name: value for name, value in checkout_environment().items() if name not in launcher}
    if case.processes > 1:
        environment |= launcher
        environment.setdefault("OMP_NUM_THREADS", "1")
    if case.kind == "torch_xla":
        environment.setdefault("PJRT_DEVICE", "CPU")
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _progress(items: Sequence[Any], title: str) -> Any:
    return tqdm(items, desc=title, file=sys.stderr, dynamic_ncols=True)


if __name__ == "__main__":
    sys.exit(main())
