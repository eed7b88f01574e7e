"""The repository's Markdown pages: their code blocks, and the programs that these make. CONTRIBUTING.md says how."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = {"bash", "diff", "json", "python", "text", "yaml"}

_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<info>.*)$")
_COMMENT = re.compile(r"^\s*<!-- (?P<key>not run|setup|file|run with): (?P<value>.*\S) -->\s*$")
_ANY_MARK = re.compile(r"^\s*<!--\s*(not.?run|skip|set.?up|file|run.?with)\b", re.IGNORECASE)


class PageError(Exception):
    """A page's marks cannot be understood; names the file and the line."""


@dataclass(frozen=True)
class Block:
    """A code block, and what the comments above it say."""

    page: str
    line: int
    """Line of its first line of code."""
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def code(self) -> str:
        """Return what stands in a file once the block is followed: of a diff its new side."""
        if self.language == "diff":
            return diff_side(self.text, "+")
        return self.text

    @property
    def code_to_run(self) -> str:
        """Return the code with what `run with` replaces."""
        code = self.code
        for pair in filter(None, self.marks.get("run with", "").split("; ")):
            large, arrow, small = pair.partition(" -> ")
            if not arrow or large not in code:
                raise PageError(f"{self}: run with: {pair!r}: write `what stands in the block -> what to run`")
            code = code.replace(large, small)
        return code


@dataclass(frozen=True)
class Setup:
    """What the comment before a program says: what it finds, and where it can run."""

    names: tuple[str, ...] = ()
    """Functions of `page_setups.py`, in order."""
    num_processes: int = 1
    marks: tuple[str, ...] = ()
    """Of pytest: `xla`, `slow`."""


@dataclass(frozen=True)
class Program:
    """Blocks that are run one after another, in one folder and one namespace."""

    setup: Setup
    blocks: list[Block]

    def __str__(self) -> str:
        return str(self.blocks[0])


def pages() -> list[Path]:
    """Return the Markdown files of the repository that people read."""
    folders = ("docs", "examples", "benchmarks")
    found = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]
    return sorted(page for page in found if "_build" not in page.parts)


def read_blocks(page: Path) -> list[Block]:
    """Return a page's code blocks in order.

    Raises:
        PageError: A block has no known language, or a comment of ours is misspelt or stands before no block.
    """
    name = page.relative_to(ROOT).as_posix()
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    blocks, marks = [], {}
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence:
            blocks.append(Block(name, number + 1, *_block(lines, fence, f"{name}:{number}"), marks))
            marks = {}
        elif comment := _COMMENT.match(line):
            marks[comment["key"]] = comment["value"]
        elif _ANY_MARK.match(line):
            raise PageError(f"{name}:{number}: {line!r}: write `<!-- not run: why -->`, setup, file or run with")
        elif line.strip() and marks:
            raise PageError(f"{name}:{number}: a comment {sorted(marks)} stands before no code block")
    return blocks


def read_programs(page: Path) -> list[Program]:
    """Return what is run of a page; a comment `setup` starts a new program."""
    programs: list[Program] = []
    for block in read_blocks(page):
        if "not run" in block.marks or block.language in {"text", "json"}:
            continue
        if "setup" in block.marks or not programs:
            programs.append(Program(_setup(block), []))
        programs[-1].blocks.append(block)
    return programs


def text_outside_of_code(page: Path) -> str:
    """Return a page without its code blocks."""
    text, closing = [], ""
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = _FENCE.match(line)
        if closing:
            closing = "" if line.strip() == closing else closing
        elif fence:
            closing = fence["marks"]
        else:
            text.append(line)
    return "\n".join(text)


def diff_side(text: str, sign: str) -> str:
    """Return the old (`-`) or the new (`+`) side of a diff."""
    other = {"-": "+", "+": "-"}[sign]
    return "".join(line[1:] or "\n" for line in text.splitlines(keepends=True) if not line.startswith(other))


def _block(lines: Iterator[tuple[int, str]], fence: re.Match[str], at: str) -> tuple[str, str]:
    """Read on to the end of a block; return its language and its text."""
    language = fence["info"].strip()
    if language not in LANGUAGES and not language.startswith("{"):
        raise PageError(f"{at}: a code block's language is one of {sorted(LANGUAGES)}, not {language!r}")
    indent, text = len(fence["indent"]), []
    for _, line in lines:
        if line.strip() == fence["marks"]:
            break
        text.append(line[indent:] if not line[:indent].strip() else line)
    return ("text" if language.startswith("{") else language), "".join(f"{line}\n" for line in text)


def _setup(block: Block) -> Setup:
    names, marks, num_processes = [], [], 1
    for word in filter(None, block.marks.get("setup", "").split(", ")):
        if found := re.fullmatch(r"(\d+) processes", word):
            num_processes = int(found[1])
        elif word in {"slow", "xla"}:
            marks.append(word)
        elif word != "nothing":
            names.append(word)
    return Setup(tuple(names), num_processes, tuple(marks))
