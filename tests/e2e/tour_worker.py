"""Runs examples one after the other in one process, each as a shell would: `tour_worker.py OUT ENGINE EXAMPLE...`.

With --errors it starts them with wrong options, and prints what they say.
"""

import io
import runpy
import sys
from contextlib import redirect_stderr, suppress
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
# Sizes that show whether it works, not how well: seconds, not minutes.
SMALL = {
    "resnet_acc": "--steps 4 --batch-size 16 --copies 1",
    "resnet_group": "--steps 4 --batch-size 16 --copies 1 --norm group",
    "bert_classification": "--steps 6 --batch-size 8 --context 16 --layers 1 --files 4",
    "t5_summarise": "--steps 6 --batch-size 8 --context 16 --layers 1 --modules 4",
    "llama_lora": "--steps 6 --base-steps 4 --batch-size 8 --context 16 --layers 1 --files 20",
}
SCRIPTS = {"resnet_group": "resnet_acc"}
WRONG = {
    "resnet_acc": "--engine xla --devices 2 --batch-size 3",
    "bert_classification": "--engine native --devices 2",
    "t5_summarise": "--engine native --steps 0",
    "llama_lora": "--engine native",  # without peft
    "convert_checkpoint": "--processes 3",
}


def start(script: str, *args: str) -> None:
    sys.argv = [script, *args]
    runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")


def start_wrongly() -> None:
    for script, args in WRONG.items():
        said = io.StringIO()
        if script == "llama_lora":
            sys.modules["peft"] = None  # as if it were not installed
        with redirect_stderr(said), suppress(SystemExit):
            start(script, *args.split())
        print(f"----\n{said.getvalue()}")


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    if sys.argv[1] == "--errors":
        start_wrongly()
    else:
        out, engine, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
        for name in names:
            start(SCRIPTS.get(name, name), "--engine", engine, "--out", str(out / name), *SMALL[name].split())
