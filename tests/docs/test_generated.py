"""The reference pages say what the code says, and the API page names everything that is public."""

import importlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
PUBLIC = (
    "torchacc",
    "torchacc.checkpoint",
    "torchacc.dist",
    "torchacc.integrations.hf",
    "torchacc.launch",
    "torchacc.train",
)

PAGES = runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]()


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_that_of_the_code(name):
    written = (REFERENCE / name).read_text(encoding="utf-8")
    assert written == PAGES[name], f"docs/reference/{name} is old: run `python docs/generate.py`"


@pytest.mark.parametrize("module", PUBLIC)
def test_the_api_page_has_every_public_name(module):
    page = (REFERENCE / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\.\. auto\w+:: (\S+)", page, re.MULTILINE))
    package = importlib.import_module(module)
    names = {f"{module}.{name}" for name in package.__all__}
    submodules = {name for name in names if re.search(rf"^##+ .*`{re.escape(name)}`", page, re.MULTILINE)}
    assert names - submodules <= documented
    assert all(hasattr(package, name.rpartition(".")[2]) for name in documented if name.rpartition(".")[0] == module)
