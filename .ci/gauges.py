"""What a reader of the packages has to hold at once, as numbers. No number stops anything: ``make check`` prints them.

Run at the root of a checkout: ``python .ci/gauges.py``.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeGuard

import tests_read

PACKAGES = ("cache_manager", "transfer", "kvroute")
NOT_CORE = ("manager", "regions", "storage", "testing", "transfer_manager")
METHODS_AIM = 30
OPTIONAL_PARTS = ("kvroute/connector/scheduler.py", "kvroute/connector/worker.py")
TRAINERS = ("megatron", "nemo_rl", "prime_rl", "skyrl", "slime", "transformers", "verl")
IDIOMS = {"logger", "main", "_HOME"}
"""Names that are the same in every Python module that has them, as ``__getattr__`` is."""
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
Definition = (ast.FunctionDef, ast.AsyncFunctionDef)
GENERIC = {
    "found",
    "each",
    "told",
    "given",
    "said",
    "there",
    "at",
    "of",
    "come",
    "mine",
    "theirs",
    "here",
    "thing",
    "things",
    "this",
    "that",
    "it",
    "those",
    "them",
    "what",
    "which",
    "one",
    "other",
    "others",
    "rest",
}
"""Words that name nothing by themselves: a local name is a noun of the glossary, or of its type."""


class Module:
    """One source file: its code tokens, its lines, and what its syntax tree says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        source = path.read_text()
        self.lines = source.count("\n")
        self.tree = ast.parse(source)
        prose = {line for docstring in docstrings(self.tree) for line in docstring}
        spoken = [
            token
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type not in SILENT and token.start[0] not in prose
        ]
        self.tokens = len(spoken)
        self.code_lines = len({token.start[0] for token in spoken})
        lines = source.splitlines()
        self.characters = sum(len(lines[row - 1].strip()) for row in {token.start[0] for token in spoken})
        self.walrus = sum(isinstance(node, ast.NamedExpr) for node in ast.walk(self.tree))
        self.packed = sum(is_packed(node) for node in ast.walk(self.tree))
        own = set(members(self.tree))
        self.reaches = sum(is_reach(node, own) for node in ast.walk(self.tree))
        assigned = [node.id for node in ast.walk(self.tree) if is_assigned(node)]
        self.assigned = len(assigned)
        self.generic = sum(name.strip("_") in GENERIC for name in assigned)

    @property
    def is_core(self) -> bool:
        return self.path.parts[0] == "cache_manager" and self.path.parts[1] not in NOT_CORE

    @property
    def is_testing(self) -> bool:
        return "testing" in self.path.parts


def docstrings(tree: ast.Module) -> Iterator[range]:
    """The lines of every string that stands alone: docstrings, and those behind an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            yield range(node.lineno, node.end_lineno + 1)


def is_assigned(node: ast.AST) -> TypeGuard[ast.Name]:
    """A name that gets a value, of a loop or a comprehension, too."""
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def is_packed(node: ast.AST) -> bool:
    """Several assignments in one statement: ``a, b = x, y``."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def members(tree: ast.Module) -> Iterator[str]:
    """What the module's own classes have: methods, fields, and attributes that they give themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (statement.name for statement in node.body if isinstance(statement, Definition))
            fields = [statement.target for statement in node.body if isinstance(statement, ast.AnnAssign)]
            yield from (target.id for target in fields if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def is_reach(node: ast.AST, own: AbstractSet[str]) -> bool:
    """A private attribute of an object of another module: ``other._name``. ``own`` are those of the module's classes; a
    named tuple's are public, and so is ``os._exit``."""
    if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
        return False
    if node.attr in own or node.attr in ("_asdict", "_replace"):
        return False
    owner = node.value
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super":
        return False
    return not (isinstance(owner, ast.Name) and owner.id in ("self", "cls", "os"))


def role(path: Path) -> str:
    """What a module is read as. Two with one role are sides of one port, where one name may stand for one thing: the
    same module of two engines' integrations, two trainers' adapters, the kernel and its reference."""
    match path.with_suffix("").parts:
        case ("kvroute", "integrations", _, name):
            return f"integrations: {name}"
        case ("kvroute", "replay", name) if name in TRAINERS:
            return "trainers"
        case ("kvroute", "capture", "kernel" | "naive"):
            return "capture"
    return str(path)


def defined(tree: ast.Module) -> Iterator[str]:
    """The names that a module gives to things of its own: classes, functions, constants, types."""
    statements = list(tree.body)
    for statement in statements:
        if isinstance(statement, (ast.If, ast.Try)):
            statements += [*statement.body, *statement.orelse]
        elif isinstance(statement, (*Definition, ast.ClassDef)):
            yield statement.name
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (node.id for target in targets for node in ast.walk(target) if is_assigned(node))


def ambiguous(modules: Iterable[Module]) -> dict[str, set[str]]:
    """The names at module level that stand for more than one thing, and in which modules."""
    roles: dict[str, set[str]] = {}
    for module in modules:
        for name in set(defined(module.tree)) - IDIOMS:
            if not name.startswith("__"):
                roles.setdefault(name, set()).add(role(module.path))
    return {name: where for name, where in roles.items() if len(where) > 1}


def questions(module: Module) -> int:
    """How often a class asks whether something of its own is there: an optional part that it has, or has not."""
    return sum(
        isinstance(node, ast.Compare)
        and isinstance(node.ops[0], (ast.Is, ast.IsNot))
        and isinstance(node.comparators[0], ast.Constant)
        and node.comparators[0].value is None
        and "self." in ast.unparse(node.left)
        for node in ast.walk(module.tree)
    )


def methods(modules: list[Module]) -> dict[str, int]:
    """By class, how many methods it has with those of its bases in these modules."""
    classes = {
        node.name: node for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)
    }

    def names(name: str, seen: tuple[str, ...]) -> Counter[str]:
        if name not in classes or name in seen:
            return Counter()
        node = classes[name]
        own = Counter(statement.name for statement in node.body if isinstance(statement, Definition))
        for base in node.bases:
            root = base.value if isinstance(base, ast.Subscript) else base
            own += names(getattr(root, "id", getattr(root, "attr", "")), (*seen, name))
        return own

    return {name: names(name, ()).total() for name in classes}


def show(name: str, modules: list[Module]) -> None:
    code_lines = sum(module.code_lines for module in modules)
    tokens = sum(module.tokens for module in modules)
    characters = sum(module.characters for module in modules) / code_lines
    packed = 100 * sum(module.packed for module in modules) / code_lines
    walrus = 100 * sum(module.walrus for module in modules) / code_lines
    reaches = sum(module.reaches for module in modules)
    generic = 100 * sum(module.generic for module in modules) / sum(module.assigned for module in modules)
    counted = methods(modules)
    largest = max(counted, key=lambda name: counted[name])
    over = sum(n > METHODS_AIM for n in counted.values())
    lines = sum(module.lines for module in modules)
    print(
        f"{name:24} {lines:6} {tokens:8} {tokens / code_lines:11.2f} {characters:10.1f} {packed:10.2f}"
        f" {walrus:10.2f} {reaches:7} {generic:9.2f} {len(ambiguous(modules)):8}"
        f" {over:9}   {largest} {counted[largest]}"
    )


def main() -> None:
    head = f"{'':24} {'lines':>6} {'tokens':>8} {'tokens/line':>11} {'chars/line':>10} {'packed/100':>10}"
    head += f" {'walrus/100':>10} {'reaches':>7} {'generic %':>9} {'2 things':>8}"
    print(f"{head} {f'>{METHODS_AIM} meth.':>9}   most methods")
    every = list[Module]()
    for package in PACKAGES:
        modules = [Module(path) for path in sorted(Path(package).rglob("*.py"))]
        if package == "cache_manager":
            show("cache_manager, its core", [module for module in modules if module.is_core])
            show("cache_manager, runtime", [module for module in modules if not module.is_testing])
        show(package, modules)
        every += modules
    print(f"names at module level that stand for two things, over the three packages: {len(ambiguous(every))}")
    asked = sum(questions(module) for module in every if str(module.path) in OPTIONAL_PARTS)
    print(f"questions for an optional part in the connector's scheduler and worker: {asked}")
    tests_read.show(PACKAGES)


if __name__ == "__main__":
    main()
