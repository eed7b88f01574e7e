"""What a newcomer does with the wheel alone, in an empty folder. Each part is a fork of this process."""

import os
import runpy
import sys
from pathlib import Path

import torch
import transformers.models.llama.modeling_llama

import torchacc
from torchacc.cli.main import main

FILES = str(Path(os.__file__).with_name("json") / "*.py")


def apart(part, *arguments):
    """Run a part in a fork, as a command of its own."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            status = part(*arguments) or 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, f"{part.__name__}{arguments} ended with {code}"


def shrink(path, **changes):
    """Make what quickstart wrote small, and fail where it does not say what is to be replaced."""
    text = path.read_text()
    for old, new in changes.values():
        assert old in text, f"{path.name} does not say {old!r}"
        text = text.replace(old, new)
    path.write_text(text)


def script():
    sys.argv = ["train.py", "native"]
    runpy.run_path("train.py", run_name="__main__")


def opens():
    for folder in ("final", "runs/quickstart/final"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        tokens = transformers.AutoTokenizer.from_pretrained(folder)("import json", return_tensors="pt")
        assert torch.isfinite(model(**tokens, labels=tokens["input_ids"]).loss), folder


installed = Path(sys.argv[1])
assert Path(torchacc.__file__).is_relative_to(installed), torchacc.__file__
apart(main, ["quickstart"])
shrink(
    Path("train.py"),
    steps=("STEPS = 60", "STEPS = 10"),
    text=('dataset="stdlib", vocab_size=1024', f'dataset="text", files={FILES!r}, vocab_size=300, cache_dir="cache"'),
)
shrink(
    Path("config.yaml"),
    steps=("max_steps: 60", "max_steps: 4"),
    text=("dataset: stdlib", f"cache_dir: cache\n      dataset: text\n      files: {FILES}"),
    vocabulary=("vocab_size: 1024", "vocab_size: 300"),
    evaluation=("eval_every_steps: 30", "log_every_steps: 1"),
    batches=("batch_size: 32", "batch_size: 8"),
    schedule=("warmup_steps: 5", "warmup_steps: 1"),
    engine=("engine: auto", "engine: native"),
)
apart(script)
apart(main, ["train"])
apart(opens)
assert "data:image/svg+xml" in Path("runs/quickstart/report.html").read_text()
loaded = [name for name, module in sys.modules.items() if name.partition(".")[0] == "torchacc"]
strange = [name for name in loaded if not str(sys.modules[name].__file__).startswith(str(installed))]
assert not strange, strange
