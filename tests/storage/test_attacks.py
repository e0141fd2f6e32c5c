"""A slice of each of the file store's trials; ``python -m tests.storage.attacks`` runs them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage import attacks


@pytest.mark.parametrize("name", ["faults", "cuts", "damage", "kills", "forks", "openings", "racing"])
def test_a_slice_of_each_trial(name: str) -> None:
    assert attacks.TRIALS[name](0.05)


def test_a_reader_beside_a_writer_reads_whole_records(tmp_path: Path) -> None:
    assert attacks.beside(tmp_path, 0, lasts_s=0.5) > 0
