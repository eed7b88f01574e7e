"""Python's standard library as training text: it is on every machine, so that nothing has to be downloaded."""

import os
import sysconfig
from pathlib import Path

# Tests, tables and data in the clothes of code, and what is not the standard library's own.
_SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "distutils"),
    *("encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"),
}


def stdlib_files() -> list[Path]:
    """List the modules of the standard library in a fixed order, without its tests and tables."""
    found: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)  # what is taken out here is not walked
        found += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return sorted(found)


def stdlib_documents() -> list[str]:
    """Read the modules of the standard library, one document each, about 8 MB in all."""
    return [path.read_text(encoding="utf-8", errors="replace") for path in stdlib_files()]
