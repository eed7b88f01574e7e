"""The runs of the contract: an engine, a model, and a variant of how it is trained; and which of them are chosen."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from types import ModuleType
from typing import Any

import pytest
from casekit import REFERENCE
from covering import Pair, covering, pairs
from launching import SECONDS_TO_RUN

FACTORS = ("engines", "models", "variants")
FAST_ENGINES = {"native-1", "native-2", "xla-multiprocess-2", "xla-spmd-2"}
FAST_MODEL = "gpt2"
FAST_VARIANTS = {"adamw", "sgd"}


@dataclass(frozen=True)
class Variant:
    """What is trained with, and what the config says beside the engine and its size."""

    recipe: str = "adamw"
    fsdp: dict[str, Any] = field(default_factory=dict)
    compute: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    dp: int = 1
    tp: int = 1
    sp: int = 1
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
    "sp": Variant(sp=2),
    "sp-alone": Variant(recipe="sgd", sp=4),
    "sp-tp-recompute": Variant(sp=2, tp=2, memory={"gc": True}),
    "sp-scan": Variant(sp=2, compute={"scan_layers": True}),
    "shard-grad-op": Variant(fsdp={"sharding_strategy": "SHARD_GRAD_OP"}),
    "recompute": Variant(memory={"gc": True}),
    "recompute-accumulated": Variant(recipe="sgd", memory={"gc": True}),
    "recompute-hybrid": Variant(dp=2, fsdp={"sharding_strategy": "HYBRID_SHARD"}, memory={"gc": True}),
    "recompute-flat": Variant(fsdp={"flatten_parameters": True}, memory={"gc": True}, options=("handed-in",)),
    "recompute-but-products": Variant(memory={"gc": True, "gc_policy": "save_matmuls"}),
    "tp-recompute-but-products": Variant(tp=2, memory={"gc": True, "gc_policy": "save_matmuls"}),
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
    "compile": Variant(compute={"compile": True}),
    "compile-parts": Variant(fsdp={"wrap_layer_cls": ["GPT2MLP"]}, compute={"compile": True}),
    # Without inductor, whose C++ takes most of the time: what is tried is Dynamo's and autograd's part.
    "compile-graphs": Variant(compute={"compile": True, "compile_backend": "aot_eager"}),
    "tp-compile-graphs": Variant(tp=2, compute={"compile": True, "compile_backend": "aot_eager"}),
    "tp-compile-recompute": Variant(
        tp=2, compute={"compile": True, "compile_backend": "aot_eager"}, memory={"gc": True}
    ),
    "compile-recompute": Variant(
        recipe="sgd", compute={"compile": True, "compile_backend": "aot_eager"}, memory={"gc": True}
    ),
    "evaluate": Variant(options=("evaluate",), reference_options=("evaluate",)),
    "whole-batch": Variant(),
    "per-device": Variant(reference_options=("per-device",)),
    "ragged-whole-batch": Variant(options=("ragged",), reference_options=("ragged",)),
    "ragged-per-device": Variant(options=("ragged",), reference_options=("ragged", "per-device")),
}


@dataclass(frozen=True)
class TrainingCase:
    """One training run of one engine."""

    engine: str
    """An engine's kind and its number of devices, such as `xla-spmd-2`."""
    model: str
    variant: str

    @property
    def id(self) -> str:
        return f"{self.engine}-{self.model}-{self.variant}"

    @property
    def name(self) -> str:
        """Its name in the table of all cases."""
        return f"train-{self.model}-{self.variant}"

    @property
    def kind(self) -> str:
        return self.engine.rpartition("-")[0].removesuffix("-gpu")

    @property
    def num_devices(self) -> int:
        return int(self.engine.rpartition("-")[2])

    @property
    def is_fast(self) -> bool:
        return self.engine in FAST_ENGINES and self.model == FAST_MODEL and self.variant in FAST_VARIANTS

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        marks = [pytest.mark.timeout(SECONDS_TO_RUN + 60)]
        if not self.is_fast:
            marks.append(pytest.mark.slow)
        if self.kind.startswith("xla"):
            marks.append(pytest.mark.xla)
        return marks

    def as_input(self) -> dict[str, Any]:
        """Return what the worker reads."""
        variant = VARIANTS[self.variant]
        size = self.num_devices // (variant.dp * variant.tp * variant.sp)
        fsdp = {"size": size, "use_spmd": self.kind == "xla-spmd", **variant.fsdp}
        tp = {"size": variant.tp, "sequence_parallel": variant.sequence_parallel}
        config = {
            "backend": self.kind.partition("-")[0],
            "compute": variant.compute,
            "memory": variant.memory,
            "dist": {"dp": {"size": variant.dp}, "fsdp": fsdp, "tp": tp, "sp": {"size": variant.sp}},
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
        variant = VARIANTS[self.variant]
        return {
            "id": name,
            "model": self.model,
            "recipe": variant.recipe,
            "num_devices": self.num_devices // (variant.tp * variant.sp),
            "config": config,
            "options": options,
        }


def all_references(models: Iterable[str]) -> list[dict[str, Any]]:
    """Return what the worker reads of each unsharded run that some training is compared with."""
    every = (
        each
        for model in models
        for variant in VARIANTS
        for number in (1, 2, 4)
        for case in [TrainingCase(f"{REFERENCE}-{number}", model, variant)]
        for each in (case.as_reference(), case.as_plain_reference())
    )
    return [*{each["id"]: each for each in every}.values()]


def all_cases(marks: Iterable[pytest.Mark]) -> Iterator[TrainingCase]:
    """Return every combination that a test's `covers` marks name, some of them more than once."""
    for mark in marks:
        if mark.name != "covers":
            continue
        yield from (TrainingCase(*each) for each in product(*(mark.kwargs[key] for key in FACTORS)))


def cases_of(test: Any, module: ModuleType, *, in_full: bool = False) -> dict[TrainingCase, None]:
    """Return what a module's test is about: if that says `INSTEAD_OF`, on those engines in place of others only.

    Args:
        test: A function with marks `covers`.
        module: Its module.
        in_full: Whether also by marks that say `in_full=True`, which count with `--full-contract` only.
    """
    every = all_cases(mark for mark in getattr(test, "pytestmark", []) if in_full or not mark.kwargs.get("in_full"))
    instead = getattr(module, "INSTEAD_OF", None)
    if instead is not None:
        every = (replace(case, engine=instead[case.engine]) for case in every if case.engine in instead)
    return dict.fromkeys(every)


@cache
def chosen_cases(module: ModuleType) -> frozenset[TrainingCase]:
    """Return the cases that are run of those which a module's tests are about, whatever of it is selected."""
    every = cases_with_pairs(module)
    return frozenset(covering(every, [case for case in every if case.is_fast]))


def cases_with_pairs(module: ModuleType) -> dict[TrainingCase, set[Pair]]:
    """Return what a module's tests are about, each with the pairs of values that it has."""
    tests: dict[TrainingCase, list[str]] = {}
    for name, test in vars(module).items():
        if name.startswith("test_") and callable(test):  # not a module of tests
            for case in cases_of(test, module):
                tests.setdefault(case, []).append(name)
    return {case: _pairs(case, names) for case, names in tests.items()}


def _pairs(case: TrainingCase, tests: list[str]) -> set[Pair]:
    return pairs(
        {
            "engine": [case.kind],
            "number of devices": [case.num_devices],
            "model": [case.model],
            "variant": [case.variant],
            "test": tests,
        }
    )
