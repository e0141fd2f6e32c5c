"""Trainers' own functions, out of modules that cannot be imported here."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def code_of(path: Path, *wanted: str, **known: Any) -> dict[str, Any]:
    """These functions and classes of a module whose imports a CPU cannot have; ``known`` are the names that they use.

    A function inside a class is found too, and becomes one of its own.
    """
    found = [n for n in ast.walk(ast.parse(path.read_text())) if getattr(n, "name", None) in wanted]
    assert len(found) == len(wanted), f"{path} has {[getattr(n, 'name', None) for n in found]}"
    annotated = ast.parse("from __future__ import annotations").body
    names = {"torch": torch, **known}
    exec(compile(ast.Module([*annotated, *found], []), str(path), "exec"), names)  # noqa: S102 - the trainer's own code
    return names


def installed(package: str) -> Path:
    """The directory of a package, which is not imported."""
    spec = find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])
