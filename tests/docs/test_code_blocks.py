"""Every code block of the README and the pages: run as it stands, or marked with the reason why not, and checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from page_checks import check
from page_setups import SETUPS
from pages import Block, Program, Setup, pages, read_blocks, read_programs

from tests import forkrun

WORKER = Path(__file__).with_name("page_worker.py")

BLOCKS = [block for page in pages() for block in read_blocks(page)]
NOT_RUN = [block for block in BLOCKS if "not run" in block.marks or block.language == "json"]
PROGRAMS = [program for page in pages() for program in read_programs(page)]


def as_parameter(program: Program):
    marks = [getattr(pytest.mark, mark) for mark in program.setup.marks]
    if program.setup.num_processes > 1:  # each compiles
        marks.append(pytest.mark.slow)
    return pytest.param(program, id=str(program), marks=marks)


@pytest.fixture(scope="module")
def worker():
    python = forkrun.python("torch_xla")
    environment = forkrun.environment(PYTHON=python)
    with subprocess.Popen(
        [sys.executable, str(WORKER)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def run(program: Program, worker: "subprocess.Popen[str]", folder: Path) -> str:
    """Run a program in the worker; return what failed, and nothing if nothing did."""
    blocks = [
        {
            "page": block.page,
            "line": block.line,
            "language": block.language,
            "file": block.marks.get("file"),
            "code": block.code_to_run,
        }
        for block in program.blocks
    ]
    values = {"folder": str(folder), "setups": program.setup.names, "num_processes": program.setup.num_processes}
    print(json.dumps({**values, "blocks": blocks}), file=worker.stdin, flush=True)
    return json.loads(worker.stdout.readline())


@pytest.mark.parametrize("program", [as_parameter(program) for program in PROGRAMS])
def test_a_pages_program_runs(program, worker, tmp_path):
    unknown = set(program.setup.names) - SETUPS.keys()
    assert not unknown, f"{program}: page_setups.py has no {unknown}"
    failed = run(program, worker, tmp_path / "program")
    assert not failed, failed


def test_a_program_that_fails_in_one_process_is_told(worker, tmp_path):
    code = "import os, time\nassert os.environ['RANK'] == '0', 'only rank 1'\ntime.sleep(500)\n"
    program = Program(Setup(num_processes=2), [Block("page.md", 7, "python", code)])
    failed = run(program, worker, tmp_path / "program")
    assert 'File "page.md", line 8' in failed
    assert "AssertionError: only rank 1" in failed


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: f"{block} not run: {block.marks.get('not run', 'data')}")
def test_a_block_that_is_not_run_could_be(block):
    check(block)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_file_of_a_page_is_used_by_a_command_after_it(program):
    for number, block in enumerate(program.blocks):
        if "file" in block.marks:
            later = [other.code for other in program.blocks[number:] if other.language == "bash"]
            assert any(block.marks["file"] in code for code in later), f"{block}: no command uses the file"


def test_blocks_were_found():
    assert {block.page for block in BLOCKS} >= {"README.md", "docs/trainer.md"}
