"""What one must read of the tests to change a module, and where tests reach into what they test.

A module's tests are those in the folder that mirrors its own whose name has its name: ``test_blocks_closed.py`` is of
``blocks.py``. With them one reads what they import of ``tests``, and the ``conftest.py`` whose fixtures they ask for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SPEC, WORLDS, MACHINES = Path("tests/spec"), Path("tests/worlds"), Path("tests/machines")
LINES_AIM = 700
REACHES = ("setattr", "getattr", "delattr", "hasattr")


def show(packages: tuple[str, ...]) -> None:
    """The modules with the most lines of tests to read; private names of the packages that tests use."""
    modules = [path for package in packages for path in sorted(Path(package).rglob("*.py"))]
    lines = {module: sum(_lines(path) for path in _support(files)) for module in modules if (files := mirrors(module))}
    worst = sorted(lines, key=lambda module: -lines[module])
    over = sum(n > LINES_AIM for n in lines.values())
    print(f"lines of tests to read for a module: above {LINES_AIM} for {over} of {len(lines)}", end="; ")
    print(f"no test has the name of {len(modules) - len(lines)}")
    print("".join(f"{lines[module]:8} {module}\n" for module in worst[:5]), end="")
    private = {name for module in modules for name in _private_names(module)}
    outside = [path for path in _tests() if not path.is_relative_to(MACHINES)]
    uses = {path: sum(1 for _ in _reaches(path, private, packages)) for path in outside}
    print(f"private names of the packages in tests outside {MACHINES}: {sum(uses.values())}")
    for path in sorted(uses, key=lambda path: -uses[path])[:5]:
        print(f"{uses[path]:8} {path}")


def mirrors(module: Path) -> list[Path]:
    """The tests of a module, by their folder and their names; those of a package's name are of its module of that name,
    where it has one."""
    if module.stem == "__init__" and (module.parent / f"{module.parent.name}.py").exists():
        return []
    name = module.parent.name if module.stem == "__init__" else module.stem
    home = SPEC / module.parent
    while not home.exists():
        home = home.parent
    return [path for path in sorted(home.glob("test_*.py")) if re.search(rf"_{name}(_|$)", path.stem)]


def _support(files: list[Path]) -> set[Path]:
    """These files, and all of ``tests`` that they import or whose fixtures they ask for."""
    known = set[Path]()
    left = list(files)
    while left:
        path = left.pop()
        if path in known:
            continue
        known.add(path)
        left += [WORLDS / f"{name}.py" for name in _imported(path) if (WORLDS / f"{name}.py").exists()]
        conftests = [folder / "conftest.py" for folder in path.parents if folder.is_relative_to(SPEC)]
        left += [conftest for conftest in conftests if conftest.exists() and _asks(path, conftest)]
    return known


def _asks(path: Path, conftest: Path) -> bool:
    """Whether a test or a fixture of a file asks for a fixture of a conftest, as an argument."""
    asking = [function for function in _functions(path) if function.name.startswith("test_") or _is_fixture(function)]
    arguments = {argument.arg for function in asking for argument in function.args.args}
    return any(_is_fixture(function) and function.name in arguments for function in _functions(conftest))


def _functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def _is_fixture(function: ast.FunctionDef) -> bool:
    return any("fixture" in ast.unparse(decorator) for decorator in function.decorator_list)


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("tests.worlds.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.removeprefix("tests.worlds.")


def _private_names(module: Path) -> Iterator[str]:
    """What a module calls private: its functions, classes, constants and methods, and what it keeps in ``self``."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = [node.attr]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            continue
        yield from (name for name in names if re.match(r"_[^_]", name))


def _reaches(path: Path, private: set[str], packages: tuple[str, ...]) -> Iterator[ast.AST]:
    """A private attribute of another object, an import of a private name, or one as a text, as ``setattr`` has it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in private and not _is_own(node.value):
            yield node
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in packages:
            yield from (alias for alias in node.names if alias.name in private)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in REACHES:
            yield from (name for name in node.args if isinstance(name, ast.Constant) and name.value in private)


def _is_own(owner: ast.expr) -> bool:
    """Whether it is the object itself, or what it inherits."""
    named = owner.func if isinstance(owner, ast.Call) else owner
    return isinstance(named, ast.Name) and named.id in ("self", "cls", "super")


def _tests() -> list[Path]:
    """All Python files of the tests, without those of environments that lie among them."""
    return [path for path in sorted(Path("tests").rglob("*.py")) if ".venv" not in path.parts]


def _lines(path: Path) -> int:
    return path.read_text().count("\n")
