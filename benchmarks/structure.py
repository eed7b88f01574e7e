"""Say how the source is built: its sizes, its seams, and the names that stand for two things.

python -m benchmarks structure [--root PATH]   # PATH: another checkout

Nothing is imported and nothing is run: all of it is read from the files.
"""

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "torchacc"
FOLDERS = (PACKAGE, "tests", "benchmarks")
SEAM = ("Engine", "ShardedModel", "ModelShards")
AXES = {"dp", "fsdp", "pp", "sp", "tp"}
UNNAMED = {"__init__.py", "__main__.py"}
"""Files whose name says nothing."""
LONG_LINES = 500


def main(argv: list[str] | None = None) -> int:
    """Print what is found in a checkout."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks structure", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, metavar="PATH", help="the checkout (default: this one)")
    root = parser.parse_args(argv).root
    if not (root / PACKAGE).is_dir():
        parser.error(f"{root} has no folder {PACKAGE}/")
    sys.stdout.write("\n".join(describe(root)) + "\n")
    return 0


def describe(root: Path) -> Iterator[str]:
    """Yield the lines of the whole description."""
    for folder in FOLDERS:
        yield from _section(f"Lines of {folder}/", lines_per_folder(root / folder))
    package = {path.relative_to(root).as_posix(): parse(path) for path in python_files(root / PACKAGE)}
    for name, methods in seam(package).items():
        yield from _section(f"{name}: {len(methods)} public methods and properties", [", ".join(methods)])
    naming = [path for path, tree in package.items() if names_axis(tree)]
    yield from _section(f"Files of the package that spell out a mesh axis: {len(naming)}", naming)
    classes = twice((node.name.lstrip("_"), path) for path, tree in package.items() for node in classes_of(tree))
    yield from _section(f"Class names that occur twice, underscores aside: {len(classes)}", classes)
    files = twice((Path(path).name, path) for path in package if Path(path).name not in UNNAMED)
    yield from _section(f"File names that occur twice: {len(files)}", files)
    chain = longest_chain(package)
    yield from _section(f"Longest chain of imports when modules are loaded: {len(chain)} modules", chain)
    long = [
        f"{lines:7,}  {path.relative_to(root).as_posix()}"
        for folder in FOLDERS
        for path in python_files(root / folder)
        if (lines := count_lines(path)) > LONG_LINES
    ]
    yield from _section(f"Files of more than {LONG_LINES} lines: {len(long)}", long)


def python_files(folder: Path) -> list[Path]:
    """Return the Python files below a folder, in order."""
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


@cache
def count_lines(path: Path) -> int:
    """Return how many lines a file has."""
    return len(path.read_text(encoding="utf-8").splitlines())


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def lines_per_folder(folder: Path) -> list[str]:
    """Return a line for each folder that has Python files of its own, and the sum of all."""
    sizes: dict[Path, list[int]] = defaultdict(list)
    for path in python_files(folder):
        sizes[path.parent].append(count_lines(path))
    lines = [
        f"{sum(counts):7,}  {len(counts):3} files  {path.relative_to(folder.parent).as_posix()}/"
        for path, counts in sorted(sizes.items())
    ]
    every = [count for counts in sizes.values() for count in counts]
    return [*lines, f"{sum(every):7,}  {len(every):3} files  in all"]


def classes_of(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Yield the classes of a module, also those inside of others."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def seam(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return the public methods and properties that the classes of the engine seam themselves define."""
    return {
        node.name: [
            part.name
            for part in node.body
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and not part.name.startswith("_")
        ]
        for tree in trees.values()
        for node in classes_of(tree)
        if node.name in SEAM
    }


def names_axis(tree: ast.Module) -> bool:
    """Say whether a module spells out the name of a mesh axis, as a string of its own."""
    return any(isinstance(node, ast.Constant) and node.value in AXES for node in ast.walk(tree))


def twice(named: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each name that stands in more than one place."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, place in named:
        places[name].append(place)
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def longest_chain(trees: dict[str, ast.Module]) -> list[str]:
    """Return modules of which each imports the next one as it is loaded: the longest such list that there is."""
    modules = {module_name(path): tree for path, tree in trees.items()}
    imported = {name: sorted(set(loaded_with(tree, modules)) - {name}) for name, tree in modules.items()}
    found: dict[str, list[str]] = {}

    def chain(name: str, above: tuple[str, ...]) -> list[str]:
        if name not in found:
            below = (chain(other, (*above, name)) for other in imported[name] if other not in above)
            found[name] = [name, *max(below, key=len, default=[])]
        return found[name]

    return max((chain(name, ()) for name in sorted(modules)), key=len, default=[])


def module_name(path: str) -> str:
    """Return `torchacc.config` of `torchacc/config/__init__.py`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def loaded_with(tree: ast.Module, modules: Collection[str]) -> Iterator[str]:
    """Yield which modules the imports of another load that run as it is loaded itself."""
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            # `from package import name`: the name is a module, or something in the package's own.
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from named & set(modules)
            if not named <= set(modules) and node.module in modules:
                yield node.module


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are reached as a module is loaded: neither in functions nor for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from (other, *_executed(other))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from (node, *_executed(node))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield title
    yield from (f"    {line}" for line in lines)
    yield ""


if __name__ == "__main__":
    sys.exit(main())
