"""What pages are held to is itself tested: mistakes in marks, in blocks that are not run, and in those that are."""

import pages
import pytest
from page_checks import CheckError, check
from pages import Block, PageError, read_blocks, read_programs


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)

    def write(text):
        path = tmp_path / "page.md"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    "text",
    [
        "```\nx\n```",
        "```pyhton\nx\n```",
        "<!-- not-run: needs a TPU -->\n```bash\nx\n```",
        "<!-- not run -->\n```bash\nx\n```",
        "<!-- setup: gpt2 -->\n\nA sentence.\n\n```bash\nx\n```",
    ],
    ids=["no-language", "unknown-language", "misspelt", "no-reason", "far-from-its-block"],
)
def test_a_mistake_in_a_page_is_told(page, text):
    with pytest.raises(PageError, match=r"page\.md:\d"):
        read_blocks(page(text))


def test_a_setup_begins_a_program(page):
    text = "".join(
        f"{mark}```python\n{code}\n```\n\n"
        for mark, code in [("", "a"), ("<!-- setup: gpt2, 2 processes, xla -->\n", "b"), ("", "c")]
    )
    first, second = read_programs(page(text))
    assert [block.text for block in first.blocks] == ["a\n"]
    assert [block.text for block in second.blocks] == ["b\n", "c\n"]
    assert (second.setup.names, second.setup.num_processes, second.setup.marks) == (("gpt2",), 2, ("xla",))


def test_a_diff_is_run_as_its_new_side_with_replacements(page):
    (block,) = read_blocks(page("<!-- run with: = 8 -> = 2 -->\n```diff\n-old = 1\n+size = 8\n same = 3\n```"))
    assert block.code_to_run == "size = 2\nsame = 3\n"


def test_a_replacement_that_finds_nothing_is_told():
    with pytest.raises(PageError, match="run with"):
        _ = Block("page.md", 1, "python", "size = 4\n", {"run with": "size = 8 -> size = 2"}).code_to_run


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("bash", "if true; then"),
        ("bash", "torchrun --nprocs=2 train.py"),
        ("bash", "torchrun --nproc_per_node=2 -m torchacc.train --confg x.yaml"),
        ("bash", "RANK=0 torchacc launch -n 2 examples/fsdp_example.py --fsdp-confg x"),
        ("bash", "srun --ntasks=2 torchacc plan --modl gpt2"),
        ("bash", "torchacc pln"),
        ("bash", "python examples/nothing.py"),
        ("bash", "pip install -e '.[nothing]'"),
        ("python", "model = torchacc.acelerate(model)"),
        ("python", "config.dist.fsdp.sise = 2"),
        ("python", "for"),
        ("diff", "-for\n+model = 1\n"),
    ],
)
def test_a_block_that_could_not_run_anywhere_is_told(language, text):
    with pytest.raises(CheckError, match=r"page\.md:7"):
        check(Block("page.md", 7, language, text))
