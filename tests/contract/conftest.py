"""Launch each engine once per session, with the cases that the selected tests need of it.

A test says with `@pytest.mark.covers(engines=…, models=…, variants=…)` what it is about, and gets each combination as
the fixture `case`; `outcome` is what that run came to, and `reference` the same in plain PyTorch, unsharded.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # as for the workers, which are scripts

from launching import environment

WORKER = Path(__file__).with_name("worker.py")
SECONDS_TO_RUN = 1200  # many times what an engine's cases take on two cores that do nothing else

FAST_ENGINES = {"native-1", "native-2", "xla-multiprocess-2", "xla-spmd-2"}
FAST_MODEL = "gpt2"
FAST_VARIANTS = {"adamw", "sgd"}
REFERENCE = "reference"


@dataclass(frozen=True)
class Variant:
    """What is trained with, and what the config says beside the engine and its size."""

    recipe: str = "adamw"
    fsdp: dict[str, Any] = field(default_factory=dict)
    compute: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    dp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    options: tuple[str, ...] = ()
    reference_options: tuple[str, ...] = ()
    """Options of the unsharded run that this is compared with."""


VARIANTS = {
    "adamw": Variant(),
    "sgd": Variant(recipe="sgd"),
    "handed-in": Variant(options=("handed-in",)),
    "deferred": Variant(options=("deferred", "handed-in")),
    "hybrid": Variant(dp=2, fsdp={"sharding_strategy": "HYBRID_SHARD"}),
    "no-shard": Variant(fsdp={"sharding_strategy": "NO_SHARD"}),
    "tp": Variant(tp=2),
    "tp-sequence": Variant(tp=2, sequence_parallel=True),
    "tp-replicas": Variant(recipe="sgd", tp=2, dp=2),
    "tp-alone": Variant(recipe="sgd", tp=4),
    "tp-recompute": Variant(tp=2, memory={"gc": True}),
    "tp-handed-in": Variant(tp=2, options=("handed-in",)),
    "tp-deferred": Variant(tp=2, options=("deferred",)),
    "tp-bf16": Variant(tp=2, compute={"bf16": True}, reference_options=("autocast-bfloat16",)),
    "shard-grad-op": Variant(fsdp={"sharding_strategy": "SHARD_GRAD_OP"}),
    "recompute": Variant(memory={"gc": True}),
    "recompute-accumulated": Variant(recipe="sgd", memory={"gc": True}),
    "recompute-hybrid": Variant(dp=2, fsdp={"sharding_strategy": "HYBRID_SHARD"}, memory={"gc": True}),
    "recompute-flat": Variant(fsdp={"flatten_parameters": True}, memory={"gc": True}, options=("handed-in",)),
    "bf16": Variant(compute={"bf16": True}, reference_options=("autocast-bfloat16",)),
    "bf16-sums": Variant(compute={"bf16": True, "reduce_dtype": "bfloat16"}, reference_options=("autocast-bfloat16",)),
    "bf16-masters": Variant(
        compute={"bf16": True, "master_dtype": "bfloat16"}, reference_options=("autocast-bfloat16",)
    ),
    "fp16": Variant(compute={"fp16": True}, reference_options=("autocast-float16",)),
    "offload": Variant(fsdp={"cpu_offload": True}, memory={"offload_activations": True}),
    "prefetch": Variant(fsdp={"forward_prefetch": True, "backward_prefetch": "NONE"}, memory={"gc": True}),
    "flat": Variant(recipe="sgd", fsdp={"flatten_parameters": True}),
    "flat-handed-in": Variant(fsdp={"flatten_parameters": True}, options=("handed-in",)),
    "flat-groups-after": Variant(fsdp={"flatten_parameters": True}),
    "unequal-seeds": Variant(options=("unequal-seeds",)),
    "unequal-seeds-synced": Variant(fsdp={"sync_module_states": True}, options=("unequal-seeds",)),
    "unequal-shapes": Variant(options=("unequal-shapes",)),
    "wrap-by-size": Variant(fsdp={"min_num_params": 3000}),
    "wrap-by-name": Variant(fsdp={"wrap_modules": ["transformer.h.*", "transformer.h.*.mlp"]}),
    "wrap-by-class": Variant(fsdp={"wrap_layer_cls": ["GPT2MLP", "Embedding"]}),  # the embedding is tied to the head
    "scan": Variant(compute={"scan_layers": True}),
    "evaluate": Variant(options=("evaluate",), reference_options=("evaluate",)),
    "whole-batch": Variant(),
    "per-device": Variant(reference_options=("per-device",)),
    "ragged-whole-batch": Variant(options=("ragged",), reference_options=("ragged",)),
    "ragged-per-device": Variant(options=("ragged",), reference_options=("ragged", "per-device")),
}


@dataclass(frozen=True)
class Case:
    """One training run of one engine."""

    engine: str
    """An engine's kind and its number of devices, such as `xla-spmd-2`."""
    model: str
    variant: str

    @property
    def id(self) -> str:
        return f"{self.engine}-{self.model}-{self.variant}"

    @property
    def kind(self) -> str:
        return self.engine.rpartition("-")[0]

    @property
    def num_devices(self) -> int:
        return int(self.engine.rpartition("-")[2])

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        marks = [pytest.mark.timeout(SECONDS_TO_RUN + 60)]
        if not (self.engine in FAST_ENGINES and self.model == FAST_MODEL and self.variant in FAST_VARIANTS):
            marks.append(pytest.mark.slow)
        if self.kind.startswith("xla"):
            marks.append(pytest.mark.xla)
        return marks

    def as_input(self) -> dict[str, Any]:
        """Return what the worker reads."""
        variant = VARIANTS[self.variant]
        size = self.num_devices // (variant.dp * variant.tp)
        fsdp = {"size": size, "use_spmd": self.kind == "xla-spmd", **variant.fsdp}
        tp = {"size": variant.tp, "sequence_parallel": variant.sequence_parallel}
        config = {
            "backend": self.kind.partition("-")[0],
            "compute": variant.compute,
            "memory": variant.memory,
            "dist": {"dp": {"size": variant.dp}, "fsdp": fsdp, "tp": tp},
        }
        return self._input(self.id, config, variant.options)

    def as_reference(self) -> dict[str, Any]:
        """Return what the worker reads to train the same unsharded."""
        return self._reference(VARIANTS[self.variant].reference_options)

    def as_plain_reference(self) -> dict[str, Any]:
        """Return what the worker reads to train unsharded, with the whole batch at once and in float32."""
        return self._reference(())

    def _reference(self, options: tuple[str, ...]) -> dict[str, Any]:
        # Where the whole batch is computed at once the number of devices that it is meant for makes no difference.
        parts = self.num_devices if "per-device" in options else 1
        name = "-".join([REFERENCE, self.model, VARIANTS[self.variant].recipe, *options, str(parts)])
        return self._input(name, None, options) | {"num_devices": parts}

    def _input(self, name: str, config: dict[str, Any] | None, options: tuple[str, ...]) -> dict[str, Any]:
        return {
            "id": name,
            "model": self.model,
            "recipe": VARIANTS[self.variant].recipe,
            "num_devices": self.num_devices // VARIANTS[self.variant].tp,
            "config": config,
            "options": options,
        }


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
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_devices}"]
        process = subprocess.Popen(
            [sys.executable, *(launcher if launched else []), str(WORKER), str(cases_file), str(out)],
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
    cases = []
    for mark in metafunc.definition.iter_markers("covers"):
        engines, models, variants = (mark.kwargs[key] for key in ("engines", "models", "variants"))
        cases += [Case(engine, model, variant) for engine in engines for model in models for variant in variants]
    metafunc.parametrize("case", [pytest.param(case, id=case.id, marks=case.marks) for case in dict.fromkeys(cases)])


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
