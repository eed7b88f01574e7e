"""For every test: the options, and that none leaves an environment variable or a thread behind."""

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests import gpus

# pytest sets the first between a test's phases; a later torch the second, when an optimizer is first made.
_SET_BY_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
# It watches all of a process's progress bars, and lives as long as that.
_THREADS_OF_OTHERS = {"tqdm_monitor"}
_SECONDS_TO_END = 5.0
_SECONDS = pytest.StashKey[float]()
_IS_LAST = pytest.StashKey[bool]()

gpus.hide()
# transformers would import torch_xla here by way of accelerate, which sets variables in the tests' own process.
os.environ.setdefault("USE_TORCH_XLA", "0")
# Tests run beside each other, and threads that share a core wait for each other while they spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Of the processes that a test starts there are more than cores: one that wakes up waits for its turn, in place of
# interrupting another each time, which halves the time that goes to switching between them.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# The processes that inductor would compile in import PyTorch anew, which takes longer than what they compile here.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Whether the compiler knows what vector code the processor has is tried in eight programs, for each new cache.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Most of a compile makes machine code that a test runs a few times: LLVM's passes, emitters of fusions that write MLIR
# first, and a program's parts, which are compiled beside each other and together take half as much again as in one.
# What comes before, partitioning and XLA's own passes, is as without, but that scatters become loops.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
)

# What the suite draws is the same in every run, so that a failure is of the change at hand. A long run draws anew: a
# failure prints the line that reproduces it.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, database=None)
settings.register_profile("long", settings.get_profile("ci"), derandomize=False, max_examples=5000)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _SET_BY_OTHERS}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-tables", action="store_true", help="write the tables in docs/ that tests make")
    parser.addoption(
        "--full-contract", action="store_true", help="run the contract's cases in every combination, not in each pair"
    )
    parser.addoption(
        "--third-of-entries", action="store_true", help="run each of the contract's cases, and a third of its entries"
    )
    parser.addoption(
        "--every-benchmark", action="store_true", help="run each benchmark at its smallest size, not one of those alike"
    )
    parser.addoption(
        "--cpu-times", action="store_true", help="list the files by the processor time of their tests and its processes"
    )
    parser.addoption("--jobset-crd", metavar="FILE", help="hold the JobSet template to its CustomResourceDefinition")
    parser.addoption("--long", action="store_true", help="draw many more cases than CI does, and others in each run")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("hypothesis_profile", None):
        settings.load_profile("long" if config.getoption("--long") else "ci")
    from tests import tpus  # by way of torch, which is to find the variables above

    tpus.hide()
    if not config.getoption("--cpu-times"):  # it counts what a process of pytest has started itself
        from tests import forkrun

        forkrun.share()


def pytest_collection_finish() -> None:
    from tests import forkrun

    forkrun.collect_rarely()


class OneWorkerForTheContract(LoadFileScheduling):
    """Gives a worker no file of the contract while another has one, unless nothing else is left.

    Each of its jobs keeps both cores busy. Most others wait for a part of their time: two of them leave cores idle.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        others = [work for other, work in self.assigned_work.items() if other is not node]
        taken = any(_is_contract(file) and not all(tests.values()) for work in others for file, tests in work.items())
        preferred = next((file for file in self.workqueue if _is_contract(file) != taken), None)
        if preferred is not None:
            self.workqueue.move_to_end(preferred, last=False)
        super()._assign_work_unit(node)


def _is_contract(file: str) -> bool:
    return file.startswith("tests/contract/")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return OneWorkerForTheContract(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def no_leaked_environment() -> Iterator[None]:
    """Fail a test that leaves the environment changed, and put it right for the next one."""
    before = _environment()
    yield
    after = _environment()
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    for name in changed:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    assert not changed, f"environment variables left changed: {sorted(changed)}"


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test whose threads are still running shortly after it."""
    before = set(threading.enumerate())
    yield
    # A dummy stands for a thread of autograd's, not of Python's: it lives as long as the process.
    started = {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)} - before
    started = {thread for thread in started if thread.name not in _THREADS_OF_OTHERS}
    for thread in started:
        thread.join(_SECONDS_TO_END)
    alive = sorted(thread.name for thread in started if thread.is_alive())
    assert not alive, f"threads left running: {alive}"


def _cpu_seconds() -> float:
    """Return the processor time of this process, of those that it has started, and of theirs."""
    import psutil

    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # its own, and that of children which it has waited for
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    item.stash[_IS_LAST] = nextitem is None or nextitem.path != item.path
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Note a file's processor time in the last report of its last test: to look for it takes some itself."""
    report = yield
    if item.config.getoption("--cpu-times") and call.when == "teardown" and item.stash[_IS_LAST]:
        now = _cpu_seconds()
        report.cpu_seconds, item.config.stash[_SECONDS] = now - item.config.stash.get(_SECONDS, 0.0), now
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    _list_what_to_report(terminalreporter)
    if not config.getoption("--cpu-times"):
        return
    files: dict[str, list[float]] = defaultdict(list)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "cpu_seconds"):
                files[report.nodeid.partition("::")[0]].append(report.cpu_seconds)
    terminalreporter.section("seconds of a processor")
    for name, seconds in sorted(files.items(), key=lambda entry: -sum(entry[1])):
        terminalreporter.write_line(f"{sum(seconds):8.1f}  {name}")
    terminalreporter.write_line(f"{sum(map(sum, files.values())):8.1f}  in all")


def _list_what_to_report(terminalreporter: pytest.TerminalReporter) -> None:
    """List what tests of GPUs and TPUs have recorded of the devices that few of us have."""
    reports = [each for found in terminalreporter.stats.values() for each in found if hasattr(each, "user_properties")]
    lines = [f"{each.outcome}: {said}" for each in reports for key, said in each.user_properties if key == "report"]
    if not lines or terminalreporter.config.getoption("markexpr") not in ("gpu", "tpu"):
        return
    terminalreporter.section("please report this, also where all has passed, with what `torchacc env` prints")
    for line in dict.fromkeys(lines):
        terminalreporter.write_line(line)
