"""Run the benchmarks one after another, and write the report.

    python -m benchmarks                     # all that run on a CPU, then the report
    python -m benchmarks step_time compile   # some, then the report
    python -m benchmarks --again             # the same, and keep the ratios of the earlier runs beside the new ones
    python -m benchmarks report              # the report alone, from what is in benchmarks/results
    python -m benchmarks --quick             # the smallest sizes, to see that all works; changes nothing here
    python -m benchmarks structure           # what the source is built of; measures nothing
    python -m benchmarks walks               # which files four calls walk through

Needs `pip install -e '.[test]' -r benchmarks/requirements.txt`; a rival that is not installed is left out, and so
is what needs an extra of torchacc that is not, unless it is named.

The report is docs/benchmarks.md with its plots, and the figures in the README. Each benchmark is also a program of its
own: `python benchmarks/NAME.py --help`.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # where the programs, too, find what they share

from _machine import ROOT, checkout_environment
from _plots import draw
from _programs import FOLDER, PROFILES, RESULTS, ResultsError, missing_extra, read_reports
from _render import IMAGES, plots_of, put_figures, render_figures, render_page
from _results import keep_earlier, read, write
from structure import main as print_structure
from walks import main as print_walks

REFUSED = 2
"""How a program ends that could not begin, such as one for GPUs where there is none."""
INTERRUPTED = 130
PATIENCE_SECS = 30.0


def main() -> int:
    """Run what the command line says."""
    if sys.argv[1:2] == ["structure"]:
        return print_structure(sys.argv[2:])
    if sys.argv[1:2] == ["walks"]:
        return print_walks(sys.argv[2:])
    args = parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmarks_") as scratch:
        results = args.results or (Path(scratch) if args.quick else RESULTS)
        try:
            check_results(results, args.cases, again=args.again)
            failed = run_programs(args.cases, results, quick=args.quick, again=args.again)
            page = write_report(results)
        except ResultsError as error:
            say(f"python -m benchmarks: error: {error}")
            return REFUSED
        except KeyboardInterrupt:
            say(f"stopped; the results of what has ended are in {results}, and `report` renders them")
            return INTERRUPTED
        if page is not None and results != Path(scratch):
            say(f"the report is {page}")
    return 1 if failed or page is None else 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help="what to run (default: all of the profile), or only `report`"
    )
    parser.add_argument("--profile", choices=PROFILES, default="cpu", help="for which machine (default: cpu)")
    parser.add_argument("--again", action="store_true", help="show the ratios of earlier runs beside the new ones")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that all works")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="for the JSON and a report of its own (default: those committed)"
    )
    args = parser.parse_args()
    if args.cases == ["report"] and not args.quick:
        args.cases = []
        return args
    if "report" in args.cases:
        parser.error("`report` runs nothing, and stands alone: with --results DIR, or for what is committed")
    known = PROFILES[args.profile]
    for name in args.cases:
        if name not in known:
            other = next((profile for profile, names in PROFILES.items() if name in names), None)
            where = f"; that is of --profile {other}" if other else ""
            parser.error(f"no benchmark is called {name!r}{where}; there are {', '.join(known)}")
    args.cases = [name for name in known if name in args.cases] or list(runnable(known))
    return args


def runnable(names: Sequence[str]) -> Iterator[str]:
    """Yield the programs whose extra is installed, and tell which are left out."""
    for name in names:
        if (extra := missing_extra(name)) is None:
            yield name
        else:
            say(f"{name} is left out: it needs `pip install 'torchacc[{extra}]'`")


def check_results(results: Path, names: list[str], *, again: bool) -> None:
    """Make a folder for results, and see that the report can be written of what is in it, before anything runs.

    Raises:
        ResultsError: It cannot.
    """
    try:
        if names:
            results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results):
            pass
    except OSError as error:
        raise ResultsError(f"--results {results}: cannot write there: {error.strerror}") from None
    read_reports(results, leave_out=[] if again else names)


def run_programs(names: list[str], results: Path, *, quick: bool, again: bool = False) -> list[str]:
    """Run programs in processes of their own, and return those that failed."""
    started, failed = time.perf_counter(), []
    for index, name in enumerate(names):
        before = time.perf_counter()
        say(f"[{index + 1}/{len(names)}] {name}")
        path, new = results / f"{name}.json", results / f"{name}.json.new"
        new.unlink(missing_ok=True)
        code = run_program([sys.executable, str(FOLDER / f"{name}.py"), "--json", str(new)], quick=quick)
        if code:
            failed.append(name)
        if new.exists():
            if again and path.exists():
                report = read(new)
                keep_earlier(report, read(path))
                write(report, new)
            new.replace(path)
        elif code != REFUSED:
            path.unlink(missing_ok=True)  # what an earlier run found is not to stand for one that failed
        say(f"[{index + 1}/{len(names)}] {name} ended with {code} in {time.perf_counter() - before:.0f} s")
    if names:
        say(f"{len(names)} benchmarks in {(time.perf_counter() - started) / 60:.1f} min" + _list_failed(failed))
    return failed


def run_program(command: list[str], *, quick: bool) -> int:
    """Run a program and return how it ended; where Ctrl-C ends both, wait until it has ended its own processes."""
    with subprocess.Popen([*command, *(["--quick"] if quick else [])], env=checkout_environment()) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_SECS)
            process.kill()
            raise


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
