"""The support page says what setup.py and .ci/run say, and the forms for reports are read by what shows them."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
CI = next((ROOT / ".ci").iterdir()).read_text(encoding="utf-8")
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
REQUIREMENTS = (ROOT / "requirements-native.txt").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+ \| [^|]+?) \|$", PAGE, re.MULTILINE))


def test_versions_of_torch_are_those_that_are_installed():
    pinned = re.search(r'"torch==([\d.]+);.*"torch_xla==([\d.]+);', SETUP).groups()
    assert set(pinned) == set(re.findall(r"\d+\.\d+\.\d+", ROWS["torch with torch_xla"]))
    assert re.search(r"torch==([\d.]+)", CI)[1] in ROWS["torch natively"]


def test_versions_of_the_rest_are_those_that_are_required():
    pythons = re.findall(r"Python :: (3\.\d+)", SETUP)
    assert f"{pythons[0]} to {pythons[-1]}" in ROWS["Python"]
    accelerate = re.search(r"accelerate>=([\d.]+)", SETUP)[1]
    assert f"{accelerate} and later" in ROWS["accelerate, for the Hugging Face Trainer"]
    first, after_last = re.search(r"transformers>=([\d.]+),<([\d.]+)", SETUP).groups()
    assert ROWS["transformers, for the Hugging Face Trainer"].startswith(f"{first} |")
    assert f"transformers>=5,<{after_last}\n" in REQUIREMENTS
    assert f"5.0 to {first}; {after_last} " in ROWS["transformers"]
    torchao = re.search(r"torchao==([\d.]+)[.][*]", SETUP)[1]
    assert f"{torchao} with" in ROWS["torchao, for float8"]


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_a_form_for_reports_has_what_one_needs(name):
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    assert form["name"]
    assert form["description"]
    fields = {field["id"]: field["attributes"] for field in form["body"]}
    assert len(fields) == len(form["body"])
    assert all(field["label"] for field in fields.values())
    assert {field["type"] for field in form["body"]} <= {"textarea", "dropdown"}
    assert name != "bug" or "torchacc env" in fields["env"]["label"]
