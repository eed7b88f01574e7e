"""Every relative link of a page leads to a file that is there, and to a heading of it; and the site has every page."""

import re
from functools import cache
from pathlib import Path

import pytest
from pages import ROOT, pages, text_outside_of_code

LINK = re.compile(
    r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)|^\[[^\]]+\]:\s+(\S+)|\b(?:src|srcset|href)=\"([^\"]+)\"", re.MULTILINE
)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z]+:|//")
INDEX = ROOT / "docs" / "index.md"

each_page = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))


@cache
def anchors(page: Path) -> set[str]:
    """Return what links can name in a page, as code hosts and MyST derive it from its headings."""
    found: set[str] = set()
    for heading in HEADING.findall(text_outside_of_code(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(anchor)
    return found


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", text_outside_of_code(page))
    found = ("".join(groups) for groups in LINK.findall(text))
    return [link for link in found if not ELSEWHERE.match(link)]


@each_page
def test_a_pages_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link}: there is no {target.relative_to(ROOT)}"
        assert target.is_file(), f"{link}: a folder has no page in the site: link to a file of it"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading; there are {sorted(anchors(target))}"


def test_the_index_lists_every_page():
    toctrees = re.findall(r"^```\{toctree\}\n(.*?)^```", INDEX.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    listed = [line for tree in toctrees for line in tree.splitlines() if line and not line.startswith(":")]
    found = {(INDEX.parent / f"{name}.md").resolve() for name in listed}
    expected = {page for page in pages() if page != INDEX}
    assert {page.relative_to(ROOT).as_posix() for page in expected} == {
        page.relative_to(ROOT).as_posix() for page in found
    }


def test_the_walks_name_files_that_the_package_has():
    named = set(re.findall(r"\w+\.py\b", (ROOT / "docs" / "design" / "walks.md").read_text(encoding="utf-8")))
    assert len(named) > 50
    assert named <= {path.name for path in (ROOT / "torchacc").rglob("*.py")}
