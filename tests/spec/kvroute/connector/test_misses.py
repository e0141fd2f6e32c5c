"""Rows that a load does not bring are counted by reason, and logged once."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stores import files, flip
from toy_engine import TOKENS, Toy, judge
from waiting import GIVE_UP_S

from cache_manager.errors import StorageError, StoreMissingError
from cache_manager.storage.disk import Disk
from cache_manager.storage.file.directory import StoreDirectory
from cache_manager.storage.file.fsck import read_extents
from kvroute.connector import routes
from kvroute.connector.carriers import by_key
from kvroute.connector.carriers.none import NO_CARRIER
from kvroute.connector.reader import StoreReader

Start = Callable[..., Toy]
ASKED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
NOT_THERE = "the store of rows does not have them"
DAMAGED = "the store of rows has damaged ones"
FAILED = "the store of rows has failed"


@pytest.fixture
def there(outside: Any, tmp_path: Path) -> tuple[dict[bytes, Any], Path]:
    """KV and rows that a first engine has left: two blocks."""
    return outside(ASKED)[0], tmp_path / "rows"


def _as_it_is(_: Path) -> Iterator[dict[str, Any]]:
    yield {}


def _without_the_second(rows: Path) -> Iterator[dict[str, Any]]:
    """The worker reads another store, with one block, than the scheduler."""
    fewer = rows.with_name("fewer")
    first = Toy(kept={}, store=f"file://{fewer}", witness="flagged")
    first.ask("a", ASKED[:TOKENS])
    first.settle()
    first.close()
    yield {"store": f"file://{fewer}?mode=read", "asked": rows}


def _with_a_bit_changed(rows: Path) -> Iterator[dict[str, Any]]:
    """Damage in the payload of each record, after the worker has opened the store; the scheduler reads a copy."""
    yield {"asked": shutil.copytree(rows, rows.with_name("copy"))}
    ((_, extent, served),) = read_extents(StoreDirectory.existing(rows), Disk())
    assert extent is not None
    assert len(served) == 2
    for slot in served:
        flip(files(rows)[0], extent.payload_at(slot))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("harm", "missing"),
    [
        (_as_it_is, {}),
        (_without_the_second, {NOT_THERE: TOKENS}),
        (_with_a_bit_changed, {DAMAGED: 2 * TOKENS}),
    ],
)
def test_a_restore_that_misses_says_why(
    start: Start,
    there: tuple[dict[bytes, Any], Path],
    harm: Callable[[Path], Iterator[dict[str, Any]]],
    missing: dict[str, int],
    later: bool,
    late: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Goal: every due row is right or missing, and a missing one has a reason. Method: KV of two blocks is loaded,
    beside a step or in one, by an engine whose scheduler was told that their rows are there."""
    kept, rows = there
    harming = harm(rows)
    said = {"store": f"file://{rows}?mode=read", "witness": "flagged", **next(harming)}
    asked = said.pop("asked", rows)
    toy = start(kept=kept, late=late, later=later, **said)
    toy.scheduler.carrier.reader.close()  # type: ignore[union-attr]
    toy.scheduler.carrier.reader = StoreReader(f"file://{asked}?mode=read")
    assert next(harming, None) is None
    with caplog.at_level(logging.WARNING):
        found = routes(toy.ask("b", ASKED))
        toy.worker.settle()
    assert toy.loaded == 2 * TOKENS
    lost = sum(missing.values())
    assert judge(found, ASKED) == {"right": len(ASKED) - lost} | ({"missing": lost} if lost else {})
    assert toy.worker.missing == missing
    assert [reason for reason in missing if reason in caplog.text] == list(missing)
    counted = toy.worker.blocks.counters
    blocks = (counted.restored_blocks, counted.absent_blocks_not_restored, counted.corrupt_blocks_not_restored)
    assert blocks == (2 - lost // TOKENS, missing.get(NOT_THERE, 0) // TOKENS, missing.get(DAMAGED, 0) // TOKENS)


def test_a_store_that_fails_or_does_not_answer_is_the_reason_given(
    start: Start,
    there: tuple[dict[bytes, Any], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Goal: as above. Method: the disk fails each read; then the store never answers."""
    kept, rows = there
    go = threading.Event()

    def fails(*_: object) -> list[Any]:
        raise StorageError("the disk has failed on purpose")

    def waits(*_: object) -> list[Any]:
        go.wait(GIVE_UP_S)
        return []

    for answer, reason in ((fails, FAILED), (waits, by_key.NO_ANSWER.format(0.1))):
        toy = start(kept=kept, store=f"file://{rows}?mode=read", witness="flagged", limits={"restore_s": 0.1})
        monkeypatch.setattr(type(toy.worker.store), "get_into", answer)
        with caplog.at_level(logging.WARNING):
            assert judge(routes(toy.ask("b", ASKED)), ASKED) == {"right": 3, "missing": 8}
        assert toy.worker.missing == {reason: 2 * TOKENS}
        assert reason in caplog.text
        if answer is waits:
            go.set()
    assert "the disk has failed on purpose" in caplog.text


def test_rows_of_kv_that_nothing_brings_are_counted(start: Start) -> None:
    """Goal: as above, where there is no store. Method: KV is loaded, and no rows come with it."""
    kept = dict[bytes, Any]()
    first, other = start(kept=kept), start(kept=kept)
    first.ask("a", ASKED)
    assert judge(routes(other.ask("b", ASKED)), ASKED) == {"right": 3, "missing": 8}
    assert other.worker.missing == {NO_CARRIER.partition(":")[0]: 8}
    assert not first.worker.missing


def test_an_engine_that_reads_a_store_starts_before_its_writer(start: Start, tmp_path: Path) -> None:
    """Goal: engines start in any order. Method: one with ``mode=read`` where there is no store; the writer comes then,
    and the first one's loads have their rows.
    """
    kept, url = dict[bytes, Any](), f"file://{tmp_path / 'rows'}"
    early = start(kept=kept, store=f"{url}?mode=read", witness="flagged")
    assert judge(routes(early.ask("a", ASKED[::-1])), ASKED[::-1]) == {"right": len(ASKED)}
    with pytest.raises(StoreMissingError):
        start(store=f"{url}?mode=read&absent=error")
    kept.clear()
    writer = start(kept=kept, store=url, witness="flagged")
    writer.ask("b", ASKED)
    writer.settle()
    assert judge(routes(early.ask("c", ASKED)), ASKED) == {"right": len(ASKED)}
    assert early.loaded == 2 * TOKENS
    assert not early.worker.missing
