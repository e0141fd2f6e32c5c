"""In each process of an engine: the trainers' packages are found behind those of the engine, which come first."""

import importlib.util
import os
import sys
import typing
from pathlib import Path
from typing import Any

import typing_extensions

sys.path += os.environ["KVROUTE_TRAINERS"].split(":")
typing.TypedDict = typing_extensions.TypedDict  # SkyRL asks for Python 3.12, whose own one pydantic takes


SGLANG_TESTS = Path(__file__).parents[2] / "sglang"


def run(name: str, place: Path) -> None:
    """Run a module, wherever processes look for theirs."""
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


class Before:
    """An SGLang up to 0.5.16 needs ``older`` before it, in each of the processes that it spawns."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "sglang":
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            run("older", SGLANG_TESTS / "older.py")


if "SGLANG_USE_CPU_ENGINE" in os.environ:
    run("stand_ins", SGLANG_TESTS / "cpu/sitecustomize.py")
    sys.meta_path.insert(0, Before())  # type: ignore[arg-type]
