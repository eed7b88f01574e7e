"""Time torchacc's training steps in this checkout beside those in another one, such as an earlier commit's.

    git worktree add ../earlier COMMIT
    python benchmarks/beside.py ../earlier [--rounds N] [--cases native-1 xla-spmd-2 …] [--json FILE]

The cases are torchacc's own of `step_time.py`, by its public calls, each once with either checkout; they take turns as
there. Shows whether a change of the code made a step, the first step or the memory worse.
"""

import resource
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from _cases import CASES, QUICK
from _markdown import count
from _report import Results, compare_steps, differing_losses, loss_checks, other_cores, paired_ratios, ratio_cells
from _results import Report, Table, emit
from _teams import exit_status, measure, read_command_line

KINDS = ("native", "native-no-shard", "xla-spmd", "xla-multiprocess")
NOW = [case for case in CASES if case.kind in KINDS]
EARLIER = "earlier:"
BOTH = [each for case in NOW for each in (case, replace(case, name=EARLIER + case.name, reference=None))]
HEADER = [
    *("case", "first step s", "earlier", "programs", "earlier", "step s", "earlier"),
    *("ratio", "quartiles", "MB of a process", "earlier"),
]


def main() -> int:
    """Run the cases with both checkouts, and print the report."""
    args = read_command_line(__doc__, BOTH, QUICK, rounds=10, steps=5, add=_add_root)
    if args.worker:
        _work(args)
        return 0
    if not (args.root / "torchacc").is_dir():
        sys.exit(f"{args.root} has no folder torchacc/: name the root of a checkout")
    chosen = {case.name.removeprefix(EARLIER) for case in args.cases}
    cases = [case for case in BOTH if case.name.removeprefix(EARLIER) in chosen]
    results = measure(__file__, cases, args, arguments=[str(args.root)], questions=lambda case: ["facts"])
    wrong = differing_losses(results)
    emit(_report(chosen, results, wrong, args), args.json)
    return exit_status(results, wrong)


def _add_root(parser: Any) -> None:
    parser.add_argument("root", type=Path, metavar="PATH", help="the other checkout")


def _work(args: Any) -> None:
    case, root = args.worker, Path(__file__).parents[1]
    if case.name.startswith(EARLIER):
        root = args.root.resolve()
        sys.path.insert(0, str(root))
    import _worker  # here, as the parent needs no torch, and after the path is set
    from _training import make_tokens

    import torchacc

    assert Path(torchacc.__file__).parents[1] == root, torchacc.__file__
    _worker.serve(lambda: _worker.BUILDERS[case.kind](case, make_tokens(args.total_steps)), _facts)


def _facts() -> dict[str, Any]:
    return {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _report(chosen: set[str], results: Results, wrong: list[str], args: Any) -> Report:
    pairs = [(case.name, EARLIER + case.name) for case in NOW if case.name in chosen]
    return Report(
        name="beside",
        title="A checkout beside an earlier one",
        setting=f"{count(args.rounds, 'round')} of {count(args.steps_per_round, 'step')}.",
        other_cores=other_cores(results),
        tables=[
            Table(
                title="Medians over rounds; a ratio is taken within a round; memory is the largest resident size",
                header=HEADER,
                rows=[list(_row(name, earlier, results)) for name, earlier in pairs],
            )
        ],
        checks=loss_checks(results, wrong, "the losses of both checkouts agree at every step"),
        comparisons=[
            each
            for name, earlier in pairs
            for each in compare_steps(f"step time of {name}", "the earlier one", results[name], results[earlier])
        ],
    )


def _row(name: str, earlier: str, results: Results) -> Iterator[str]:
    now, then = results[name], results[earlier]
    yield name
    if not (now.takes_part and then.takes_part and now.blocks):
        yield from ["failed", *[""] * (len(HEADER) - 2)]
        return
    yield from (f"{now.first_step_secs:.2f}", f"{then.first_step_secs:.2f}", now.programs, then.programs)
    yield from (f"{now.step_secs:.4f}", f"{then.step_secs:.4f}")
    yield from ratio_cells(paired_ratios(now, then))
    yield from (f"{max(answer['peak_mb'] for answer in each.answers):.0f}" for each in (now, then))


if __name__ == "__main__":
    sys.exit(main())
