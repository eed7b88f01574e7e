"""Hold the package to docs/design/architecture.md: imports go down only, and what is dangerous has one place."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from torchacc.parallel.axes import AXES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchacc"

# Lowest first; a module may import from its own layer and from those below.
LAYERS = (
    {"errors", "env", "logging"},
    {"config", "launch"},
    {"chunked_loss"},
    {"parallel"},
    {"data"},
    {"engines"},
    {"memory_plan"},
    {"layouts"},
    {"checkpoint"},
    {"api", "arguments", "attach"},
    {"functional", "dist"},
    {"aot"},
    {"integrations"},
    {"train", "cli", "__main__"},
)
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}
# It writes the classes of a file format, and starts nothing.
DCP_FILES = ("checkpoint", "other_formats", "dcp_files")
# It is torchrun's agent, and runs in no process of a training.
AGENT = ("launch", "agent")
HOMES = {
    "torch_xla": [("engines", "xla"), ("engines", "patches")],
    "torch.distributed": [("engines",), DCP_FILES, AGENT],
}
# Where "fsdp" is a function, a key of a trainer's file, or an argument of transformers', and no axis of the mesh.
NAMES_OTHER_THINGS = {
    ("dist", "__init__"),
    ("integrations", "hf", "training_arguments"),
    ("train", "config"),
    ("train", "file"),
    ("train", "device_layout"),
}
ENGINE_NAMES = {"auto", "xla", "native", "lazy", "eager", "xla-multiprocess", "xla-spmd"}

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def each_module(check: Callable[[Path], None]) -> Callable[[], None]:
    """Make one test of a check of a module, as thousands would take longer than what they check."""

    def test() -> None:
        failures = []
        for path in MODULES:
            try:
                check(path)
            except AssertionError as error:
                failures.append(f"{path.relative_to(ROOT)}: {error}")
        assert not failures, "\n".join(failures)

    test.__name__ = check.__name__
    return test


def parts(path: Path) -> tuple[str, ...]:
    """Return where a module lies below the package: ("engines", "xla", "spmd")."""
    return path.relative_to(PACKAGE).with_suffix("").parts


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of everything that a module imports, also inside of functions."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the full name instead of a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_submodule(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def comes_from(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


@each_module
def test_imports_go_down_only(path):
    own = parts(path)[0]
    assert own in LAYER_OF, f"{own} has no layer: add it to docs/design/architecture.md and to LAYERS"
    for name in imports(path):
        if name.startswith("torchacc."):
            other = name.split(".")[1]
            assert LAYER_OF.get(other, -1) <= LAYER_OF[own], f"{own} imports {name}, which lies above it"


@each_module
def test_nobody_inside_imports_the_package_root(path):
    for name in imports(path):
        if comes_from(name, "torchacc"):
            assert name != "torchacc", "import the submodule instead of the package root"
            assert is_submodule(name.split(".")[1]), f"{name} is no submodule: import it from where it is defined"


@each_module
def test_libraries_stay_where_they_are_fenced_in(path):
    for library, homes in HOMES.items():
        if any(parts(path)[: len(home)] == home for home in homes):
            continue
        uses = [name for name in imports(path) if comes_from(name, library)]
        assert not uses, f"{uses}: {library} belongs under {', '.join('torchacc/' + '/'.join(home) for home in homes)}"


@each_module
def test_torch_distributed_is_not_reached_through_torch(path):
    if parts(path)[0] == "engines":
        return
    assert "torch.distributed" not in attributes(path)


@each_module
def test_only_env_touches_the_environment(path):
    if parts(path) == ("env",):
        return
    reached = attributes(path) | set(imports(path))
    assert not reached & {"os.environ", "os.getenv", "os.putenv", "os.unsetenv"}, "use torchacc.env"


@each_module
def test_only_the_registry_compares_the_name_of_an_engine(path):
    if parts(path) == ("engines", "registry"):
        return
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            # `device.type == "xla"` asks about a device.
            about_a_device = any(isinstance(operand, ast.Attribute) and operand.attr == "type" for operand in operands)
            names = {value for operand in operands for value in strings(operand)} & ENGINE_NAMES
            assert about_a_device or not names, f"line {node.lineno} compares {names}: leave it to engines/registry.py"


@each_module
def test_an_axis_of_the_mesh_is_asked_for_by_its_role(path):
    if parts(path) in {("parallel", "axes"), *NAMES_OTHER_THINGS} or parts(path)[0] == "config":
        return
    named = {node.lineno for node in constants(parsed(path)) if node.value in AXES}
    assert not named, f"lines {sorted(named)} name an axis: ask the mesh by a Role, as in mesh.size(Role.SHARD)"


def test_no_class_and_no_file_has_the_name_of_another():
    classes, files = Counter(), Counter()
    for path in MODULES:
        files[path.name] += not path.stem.startswith("__")
        tree = parsed(path)
        classes.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    twice = {name for names in (classes, files) for name, count in names.items() if count > 1}
    assert not twice, f"{twice}: one name for one thing"


@cache
def attributes(path: Path) -> set[str]:
    tree = parsed(path)
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def strings(node: ast.expr) -> Iterator[str]:
    """Yield the strings that an operand spells out, also inside of a tuple or a set."""
    yield from (constant.value for constant in constants(node))


def constants(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the string constants in a tree."""
    return (part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))
