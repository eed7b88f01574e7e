"""The README's picture of losses, and the sentence below it, are of the numbers beside the picture."""

import json
import re

import pytest
from pages import ROOT

IMAGES = ROOT / "docs" / "images"


@pytest.fixture(scope="module")
def losses() -> dict[str, list[float]]:
    return json.loads((IMAGES / "engine_losses.json").read_text(encoding="utf-8"))


def test_the_sentence_below_the_picture_is_measured(losses):
    reference, *engines = losses.values()
    assert len(engines) == 3
    largest = max(abs(a - b) / b for engine in engines for a, b in zip(engine, reference, strict=True))
    said = re.search(r"off by more than (\S+) of it", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert said is not None
    assert largest <= float(said[1]) < 2 * largest


def test_the_model_has_learned_something(losses):
    assert all(engine[-1] < 0.8 * engine[0] for engine in losses.values())
