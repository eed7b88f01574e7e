"""Starts the workers that run random scripts, and hands them programs one by one."""

import json
import os
import select
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests import forkrun

HERE = Path(__file__).parent
NUM_RANKS = {"native": 2, "native-1": 1, "native-4": 4, "xla-multiprocess": 2, "xla-spmd": 1}
SECONDS_TO_START = 120
SECONDS_TO_RUN = 180  # one program; what takes longer hangs


class Runner:
    """The processes of one engine; started when the first program comes, and anew after one that hung or died."""

    def __init__(self, engine: str, environment: dict[str, str], seconds: float = SECONDS_TO_RUN) -> None:
        self.engine = engine
        self.num_rules = 0
        self.num_programs = 0
        self._environment = environment
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def run(self, program: dict[str, Any]) -> str | None:
        """Run a program; return how it failed."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self.num_programs += 1
        self.num_rules += len(program["rules"])
        try:
            self._process.stdin.write(json.dumps(program) + "\n")
            self._process.stdin.flush()
            answer = self._answer(self._seconds)
        except BrokenPipeError:
            answer = ""
        if answer is None:
            self.close()
            return f"no answer in {self._seconds} s"
        if not answer:
            return f"the process ended: {self.close()}"
        failure: str | None = json.loads(answer)
        return failure

    def close(self) -> str:
        """End the processes; return what they printed last."""
        if self._process is None:
            return ""
        self._process.terminate()
        self._process.wait()
        self._answers.close()
        self._process = None
        self._printed.seek(0)
        printed = self._printed.read()
        self._printed.close()
        return printed[-4000:]

    def _start(self) -> None:
        ranks = NUM_RANKS[self.engine]
        python = forkrun.python(*(["torch_xla"] if self.engine.startswith("xla") else []))
        launcher = [forkrun.__file__, str(ranks)] if ranks > 1 else []
        folder = tempfile.TemporaryDirectory()
        answers = os.path.join(folder.name, "answers")
        os.mkfifo(answers)
        self._printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [python, *launcher, str(HERE / "script_worker.py"), self.engine, answers],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # Without waiting for the worker to open its side, as it may not come so far.
        self._answers = os.fdopen(os.open(answers, os.O_RDONLY | os.O_NONBLOCK))
        ready = self._answer(SECONDS_TO_START)
        os.set_blocking(self._answers.fileno(), True)
        folder.cleanup()
        if not ready:
            raise RuntimeError(f"the workers of {self.engine} did not start: {self.close()}")

    def _answer(self, seconds: float) -> str | None:
        readable, _, _ = select.select([self._answers], [], [], seconds)
        return self._answers.readline() if readable else None
