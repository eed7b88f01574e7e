"""What is said of the source: sizes, the engine seam, names for two things, and the longest chain of imports."""

FILES = {
    "torchacc/__init__.py": "from torchacc.api import run\n",
    "torchacc/api.py": "from torchacc.engines import base, spmd\n\n\ndef run():\n    from torchacc import last\n",
    "torchacc/engines/__init__.py": "",
    "torchacc/engines/base.py": (
        "class Engine:\n    def put(self): ...\n    @property\n    def _own(self): ...\n"
        "class ShardedModel:\n    def place(self): ...\n    def fetch(self): ...\n"
    ),
    "torchacc/engines/spmd.py": (
        "'''About dp and fsdp.'''\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torchacc.last\n"
        "else:\n    from torchacc.engines.base import Engine\nclass Other(Engine):\n    class Run: ...\n    x = 'dp'\n"
    ),
    "torchacc/last.py": "class _Run: ...\n",
    "torchacc/data/base.py": "x = 1\n" * 501,
    "tests/test_a.py": "\n\n",
    "benchmarks/a.py": "",
}


def test_it_is_read_from_the_files_of_any_checkout(tmp_path, capsys):
    from structure import main

    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert main(["--root", str(tmp_path)]) == 0
    sections = [part.splitlines() for part in capsys.readouterr().out.split("\n\n")]
    found = {lines[0]: [line.strip() for line in lines[1:]] for lines in sections if lines}
    assert found.pop("Lines of torchacc/") == [
        "7    3 files  torchacc/",
        "501    1 files  torchacc/data/",
        "16    3 files  torchacc/engines/",
        "524    7 files  in all",
    ]
    assert found.pop("Lines of tests/")[-1] == "2    1 files  in all"
    assert found.pop("Lines of benchmarks/")[-1] == "0    1 files  in all"
    assert found == {
        "Engine: 1 public methods and properties": ["put"],
        "ShardedModel: 2 public methods and properties": ["place, fetch"],
        "Files of the package that spell out a mesh axis: 1": ["torchacc/engines/spmd.py"],
        "Class names that occur twice, underscores aside: 1": ["Run: torchacc/engines/spmd.py, torchacc/last.py"],
        "File names that occur twice: 1": ["base.py: torchacc/data/base.py, torchacc/engines/base.py"],
        "Longest chain of imports when modules are loaded: 4 modules": [
            "torchacc",
            "torchacc.api",
            "torchacc.engines.spmd",
            "torchacc.engines.base",
        ],
        "Files of more than 500 lines: 1": ["501  torchacc/data/base.py"],
    }
