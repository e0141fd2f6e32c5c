"""A slice of the file store's trials; ``python -m tests.storage.counts`` runs all of them."""

from __future__ import annotations

from tests.storage.counts import count_faults, cut, damage, many


def test_with_an_unlucky_disk_a_record_is_itself_or_missing_and_calls_work_again() -> None:
    """Goal: no fault costs more than its call. Method: every call of the disk fails now and then, over three lives."""
    found = count_faults(150)
    assert set(found) == {"write", "read", "allocate", "truncate", "sync"}


def test_a_power_cut_takes_nothing_that_was_flushed() -> None:
    """Goal: what flush says is so. Method: any part of what was not synced is lost, drawn from a seed."""
    many(cut, 25)


def test_a_damaged_store_serves_the_same_whoever_opens_it_first() -> None:
    """Goal: opening destroys nothing. Method: reader, writer and fsck in three orders on copies of a damaged store."""
    assert "served" in many(damage, 15)
