"""The wheel alone, in an empty folder: nothing is read from the checkout that it was built from."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("installed_program.py")
BUILT_FROM = (
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "requirements-native.txt",
)
SECONDS = 500


def ended(*command, cwd, **variables):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env | variables, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source)
    for name in ("torchacc", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    # An older setuptools cannot write wheels by itself; pip then fetches a newer one.
    here = ["--no-build-isolation"] if Version(version("setuptools")) >= Version("77") else []
    ended(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *here, "-w", built, source, cwd=built)
    (path,) = built.glob("*.whl")
    return path


@pytest.mark.parametrize(("folder", "prefix"), [("torchacc", ""), ("examples", "share/torchacc/")])
def test_the_wheel_holds_all_files_of_a_folder(wheel, folder, prefix):
    held = {name.partition(".data/data/")[2] or name for name in zipfile.ZipFile(wheel).namelist()}
    files = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    assert held >= {prefix + file for file in files.stdout.split()}


def test_from_the_wheel_alone_a_newcomer_trains(wheel, tmp_path):
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", installed)
    ended(*pip, wheel, cwd=tmp_path)
    said = ended(sys.executable, PROGRAM, installed, cwd=empty, PYTHONPATH=str(installed))
    assert "step 10/10  loss" in said
    assert "torchacc train  " in said
    helped = ended(sys.executable, installed / "bin" / "torchacc", "--help", cwd=empty, PYTHONPATH=str(installed))
    assert "quickstart" in helped
