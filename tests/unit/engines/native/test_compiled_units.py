"""`compute.compile`: what is compiled, what is said of it, and what is refused before anything starts."""

from pathlib import Path

import pytest
import torch
from torch import nn

from torchacc.config import Config, resolve
from torchacc.engines.native import compiled_units
from torchacc.engines.patches import torch_compile
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.parallel.mesh import from_config
from torchacc.parallel.plan import make_plan

PROGRAM = Path(__file__).with_name("compiled_units_program.py")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CASES = [
    "layers_that_are_alike_share_a_graph",
    "inductor_trains_alike",
    "broken_graph_is_named",
    "another_shape_is_named_and_warned_of",
    "second_backward_of_a_graph",
    "hooks_given_after_the_first_run_are_called",
    "recompute_inside_of_a_unit",
    "recompute_inside_of_a_graph",
    "recompute_around_a_broken_graph",
    "recompute_where_classes_and_shapes_are_many",
    "keywords_of_layers_that_checkpoint_has_too",
    "tensors_that_a_graph_writes_to_are_refused",
    "writes_that_no_gradient_follows_are_not_refused",
    "weights_that_change_before_a_graph_runs_again_are_refused",
    "a_graph_that_runs_again_drops_the_same",
    "layers_with_caches_share_a_graph",
    "outputs_that_layers_note_run_eagerly",
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled_units(found, case):
    assert found[case] is None, found[case]


@pytest.mark.slow
def test_all_cases_were_looked_at(found):
    assert found.keys() == set(CASES)


def resolved(**sections):
    return resolve(Config.from_dict(sections), Job(num_processes=2, local_num_processes=2), num_devices=2)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"compute": {"compile_dynamic": True}}, r"compile_dynamic = True says how units are compiled, and compute"),
        ({"compute": {"compile_backend": "eager"}}, r"compile_backend = 'eager' says how units are compiled"),
        (
            {"compute": {"compile": True, "compile_backend": "eager", "compile_mode": "max-autotune-no-cudagraphs"}},
            r"compile_mode = 'max-autotune-no-cudagraphs' is one of the backend 'inductor'",
        ),
        ({"compute": {"compile": True, "compile_mode": "reduce-overhead"}}, r"compile_mode = 'reduce-overhead'"),
    ],
    ids=["dynamic", "backend", "mode-of-another", "cuda-graphs"],
)
def test_options_that_contradict_each_other_are_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        resolved(**sections)


@pytest.mark.parametrize(
    ("sections", "device", "message"),
    [
        ({"memory": {"offload_activations": True}}, GPU, r"with memory\.offload_activations = True is not available"),
        (
            {"memory": {"gc": True, "gc_policy": "save_matmuls"}},
            CPU,
            r"compiles nothing while PyTorch keeps single results",
        ),
        ({"compute": {"compile_backend": "inducto"}}, CPU, r"'inducto' is not a backend .*did you mean 'inductor'"),
    ],
    ids=["offload", "products-kept", "backend"],
)
def test_what_is_not_compiled_is_refused(sections, device, message):
    sections["compute"] = {"compile": True, **sections.get("compute", {})}
    with pytest.raises(ConfigError, match=message):
        compiled_units.check(resolved(**sections), device)


def test_a_machine_without_a_compiler_is_told_what_to_install():
    from torch._inductor import config

    with (
        config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(ConfigError, match=r"cannot be had on this machine: there is no C\+\+ compiler: install g\+\+"),
    ):
        compiled_units.check(resolved(compute={"compile": True}), CPU)


def test_a_gpu_that_triton_does_not_know_is_named(monkeypatch):
    monkeypatch.setattr(torch_compile.importlib.util, "find_spec", lambda name: None)
    assert "triton, which compiles for this device, is not installed" in torch_compile.why_it_cannot(GPU)
    monkeypatch.setattr(torch_compile.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert "compute capability 6.1" in torch_compile.why_it_cannot(GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert torch_compile.why_it_cannot(GPU) is None


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, ("layers.0", "layers.1")),
        ({"dist": {"fsdp": {"wrap_modules": ["layers.*", "layers.0.0"]}}}, ("layers.0.0", "layers.1")),
        ({"dist": {"fsdp": {"min_num_params": 10**6}}}, ("",)),
        ({"memory": {"gc": True, "gc_cls": ["Linear"], "gc_cnt": 1}}, ("layers.1", "layers.0.0")),
    ],
    ids=["units", "inner-units", "the-model", "recomputed"],
)
def test_what_is_compiled_holds_nothing_that_is_compiled(sections, expected):
    config = resolve(Config.from_dict(sections), Job(), num_devices=1)
    model = Nested()
    assert compiled_units.regions(make_plan(model, config, from_config(config))) == expected
