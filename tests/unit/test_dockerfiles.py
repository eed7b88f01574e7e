"""The container files copy what the package is built from, and ask for what it has. Docker cannot run here."""

import ast
import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(path):
    """Return (instruction, arguments) of each line, continuations put together and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def carried(name):
    """Return whether .dockerignore lets a name of the root through; the last line that fits decides."""
    found = False
    for line in (ROOT / ".dockerignore").read_text().split():
        if fnmatch.fnmatch(name, line.removeprefix("!")):
            found = line.startswith("!")
    return found


def test_there_is_one_for_cpus_and_one_for_cuda():
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_instruction_is_one(path):
    known = {"FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "CMD"}
    assert {word for word, _ in instructions(path)} <= known
    for word, arguments in instructions(path):
        if word == "CMD":
            assert all(isinstance(part, str) for part in ast.literal_eval(arguments))
        if word == "FROM":
            assert re.fullmatch(r"python:3\.1[0-3]-slim( AS \w+)?", arguments)
    assert [word for word, _ in instructions(path)][-1] == "CMD"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_copies_what_the_package_is_built_from(path):
    copied = set()
    for word, arguments in instructions(path):
        if word == "COPY" and not arguments.startswith("--from"):
            copied |= set(arguments.split()[:-1])
    assert all((ROOT / name).exists() and carried(name) for name in copied)
    read = set(re.findall(r'ROOT / "([^"]+)"', (ROOT / "setup.py").read_text()))
    included = set((ROOT / "MANIFEST.in").read_text().removeprefix("include").split())
    assert copied >= read | included | {"torchacc", "setup.py", "pyproject.toml"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_asks_for_extras_that_there_are(path):
    extras = set(re.findall(r'^ +"([a-z0-9-]+)": ', (ROOT / "setup.py").read_text(), re.MULTILINE))
    asked = set(re.findall(r"\[([a-z-]+)\]\"", path.read_text()))
    assert asked == ({"xla-cuda"} if path.name.startswith("cuda") else set())
    assert asked <= extras
