import ast
import importlib.metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from torchacc.engines.patches import versions

FOLDER = Path(versions.__file__).parent
NOT_PATCHES = {"torch_compile", "__init__", "private_names", "torch_patches", "versions"}


def test_every_patch_has_its_versions():
    files = {path.stem for path in FOLDER.glob("*.py")} - NOT_PATCHES
    tree = ast.parse((FOLDER / "torch_patches.py").read_text(encoding="utf-8"))
    contexts = {
        each.name
        for each in tree.body
        if isinstance(each, ast.FunctionDef) and "contextmanager" in map(ast.unparse, each.decorator_list)
    }
    assert versions.PATCHES.keys() == files | contexts


@pytest.mark.parametrize("patch", versions.PATCHES)
def test_a_patch_is_for_what_is_installed_or_for_xla_alone(patch):
    wanted = versions.PATCHES[patch]
    try:
        installed = importlib.metadata.version(wanted.library)
        importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torch_xla or the library is not installed")
    assert installed in SpecifierSet(wanted.versions), wanted.changes
