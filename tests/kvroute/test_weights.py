"""Different weights have different names."""

from __future__ import annotations

import os
from pathlib import Path

from kvroute.weights import weights_digest


def test_a_digest_names_the_files(tmp_path: Path) -> None:
    """Goal: names are equal for the very same files only. Method: change a byte, the time, the name, and back."""
    home = tmp_path / "model"
    home.mkdir()
    file = home / "model.safetensors"
    file.write_bytes(bytes(200_000))
    os.utime(file, ns=(1, 1))
    before = weights_digest(str(home))
    (home / "README.md").write_text("no weights")
    assert weights_digest(str(home)) == before
    changed = bytearray(200_000)
    changed[100_001] = 1
    for content, time, same in ((changed, 1, False), (bytes(200_000), 2, False), (bytes(200_000), 1, True)):
        file.write_bytes(content)
        os.utime(file, ns=(time, time))
        assert (weights_digest(str(home)) == before) == same
    file.rename(home / "other.safetensors")
    assert weights_digest(str(home)) != before


def test_a_hub_name_is_digested_by_name_and_revision() -> None:
    assert weights_digest("org/model", "a") != weights_digest("org/model", "b") != weights_digest("org/other", "b")
