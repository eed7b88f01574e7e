"""The benchmarks that there are, and where their committed results lie."""

from pathlib import Path

from _results import Report, read

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
PROFILES = {
    "cpu": (
        "step_time",
        "memory",
        "compile",
        "checkpoint",
        "scaling",
        "input_pipeline",
        "trainer_overhead",
        "fsdp_claims",
    ),
    "gpu": ("gpu",),
}
"""The programs for a kind of machine, in the order in which they run and are reported."""


def read_reports(results: Path = RESULTS) -> list[Report]:
    """Return what lies in a folder, in the order of the profiles."""
    names = [name for programs in PROFILES.values() for name in programs]
    paths = [results / f"{name}.json" for name in names]
    return [read(path) for path in paths if path.exists()]
