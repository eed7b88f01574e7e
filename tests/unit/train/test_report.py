import base64
import math
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from torchacc.train.html_report import write_comparison, write_report

ROWS = [
    {"step": step, "loss": 5 / step, "grad_norm": 1.0 + step, "lr": 1e-3, "tokens": 64 * step} for step in range(1, 101)
]
ROWS[49] |= {"tokens_per_sec": 1234.5, "mfu": 0.25, "device_memory_bytes": 3 * 2**30, "secs": 61.0}
ROWS[99] |= {"tokens_per_sec": 1234.5, "mfu": 0.35, "device_memory_bytes": 4 * 2**30, "secs": 3723.4}
ROWS += [{"step": 50, "eval_loss": 2.0}, {"step": 100, "eval_loss": 2.5}, {"step": 100, "event": "saved <here>"}]


class Page(HTMLParser):
    """What a page says and refers to."""

    def __init__(self, path):
        super().__init__()
        self.references, self.texts = [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.references += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.texts += [data.strip()] if data.strip() else []


@pytest.fixture
def path(tmp_path):
    (tmp_path / "demo" / "stage1").mkdir(parents=True)
    return tmp_path / "demo" / "stage1" / "report.html"


def test_the_page_holds_its_curves_and_refers_to_nothing_else(path):
    write_report(path, ROWS, "finished", {})
    page = Page(path)
    assert len(page.references) == 6  # loss, learning rate, gradient norm, tokens/s, MFU, memory
    for reference in page.references:
        kind, _, image = reference.partition(",")
        assert kind == "data:image/svg+xml;base64"
        ElementTree.fromstring(base64.b64decode(image))


def test_the_page_says_what_was_measured(path):
    write_report(path, ROWS, "finished", {})
    said = Page(path).texts
    for text in ("demo / stage1", "5.000 → 0.050", "2.500 (best 2.000)", "6,400", "4.00 GiB", "1:02:03", "1,234"):
        assert text in said


def test_the_page_says_what_it_is_told(path):
    facts = {"engine": "native", "parameters": 118528, "model": {"units": 3}, "config": {"memory": {"gc": True}}}
    write_report(path, ROWS, "failed: <out of memory>\nand more", facts)
    said = Page(path).texts
    assert {"failed: <out of memory>", "saved <here>", "native", "118,528", "model", "3"} <= set(said)
    assert "memory:\n  gc: true" in said
    assert 'class="outcome failed"' in path.read_text(encoding="utf-8")


def test_a_run_that_measured_nothing_still_has_a_page(path):
    write_report(path, [{"step": 0, "event": "failed: no data"}], "failed: no data", {"engine": "native"})
    assert Page(path).references == []


def test_what_was_not_finite_is_a_gap(path):
    write_report(path, [*ROWS, {"step": 101, "loss": None, "grad_norm": None, "lr": 1e-3}], "failed: nan", {})
    assert "5.000 → 0.050" in Page(path).texts
    assert not math.isnan(len(Page(path).references))


def test_runs_are_compared_on_one_page(path):
    slower = [row | ({"tokens_per_sec": 600.0} if "tokens_per_sec" in row else {}) for row in ROWS]
    slower += [{"step": 50, "event": "went on from step 50", "mark": "restart"}]
    options = {"a": {"optimizer.lr": 0.001, "seed": 0}, "b": {"optimizer.lr": 0.003, "seed": 0}}
    write_comparison(path, {"a": ROWS, "b": slower}, {"a": "finished", "b": "failed: <why>"}, options, {"NO_SHARD": 9})
    page = Page(path)
    assert len(page.references) == 6
    assert {"optimizer.lr", "0.001", "0.003", "failed: <why>", "1,234", "600", "b, step 50"} <= set(page.texts)
    assert "seed" not in page.texts
    assert page.texts[page.texts.index("restarts") + 1 :][:2] == ["0", "1"]


def test_a_plan_and_marks_are_drawn(path):
    def drawn(rows, planned):
        write_comparison(path, {"a": rows}, {"a": "finished"}, {"a": {}}, planned)
        return [len(base64.b64decode(reference.partition(",")[2])) for reference in Page(path).references]

    plain, beside_plan = drawn(ROWS, {}), drawn(ROWS, {"FULL_SHARD on 4": 2**30})
    assert beside_plan[:-1] == plain[:-1]
    assert beside_plan[-1] > plain[-1]  # a line and its name
    marked = drawn([*ROWS, {"step": 7, "event": "compiled anew: x", "mark": "compile"}], {})
    assert marked[0] > plain[0]
