"""The benchmarks that there are, and where their committed results lie."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from _results import Report, read
from pydantic import ValidationError

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
        "vocabulary",
        "axes_memory",
        "axes_time",
        "layout_search",
        "many_devices",
        "compiled_for_tpu",
        "scale_on_paper",
    ),
    "gpu": ("gpu",),
}
"""The programs for a kind of machine, in the order in which they run and are reported."""
_OF_TPUS = ("jax", "jaxlib", "libtpu")
EXTRAS = {
    "compiled_for_tpu": ("plan-tpu", _OF_TPUS),
    "scale_on_paper": ("plan-tpu,plan-cuda", (*_OF_TPUS, "jax_plugins")),
}
"""The extra of torchacc that a program needs, and its packages."""


class ResultsError(Exception):
    """A folder of results cannot be read or written."""


def missing_extra(name: str) -> str | None:
    """Return the extra of torchacc that a program needs and that is not installed; None where nothing is missing."""
    extra, packages = EXTRAS.get(name, (None, ()))
    return extra if any(find_spec(package) is None for package in packages) else None


def read_reports(results: Path = RESULTS, *, leave_out: Sequence[str] = ()) -> list[Report]:
    """Return what lies in a folder, in the order of the profiles.

    Args:
        results: The folder.
        leave_out: Benchmarks whose results are not read.

    Raises:
        ResultsError: A file is not what a benchmark of this version writes.
    """
    names = [name for programs in PROFILES.values() for name in programs if name not in leave_out]
    return [_read(name, results / f"{name}.json") for name in names if (results / f"{name}.json").exists()]


def _read(name: str, path: Path) -> Report:
    try:
        return read(path)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ResultsError(
            f"{path} is not what this version writes ({where + ': ' if where else ''}{first['msg']}): measure it anew "
            f"with `python -m benchmarks {name}`, or remove it"
        ) from None
