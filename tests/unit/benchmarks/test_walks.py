"""Which files of a package a call walks through: in order, in all threads, and not because a module is loaded."""

import importlib
import sys
import threading

FILES = {
    "__init__.py": "",
    "first.py": "from walked import second\n\ndef begin():\n    second.go_on()\n    import walked.late\n",
    "second.py": "def go_on():\n    def inner(): ...\n    inner()\n\ndef unused(): ...\n",
    "late.py": "from walked import helper\nhelper.help()\n",
    "helper.py": "def help(): ...\n",
    "thread.py": "def run(): ...\n",
}


def test_a_walk_lists_the_files_that_are_entered(tmp_path, monkeypatch):
    from walks import Walk

    for name, text in FILES.items():
        path = tmp_path / "walked" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before, profiler = set(sys.modules), sys.getprofile()
    try:
        first, thread = importlib.import_module("walked.first"), importlib.import_module("walked.thread")
        walk = Walk(tmp_path / "walked")
        with walk.recorded():
            first.begin()
            started = threading.Thread(target=thread.run)
            started.start()
            started.join()
        first.second.unused()
    finally:
        sys.setprofile(profiler)
        for name in set(sys.modules) - before:
            del sys.modules[name]
    assert walk.summary() == {
        "files": ["walked/first.py", "walked/second.py", "walked/thread.py"],
        "functions": 4,
        "deepest": ["walked/first.py", "walked/second.py"],
    }
