"""Run the benchmarks one after another.

    python -m benchmarks             # all that run on a CPU
    python -m benchmarks compile     # some
    python -m benchmarks --quick     # the smallest sizes, to see that all works; writes nothing here

Each benchmark is a program of its own (`python benchmarks/NAME.py --help`).
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))  # where the programs, too, find what they share

from _machine import checkout_environment  # noqa: E402

RESULTS = FOLDER / "results"
PROFILES = {
    "cpu": ("memory", "compile", "checkpoint"),
    "gpu": (),
}
"""Which programs there are for a kind of machine, in the order in which they run and are reported."""


def main() -> int:
    """Run what the command line says."""
    args = parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmarks_") as scratch:
        results = args.results or (Path(scratch) if args.quick else RESULTS)
        failed = run_programs(args.cases, results, quick=args.quick)
    return 1 if failed else 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="what to run (default: all of the profile)")
    parser.add_argument("--profile", choices=PROFILES, default="cpu", help="for which machine (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that all works")
    parser.add_argument("--results", type=Path, metavar="DIR", help=f"for the JSON (default: {RESULTS})")
    args = parser.parse_args()
    known = PROFILES[args.profile]
    unknown = [name for name in args.cases if name not in known]
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]!r}; there are {', '.join(known)}")
    args.cases = [name for name in known if name in args.cases or not args.cases]
    return args


def run_programs(names: list[str], results: Path, *, quick: bool) -> list[str]:
    """Run programs in processes of their own, and return those that failed."""
    started, failed = time.perf_counter(), []
    results.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(names):
        before = time.perf_counter()
        say(f"[{index + 1}/{len(names)}] {name}")
        command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(results / f"{name}.json")]
        done = subprocess.run([*command, *(["--quick"] if quick else [])], env=checkout_environment(), check=False)
        if done.returncode:
            failed.append(name)
        say(f"[{index + 1}/{len(names)}] {name} ended with {done.returncode} in {time.perf_counter() - before:.0f} s")
    say(f"{len(names)} benchmarks in {(time.perf_counter() - started) / 60:.1f} min" + _list_failed(failed))
    return failed


def say(line: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _list_failed(names: list[str]) -> str:
    return f"; FAILED: {', '.join(names)}" if names else ""


if __name__ == "__main__":
    sys.exit(main())
