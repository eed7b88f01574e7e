"""Launch each engine once per session, with the cases that the selected tests need of it.

A test says with `@pytest.mark.covers(engines=…, models=…, variants=…)` what it is about, and gets combinations as the
fixture `case`; `outcome` is what that run came to, and `reference` the same in plain PyTorch, unsharded.

Not all combinations are run, but so many that each pair is: of an engine, a number of devices, a model, a variant and a
test (see `covering.py`). `--full-contract` runs all.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # as for the workers, which are scripts

from launching import environment, run_all
from matrix import REFERENCE, SECONDS_TO_RUN, Case, all_cases, chosen_cases

WORKER = Path(__file__).with_name("worker.py")


class Launcher:
    """Runs an engine's cases when the first of them is asked for, and keeps what they came to."""

    def __init__(self, cases: list[Case], folder: Path) -> None:
        self._folder = folder
        self._inputs: dict[str, dict[str, dict[str, Any]]] = {}
        self._printed: dict[str, str] = {}
        for case in cases:
            given = case.as_input()
            self._inputs.setdefault(case.engine, {})[given["id"]] = given
            for given in case.as_reference(), case.as_plain_reference():
                self._inputs.setdefault(REFERENCE, {})[given["id"]] = given

    def outcome(self, case: Case) -> dict[str, Any]:
        return self._read(case.engine, case.id)

    def reference(self, case: Case) -> dict[str, Any]:
        return self._read(REFERENCE, case.as_reference()["id"])

    def plain_reference(self, case: Case) -> dict[str, Any]:
        return self._read(REFERENCE, case.as_plain_reference()["id"])

    def printed(self, case: Case) -> str:
        """Return what the case's engine printed, in all of its cases."""
        self.outcome(case)
        return self._printed[case.engine]

    def _read(self, engine: str, name: str) -> dict[str, Any]:
        out = self._folder / engine
        if engine not in self._printed:
            out.mkdir()
            self._printed[engine] = self._launch(engine, out)
        path = out / f"{name}.pt"
        if not path.exists():
            pytest.fail(f"{engine} did not come as far as {name}; it printed:\n{self._printed[engine][-6000:]}")
        found = torch.load(path, weights_only=True)
        if "failed" in found:
            pytest.fail(f"{name}: {found['failed']}", pytrace=False)
        return found

    def _launch(self, engine: str, out: Path) -> str:
        cases_file = out / "cases.json"
        cases_file.write_text(json.dumps([*self._inputs[engine].values()]))
        kind, _, num_devices = engine.rpartition("-")
        launched = kind == "xla-multiprocess" or (kind == "native" and num_devices != "1")
        if not launched or num_devices != "2":  # two devices are launched as users do: see forkrun.py
            imports = ["torch_xla"] if kind.startswith("xla") else []
            num_ranks = int(num_devices) if launched else 0
            return run_all(WORKER, cases_file, out, num_ranks=num_ranks, imports=imports, seconds=SECONDS_TO_RUN)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_devices}"]
        process = subprocess.Popen(
            [sys.executable, *launcher, str(WORKER), str(cases_file), str(out)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            return process.communicate(timeout=SECONDS_TO_RUN)[0]
        except subprocess.TimeoutExpired:
            process.terminate()
            return process.communicate()[0] + f"\n(ended after {SECONDS_TO_RUN} s)"
        finally:  # of an interrupted session, too; the launcher ends its processes
            process.terminate()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "covers(engines, models, variants): run a test of the contract for each combination, as `case`"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    cases = dict.fromkeys(all_cases(metafunc.definition.iter_markers("covers")))
    if not metafunc.config.getoption("--full-contract"):
        chosen = chosen_cases(metafunc.module)
        cases = [case for case in cases if case in chosen]
    metafunc.parametrize("case", [pytest.param(case, id=case.id, marks=case.marks) for case in cases])


@pytest.fixture(scope="session")
def launcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    cases = [spec.params["case"] for spec in parameters if spec and isinstance(spec.params.get("case"), Case)]
    return Launcher(list(dict.fromkeys(cases)), tmp_path_factory.mktemp("contract"))


@pytest.fixture
def outcome(launcher: Launcher, case: Case) -> dict[str, Any]:
    """What became of this test's run."""
    found = launcher.outcome(case)
    if "refused" in found:
        pytest.fail(f"{case.id} was refused: {found['refused']}", pytrace=False)
    return found


@pytest.fixture
def refusal(launcher: Launcher, case: Case) -> str:
    """The message with which this test's run was refused."""
    found = launcher.outcome(case)
    assert "refused" in found, f"{case.id} was not refused"
    return found["refused"]


@pytest.fixture
def reference(launcher: Launcher, case: Case) -> dict[str, Any]:
    """What became of the same training in plain PyTorch, unsharded."""
    return launcher.reference(case)


@pytest.fixture
def plain_reference(launcher: Launcher, case: Case) -> dict[str, Any]:
    """What became of it with the whole batch at once and in float32, where the variant is compared with another."""
    return launcher.plain_reference(case)
