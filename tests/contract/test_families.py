"""Families of models that transformers has: trained on each engine, on two devices, as plain PyTorch trains them.

Some of each structure here; `--write-tables` tries all on every engine, which takes hours, and writes docs/families.md:

    python -m pytest tests/contract/test_families.py --write-tables

It goes on where it was interrupted: what each came to stays in build/families, until that is removed.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from families import all_families
from family_table import ENGINES, table
from split_families import PAGE
from sweep import sweep

from torchacc.engines.native.verified_plans import VERIFIED_PLANS, fingerprint
from torchacc.parallel.tensor_parallel import FAMILIES

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "families.md"
KEPT = ROOT / "build" / "families"

SOME = {
    "native": [
        "causal-llama",
        "causal-qwen3_moe",
        "causal-mamba",
        "masked-deberta-v2",
        "masked-funnel",
        "seq2seq-bart",
        "seq2seq-t5",
        "vision-resnet",
        "vision-segformer",
        "vision-vit",
    ],
    "native-tp": ["causal-deepseek_v3", "causal-gemma3_text", "causal-olmo2", "causal-phi3", "causal-qwen3_next"],
    "xla-spmd": ["masked-squeezebert", "vision-resnet"],
    "xla-multiprocess": ["vision-resnet"],
}
"""Engine -> families of different structures, `native-tp` with their layers split: experts, recurrent layers, lists in
lists, ties, stages, BatchNorm, groups of channels. Llama and T5 are trained under XLA, too, in `test_engines.py`."""


def cases() -> list[Any]:
    marks = {engine: [pytest.mark.xla] if engine.startswith("xla") else [] for engine in SOME}
    return [pytest.param(engine, name, marks=marks[engine]) for engine, names in SOME.items() for name in names]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("engine", "name"), cases())
def test_a_family_trains_as_in_plain_pytorch(engine, name, found, tmp_path_factory):
    if engine not in found:
        found[engine] = sweep(engine, tmp_path_factory.mktemp(engine), SOME[engine])
    facts = found[engine][name]
    assert facts["outcome"] == "agrees", facts


def test_the_page_has_every_family(request):
    if request.config.getoption("--write-tables"):
        names = list(all_families())
        TABLE.write_text(table({engine: sweep(engine, KEPT / engine, names) for engine in ENGINES}), encoding="utf-8")
    page = TABLE.read_text(encoding="utf-8")
    if f"transformers\n{transformers.__version__} " not in page:
        pytest.skip("the page is of another version of transformers")
    absent = [each.model_class for each in all_families().values() if f"`{each.model_class}`" not in page]
    assert absent == []


def test_the_page_has_the_plans_that_are_carried_out_natively():
    from transformers import CONFIG_MAPPING

    page = PAGE.read_text(encoding="utf-8")
    if f"With transformers {transformers.__version__}: " not in page:
        pytest.skip("the page is of another version of transformers")
    refused = set(re.findall(r"\| `([a-z0-9_]+)` \| (?:differs|fails|refused)", page))
    assert not refused.intersection(VERIFIED_PLANS)
    assert {name: fingerprint(CONFIG_MAPPING[name]) for name in VERIFIED_PLANS} == VERIFIED_PLANS
    assert all(f"`{name}`" in page for name in (*VERIFIED_PLANS, *FAMILIES))
