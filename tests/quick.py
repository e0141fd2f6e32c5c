"""The tests that the changed files touch, for ``make quick``: ``python -m tests.quick`` prints their paths.

A test file is touched when it changed, or when it imports a module that changed: by itself, else through the fewest
other modules. Tests of whole processes are chosen only for modules that have no others. Tests that need another
environment are never run here; where a module has only such tests, a line says so.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
PACKAGES = ("cache_manager", "transfer", "kvroute")
HOMES = ("examples", "tests/worlds", "tests/faults")
"""Folders whose modules are imported by their own names; those of others by their paths."""
PROCESSES = (
    "tests/faults",
    "tests/machines/test_transfer_simulation.py",
    "tests/real/processes",
    "tests/spec/bench/replay_study",
    "tests/spec/paged_engine/test_replay.py",
)
ELSEWHERE = tuple(f"tests/real/{name}" for name in ("gpu", "managers", "sglang", "trainers", "trainers_live", "vllm"))
"""What needs another environment: see the Makefile."""
FILES_MAX = 12
"""So that it is over in a minute; the files that import most of what changed come first."""

_IMPORTS = re.compile(rf"\b(from|import) ({'|'.join(PACKAGES)})\b")

Graph = dict[str, set[str]]
"""Modules by their names, and which others of the repository each imports."""


def changed() -> list[Path]:
    """Python files that differ from the merge base with main, or that git does not know yet."""
    base = _git("merge-base", "HEAD", "main") or _git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    names = _git("diff", "--name-only", "--diff-filter=d", base[0]) + _git("ls-files", "--others", "--exclude-standard")
    return [Path(name) for name in names if name.endswith(".py")]


def touched(files: Iterable[Path]) -> list[str]:
    """Changed tests, then the nearest tests of each changed module, those of most modules first."""
    files = list(files)
    own = [file for file in files if _is_test(file)]
    counts: dict[Path, int] = {}
    for file in files:
        for test in () if file in own else nearest(module_name(file)):
            counts[test] = counts.get(test, 0) + 1
    near = sorted(counts.keys() - own, key=lambda test: (-counts[test], test))
    return [str(file) for file in own + near if not _is_in(file, ELSEWHERE)]


def nearest(module: str) -> list[Path]:
    """The tests that import a module by itself, else those that do so through the fewest others: of those that are
    quick, else of any of this environment, else of any."""
    importers: Graph = {}
    for name, imported in import_graph().items():
        for each in imported:
            importers.setdefault(each, set()).add(name)
    rings, seen = [{module}], {module}
    while rings[-1]:
        rings.append(set().union(*(importers.get(name, ()) for name in rings[-1])) - seen)
        seen |= rings[-1]
    tests = {module_name(path): path for path in _sources() if _is_test(path)}
    for left_out in (PROCESSES + ELSEWHERE, ELSEWHERE, ()):
        for ring in rings[1:]:
            if near := sorted(tests[name] for name in ring & tests.keys() if not _is_in(tests[name], left_out)):
                return near
    return []


@cache
def import_graph() -> Graph:
    """What each module of the repository imports, wherever in its text. A name that a package has from one of its
    modules counts as an import of that module, not of the package and all that it imports."""
    paths = {module_name(path): path for path in _sources()}
    return {name: {*_imported((ROOT / path).read_text(), paths)} - {name} for name, path in paths.items()}


def module_name(file: Path) -> str:
    """The name under which a file is imported.

    >>> module_name(Path("tests/worlds/ports.py")), module_name(Path("transfer/__init__.py"))
    ('ports', 'transfer')
    """
    home = next((home for home in HOMES if file.is_relative_to(home)), ".")
    return ".".join(file.relative_to(home).with_suffix("").parts).removesuffix(".__init__")


def _imported(source: str, paths: Mapping[str, Path]) -> Iterator[str]:
    """The modules that a text imports; a string that names a module, or is a program that imports it, counts, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name, paths)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield from _with_parents(_home_of(node.module, alias.name, paths), paths)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in paths:
                yield from (name for name in (node.value, f"{node.value}.__main__") if name in paths)
            elif _IMPORTS.search(node.value):
                with suppress(SyntaxError):
                    yield from _imported(dedent(node.value), paths)


def _with_parents(name: str, paths: Mapping[str, Path]) -> Iterator[str]:
    """A module, and the packages that it is in, whose ``__init__`` is run before it."""
    while name:
        if name in paths:
            yield name
        name = name.rpartition(".")[0]


def _home_of(package: str, name: str, paths: Mapping[str, Path]) -> str:
    """The module that a name is from, which a package may have from one of its modules."""
    if f"{package}.{name}" in paths or package not in paths or paths[package].name != "__init__.py":
        return f"{package}.{name}" if f"{package}.{name}" in paths else package
    return _homes(ROOT / paths[package]).get(name, package)


@cache
def _homes(init: Path) -> dict[str, str]:
    """Which module each name of a package is from, as its stub says, or else its text."""
    stub = init.with_suffix(".pyi")
    text = ast.parse((stub if stub.exists() else init).read_text())
    imports = [node for node in ast.walk(text) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


@cache
def _sources() -> tuple[Path, ...]:
    names = _git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    homes = (*PACKAGES, "examples", "tests")
    return tuple(Path(name) for name in names if name.partition("/")[0] in homes and (ROOT / name).exists())


def _is_test(file: Path) -> bool:
    return file.parts[0] == "tests" and file.name.startswith("test_")


def _is_in(file: Path, folders: tuple[str, ...]) -> bool:
    return any(file.is_relative_to(folder) for folder in folders)


def _git(*arguments: str) -> list[str]:
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    return ran.stdout.split()


if __name__ == "__main__":
    for file in changed():
        if (near := nearest(module_name(file))) and not touched([file]):
            print(f"{file}: its tests need another environment: {near[0].parent}", file=sys.stderr)
    paths = touched(changed())
    if left := paths[FILES_MAX:]:
        print(f"{len(left)} more files of tests are touched: make test", file=sys.stderr)
    print(*paths[:FILES_MAX])
