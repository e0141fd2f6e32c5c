"""Routes and handles of earlier versions: files that a version wrote once, and that every later one reads.

A new number of ``docs/compatibility.md`` adds files beside these: ``python tests/spec/kvroute/test_kept.py``. From
the first release on none of them goes: that is the page's promise.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvroute import RolloutHandle, Routes, SamplingSupport, open_rollouts
from kvroute.rollout.handle import FORMAT
from kvroute.routes.routes import JSON_FORMAT
from kvroute.routes.wire import SUPPORT_VERSION, WIRE_VERSION

KEPT = Path(__file__).parent / "golden" / "kept"
PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"


def routes() -> Routes:
    """Layers 1 and 2 of three, of which the first is dense; position 4 is missing, weights change behind position 3."""
    n, layers, k = 6, 2, 3
    ids = np.array([[[(7 * t + 11 * i + 31 * j) % 128 for j in range(k)] for i in range(layers)] for t in range(n)])
    valid = np.array([True, True, True, True, False, True])
    return Routes(ids, valid, (1, 2), 128, 3, 0, ((0, 4, 17), (5, 6, 18)))


TOKENS = [11, 12, 13, 14, 15, 16, 17]


def support() -> SamplingSupport:
    """Of the tokens at positions 4 and 6; that between them is a tool's."""
    return SamplingSupport.of([[15, 9, 40], [], [17]], TOKENS, start=4)


def written() -> None:
    """Writes what this version writes."""
    (KEPT / f"routes-{WIRE_VERSION}.bin").write_bytes(routes().to_bytes())
    (KEPT / f"routes-support-{SUPPORT_VERSION}.bin").write_bytes(routes().bind(TOKENS).to_bytes(support()))
    number = JSON_FORMAT.rpartition("/")[2]
    (KEPT / f"routes-{number}.json").write_text(json.dumps(routes().to_json()) + "\n")
    number = FORMAT.rpartition("/")[2]
    place = KEPT / f"rollouts-{number}"
    shutil.rmtree(place, ignore_errors=True)
    with closing(open_rollouts(f"file://{place}")) as store:
        (KEPT / f"handle-{number}.json").write_text(store.put("a-rollout", routes()).to_json() + "\n")


@pytest.mark.parametrize("file", sorted(KEPT.glob("routes-*")), ids=lambda file: file.name)
def test_routes_of_every_version_are_read(file: Path) -> None:
    if "support" in file.name:
        assert Routes.from_bytes(file.read_bytes()) == routes().bind(TOKENS)
        assert SamplingSupport.of_record(file.read_bytes()) == support()
    elif file.suffix == ".bin":
        assert Routes.from_bytes(file.read_bytes()) == routes()
    else:
        assert Routes.from_json(json.loads(file.read_text())) == routes()


@pytest.mark.parametrize("file", sorted(KEPT.glob("handle-*")), ids=lambda file: file.name)
def test_a_handle_of_every_version_still_fetches_its_rollout(file: Path, tmp_path: Path) -> None:
    """Method: the directory of that time, of which a copy is read."""
    number = file.stem.rpartition("-")[2]
    shutil.copytree(KEPT / f"rollouts-{number}", tmp_path / "rollouts")
    handle = RolloutHandle.from_json(file.read_text())
    with closing(open_rollouts(f"file://{tmp_path}/rollouts")) as store:
        assert store.get(handle) == [routes()]


def test_every_number_that_users_keep_has_its_file() -> None:
    """Goal: the promise has its evidence. Method: the page's numbers of what users keep."""
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| [^|]+ \| \*\*users\*\*", PAGE.read_text(), re.MULTILINE)
    files = {
        "routes as bytes": "routes-{}.bin",
        "routes as bytes, with sampling support": "routes-support-{}.bin",
        "routes as JSON": "routes-{}.json",
        "handle of a rollout": "handle-{}.json",
    }
    assert [what for what, _ in rows] == list(files)
    names = [files[what].format(number) for what, number in rows]
    assert [name for name in names if not (KEPT / name).exists()] == []


if __name__ == "__main__":
    KEPT.mkdir(exist_ok=True)
    written()
