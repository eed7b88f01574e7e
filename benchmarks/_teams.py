"""Groups of processes that stay alive and take turns: a block of training steps each, while the others sleep."""

import argparse
import json
import secrets
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from _machine import OtherWork, checkout_environment
from _report import Block, Result, Results
from tqdm import tqdm

SETTLING_STEPS = 2  # after the first one: where the optimizer makes its state late, the second compiles again
ANSWER_TIMEOUT_SECS = 600.0


def read_command_line(
    doc: str | None,
    cases: Sequence[Any],
    quick: Sequence[str],
    *,
    rounds: int,
    steps: int | None = None,
    add: Callable[[argparse.ArgumentParser], None] | None = None,
) -> argparse.Namespace:
    """Read the command line of a program whose cases take turns.

    Args:
        doc: The program's docstring.
        cases: What it can run, each with a `name`.
        quick: Names of those that `--quick` runs, with one round of one step.
        rounds: Turns of each case, unless it says otherwise.
        steps: Steps in a turn; None where the program knows.
        add: Adds options of the program's own.

    Returns:
        The options; `cases` to run, `worker`, the case that this process is to be (None for the program itself), and
        `total_steps` of a case, with one for its memory.
    """
    names = [case.name for case in cases]
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, metavar="N", help=f"turns of each case (default: {rounds})")
    if steps is not None:
        parser.add_argument("--steps-per-round", type=int, metavar="N", help=f"steps in one turn (default: {steps})")
    parser.add_argument("--cases", nargs="+", choices=names, metavar="CASE", help="; ".join(names))
    parser.add_argument("--quick", action="store_true", help="few cases and the smallest sizes, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--worker", choices=[*names, "prepare"], help=argparse.SUPPRESS)
    if add is not None:
        add(parser)
    args = parser.parse_args()
    for name, default in (("rounds", rounds), ("steps_per_round", steps)):
        if getattr(args, name, None) is None:
            setattr(args, name, 1 if args.quick or default is None else default)
        elif getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    args.has_steps = steps is not None
    chosen = args.cases or (quick if args.quick else names)
    args.cases = [case for case in cases if case.name in chosen]
    args.worker = next((case for case in cases if case.name == args.worker), args.worker)
    args.total_steps = 2 + SETTLING_STEPS + args.rounds * args.steps_per_round
    return args


def measure(
    program: str,
    cases: Sequence[Any],
    args: argparse.Namespace,
    *,
    arguments: Sequence[str] = (),
    folder: Path | None = None,
    processes: Callable[[Any], int] = lambda case: getattr(case, "processes", 1),
    environment: Callable[[Any], Mapping[str, str]] = lambda case: {},
    starts: Mapping[str, int] = MappingProxyType({}),
    cannot_run: Callable[[Any], str | None] = lambda case: None,
    questions: Callable[[Any], Sequence[str]] = lambda case: (),
    asks_before: bool = False,
) -> dict[str, Result]:
    """Let cases take turns, each in processes of its own, and return what is measured of them by name.

    Args:
        program: Its file, which `--worker NAME` makes a process of a case.
        cases: What to run.
        args: What `read_command_line()` returned.
        arguments: More of them for the processes.
        folder: For what the processes write to stderr; None for one that is removed.
        processes: How many a case has.
        environment: Variables for a case that are set where the caller's environment has none.
        starts: How often cases are started for a first step, by name; the others once.
        cannot_run: Says why a case is left out.
        questions: What its processes are asked in the end, such as `memory`; the answers are the result's.
        asks_before: Whether the first of them is asked before the rounds as well, from where its answer then counts.
    """
    results = {case.name: Result(cannot_run=cannot_run(case)) for case in cases}
    own = ["--rounds", str(args.rounds), *arguments]
    if args.has_steps:
        own += ["--steps-per-round", str(args.steps_per_round)]
    with tempfile.TemporaryDirectory(prefix=f"{Path(program).stem}_") as logs:
        teams = {
            case.name: Team(
                case.name,
                [sys.executable, program, "--worker", case.name, *own],
                folder or Path(logs),
                processes=processes(case),
                environment=environment(case),
            )
            for case in cases
            if results[case.name].takes_part
        }
        with running(list(teams.values())):
            for turn in range(1, max(starts.values(), default=1)):
                take_first_steps([team for team in teams.values() if turn < starts.get(team.name, 1)], results)
            warm_up(list(teams.values()), results)
            if asks_before:
                _ask(cases, teams, results, lambda case: questions(case)[:1])
                for result in results.values():
                    result.answers.clear()
            take_turns(list(teams.values()), results, args.rounds, args.steps_per_round)
            for case in cases:
                _ask([case], teams, results, questions)
                if case.name in teams:  # what has been asked for its memory keeps some
                    teams[case.name].stop()
    return results


def exit_status(results: Results, wrong: Sequence[str]) -> int:
    """Return how a program ends: with 1 where a case failed, or something is wrong with the losses."""
    return 1 if wrong or any(result.error for result in results.values()) else 0


def _ask(
    cases: Sequence[Any],
    teams: Mapping[str, "Team"],
    results: Results,
    questions: Callable[[Any], Sequence[str]],
) -> None:
    for case in cases:
        for question in questions(case):
            if results[case.name].takes_part:
                with noting_failure(teams[case.name], results[case.name]):
                    results[case.name].answers += teams[case.name].ask(**{question: True})


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
        self._variables: dict[str, str] = {}
        """Those that are set whatever the caller's environment has."""
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
                        env=launch_environment(rank, len(self._log_paths), port, self._environment) | self._variables,
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


def take_first_steps(teams: Sequence[Team], results: Results) -> None:
    """Start each case, alone, for its first step only."""
    for team in progress(teams, "more first steps"):
        with noting_failure(team, results[team.name]):
            _start(team, results[team.name])
        team.stop()


def _start(team: Team, result: Result) -> list[dict[str, Any]]:
    """Start a case, and take its first step; return the answers of that, none where it cannot run."""
    answers = team.start()
    result.cannot_run = answers[0].get("cannot_run")
    if result.cannot_run is not None:
        return []
    result.setup_secs = max(answer["setup_secs"] for answer in answers)
    answers = team.take(1)
    result.first_steps.append(max(answer["secs"] for answer in answers))
    return answers


def warm_up(teams: Sequence[Team], results: Results) -> None:
    """Start each case, alone, and take its first steps, in which it compiles."""
    for team in progress(teams, "first steps"):
        result = results[team.name]
        with noting_failure(team, result):
            answers = _start(team, result)
            if not answers:
                continue
            result.losses += mean_losses(answers)
            answers = team.take(SETTLING_STEPS)
            result.losses += mean_losses(answers)
            result.compiles = int(answers[0]["compiles"])


def take_turns(teams: Sequence[Team], results: Results, rounds: int, steps: int) -> None:
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
    """Return a port that nobody listens at, of those below what the system gives to connections."""
    while True:
        port = secrets.randbelow(12000) + 20000
        with suppress(OSError), socket.create_server(("", port)):
            return port
