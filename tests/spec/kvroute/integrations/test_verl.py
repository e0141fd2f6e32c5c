"""The name by which verl asks for SGLang's reader of rows."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from waiting import GIVE_UP_S

from kvroute.integrations import verl

PLACE = "sglang.srt.state_capturer.routed_experts"
"""Where SGLang has it since 0.5.12."""
ROOT = Path(__file__).parents[4]
ASK = f"""
from {verl.MOVED} import {verl.READS}
print({verl.READS}({{}}))
"""


def package(root: Path, *places: str) -> Path:
    """An SGLang that reads rows in these modules; each says which one it is."""
    for place in places:
        file = root / (place.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def {verl.READS}(answer):\n    return {place!r}\n")
    return root


def asked(root: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """What a process says that asks as verl does, over this SGLang."""
    path = os.pathsep.join([str(root), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", before + ASK]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=GIVE_UP_S)


def loaded_by_verl() -> str:
    """What verl does in each of its processes with an installed kvroute."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    return f"from importlib.metadata import EntryPoint\nEntryPoint('kvroute', {points['kvroute']!r}, 'verl').load()\n"


def test_a_name_that_sglang_has_moved_is_found(tmp_path: Path) -> None:
    """Goal: verl 0.9.1 reads rows of the SGLang that it pins. Method: an SGLang with the function at its new place,
    without kvroute and with it."""
    root = package(tmp_path, PLACE)
    (root / "sglang/srt/layers/moe").mkdir(parents=True)
    assert f"No module named '{verl.MOVED}'" in asked(root).stderr
    assert asked(root, loaded_by_verl()).stdout.strip() == PLACE


def test_an_sglang_that_has_the_name_keeps_it(tmp_path: Path) -> None:
    """Goal: nothing of an engine is replaced. Method: an SGLang that has both places."""
    root = package(tmp_path, PLACE, verl.MOVED)
    assert asked(root, loaded_by_verl()).stdout.strip() == verl.MOVED


def test_an_sglang_without_either_is_named(tmp_path: Path) -> None:
    """Goal: an SGLang that has moved the function once more ends with that name. Method: one without it."""
    (package(tmp_path) / "sglang/srt/layers/moe").mkdir(parents=True)
    assert f"No module named '{PLACE.rsplit('.', 1)[0]}'" in asked(tmp_path, loaded_by_verl()).stderr


def test_no_other_name_is_found() -> None:
    """Goal: kvroute answers for one name. Method: others, behind its finder."""
    finder = next(finder for finder in reversed(sys.meta_path) if type(finder).__module__ == verl.__name__)
    assert finder.find_spec(verl.MOVED) is not None
    assert finder.find_spec(PLACE) is None
    assert finder.find_spec("sglang") is None
