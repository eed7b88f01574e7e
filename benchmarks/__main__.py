"""Run the benchmarks one after another, and write the report.

    python -m benchmarks                     # all that run on a CPU, then the report
    python -m benchmarks step_time compile   # some, then the report
    python -m benchmarks report              # the report alone, from what is in benchmarks/results
    python -m benchmarks --quick             # the smallest sizes, to see that all works; changes nothing here

The report is docs/benchmarks.md with its plots, and the figures in the README. Each benchmark is also a program of its
own: `python benchmarks/NAME.py --help`.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # where the programs, too, find what they share

from _machine import ROOT, checkout_environment
from _plots import draw
from _programs import FOLDER, PROFILES, RESULTS, read_reports
from _render import IMAGES, plots_of, put_figures, render_figures, render_page

REFUSED = 2
"""How a program ends that could not begin, such as one for GPUs where there is none."""


def main() -> int:
    """Run what the command line says."""
    args = parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmarks_") as scratch:
        results = args.results or (Path(scratch) if args.quick else RESULTS)
        failed = [] if args.report else run_programs(args.cases, results, quick=args.quick)
        page = write_report(results)
        if page is not None and results != Path(scratch):
            say(f"the report is {page}")
    return 1 if failed else 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help="what to run (default: all of the profile), or only `report`"
    )
    parser.add_argument("--profile", choices=PROFILES, default="cpu", help="for which machine (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that all works")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="for the JSON and a report of its own (default: those committed)"
    )
    args = parser.parse_args()
    args.report = args.cases == ["report"]
    if args.report:
        return args
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
        path, new = results / f"{name}.json", results / f"{name}.json.new"
        new.unlink(missing_ok=True)
        command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(new)]
        done = subprocess.run([*command, *(["--quick"] if quick else [])], env=checkout_environment(), check=False)
        if done.returncode:
            failed.append(name)
        if new.exists():
            new.replace(path)
        elif done.returncode != REFUSED:
            path.unlink(missing_ok=True)  # what an earlier run found is not to stand for one that failed
        say(f"[{index + 1}/{len(names)}] {name} ended with {done.returncode} in {time.perf_counter() - before:.0f} s")
    say(f"{len(names)} benchmarks in {(time.perf_counter() - started) / 60:.1f} min" + _list_failed(failed))
    return failed


def write_report(results: Path) -> Path | None:
    """Render what is in a folder of results: the committed ones into docs/ and the README, others beside them.

    Returns:
        The page; None where there are no results.
    """
    reports = read_reports(results)
    if not reports:
        say(f"no results in {results}")
        return None
    committed = results.resolve() == RESULTS
    page = ROOT / "docs" / "benchmarks.md" if committed else results / "benchmarks.md"
    page.write_text(render_page(reports), encoding="utf-8")
    for report in reports:
        for path in (page.parent / IMAGES).glob(f"{report.name}-*.png"):
            path.unlink()
        draw(plots_of(report), page.parent / IMAGES)
    if committed:
        readme = ROOT / "README.md"
        readme.write_text(put_figures(readme.read_text(encoding="utf-8"), render_figures(reports)), encoding="utf-8")
    return page


def say(line: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _list_failed(names: list[str]) -> str:
    return f"; FAILED: {', '.join(names)}" if names else ""


if __name__ == "__main__":
    sys.exit(main())
