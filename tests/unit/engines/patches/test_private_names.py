"""Which private name of PyTorch is missing from the installed torch: one test for each, so that its name says it."""

import ast
import functools
import inspect
import json
from pathlib import Path

import pytest

from tests import forkrun
from torchacc.engines.patches import private_names
from torchacc.engines.patches.private_names import LAUNCHER_NAMES, PRIVATE_NAMES, look_up
from torchacc.errors import EngineError

PACKAGE = Path(private_names.__file__).parents[2]
ENGINES = PACKAGE / "engines"
NOT_PYTORCHS = {"_gradient_checkpointing_func", "_new_buffer", "_of_torchacc", "_replace"}
"""Transformers', torchao's, ours, and a public method of named tuples."""

PROGRAM = """
import json, sys
import torch, torchacc
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchacc.engines.patches.private_names import PRIVATE_NAMES, look_up

model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
# In bfloat16, for which there is a group of FSDP2 on one device, too.
torchacc.accelerate(model, config=torchacc.Config(backend="native", compute={"bf16": True}))
loss = nn.functional.mse_loss(model(torch.ones(4, 2)), torch.ones(4, 2), reduction="sum")
plain = torch.ones(2, requires_grad=True)
state = fully_shard.state(model)
group = state._fsdp_param_group
found = [model, state, group, state._state_ctx, state._comm_ctx, *group.fsdp_params, *model.parameters()]
found += [plain, plain.untyped_storage(), torch.ops.aten.add.Tensor, torch.optim.SGD([plain])]
nodes = [nn.functional.mse_loss(plain, plain * 2, reduction="sum").grad_fn, plain.sum().grad_fn]

def has(each):
    if each.owner == "torch.autograd:Node":
        return any(hasattr(node, each.name) for node in nodes)
    return any(isinstance(one, look_up(each.owner)) and hasattr(one, each.name) for one in found)

print(json.dumps([str(each) for each in PRIVATE_NAMES if each.of_instances and not has(each)]))
"""


@pytest.fixture(scope="module")
def missing_from_instances():
    done = forkrun.run("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", PRIVATE_NAMES, ids=str)
def test_the_installed_torch_has_the_name(name, request):
    if name.of_instances:
        missing = request.getfixturevalue("missing_from_instances")
        assert str(name) not in missing, f"engines/{name.used_in} needs it: {name.why}"
    else:
        assert name.is_there(), f"engines/{name.used_in} needs it: {name.why}"


@pytest.mark.parametrize("name", LAUNCHER_NAMES, ids=str)
def test_the_agent_of_the_installed_torch_has_the_name(name):
    if name.of_instances:
        assert f"self.{name.name}" in inspect.getsource(look_up(name.owner)), f"{name.used_in} needs it: {name.why}"
    else:
        assert name.is_there(), f"{name.used_in} needs it: {name.why}"


def test_every_private_name_of_the_agent_is_in_the_list():
    path = PACKAGE / "launch" / "agent.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (agent,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "_Agent")
    overridden = {part.name for part in agent.body if isinstance(part, ast.FunctionDef) and hasattr(base(), part.name)}
    listed = {name.name for name in LAUNCHER_NAMES}
    assert {*private_names_in(path), *filter(is_private, overridden)} <= listed


def base():
    return look_up(LAUNCHER_NAMES[0].owner)


def test_a_missing_name_is_said_before_a_model_is_sharded(monkeypatch):
    gone = private_names.PrivateName("torch.nn:Module", "_is_gone", "base.py", "for this test")
    monkeypatch.setattr(private_names, "PRIVATE_NAMES", (gone,))
    private_names.check_installed_torch.cache_clear()
    with pytest.raises(EngineError, match=r"has no torch.nn:Module._is_gone, which engines/base.py needs"):
        private_names.check_installed_torch()
    monkeypatch.setattr(private_names, "_CLASSES", {"FSDPParam": "torch.no_such_module:FSDPParam"})
    of_class = private_names.PrivateName("torch.no_such_module:FSDPParam", "", "a.py", "for this test")
    monkeypatch.setattr(private_names, "PRIVATE_NAMES", (of_class,))
    with pytest.raises(EngineError, match=r"has no torch.no_such_module:FSDPParam, which engines/a.py needs"):
        private_names.FSDPParam  # noqa: B018
    private_names.check_installed_torch.cache_clear()


def test_every_private_name_that_the_engines_use_is_in_the_list():
    listed = {part for each in PRIVATE_NAMES for part in f"{each.owner}.{each.name}".replace(":", ".").split(".")}
    used = {}
    for path in sorted(ENGINES.rglob("*.py")):
        relative = path.relative_to(ENGINES)
        if relative.parts[0] in ("xla", "patches"):
            continue
        for name in private_names_in(path):
            used.setdefault(name, str(relative))
    left_out = {name: file for name, file in used.items() if name not in listed | NOT_PYTORCHS}
    assert not left_out


def private_names_in(path):
    """Yield the private names in a file that nothing in the package defines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own_names():
            yield node.attr
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] != "torchacc":
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if is_private(part))


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def own_names():
    """Return every name that the package defines."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.add(node.attr)
    return found


def is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"
