"""The scheduler asks a store of rows about hits, beside the worker that writes it, and waits for none that hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from toy_engine import TOKENS, Asked, Toy, judge
from waiting import until

from cache_manager.storage.file import FileReader, FileStore
from kvroute.connector import routes
from kvroute.connector.reader import StoreReader

Start = Callable[..., Toy]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.mark.parametrize(
    "store",
    [
        "file://{0}/mode=read/rows",
        "apart:file://{0}/rows",
        "tiered:file://{0}/first,file://{0}/second",
        "tiered:memory:?capacity=1MiB,file://{0}/rows",
    ],
)
def test_hits_are_taken_whatever_holds_the_rows(start: Start, tmp_path: Path, store: str) -> None:
    """Goal: KV from outside is loaded where its rows are there. Method: an engine leaves rows in a store of each kind,
    and another one, which writes it, too, loads the KV."""
    kept, url = dict[bytes, Any](), store.format(tmp_path)
    first = Toy(kept=kept, store=url, witness="flagged")
    first.ask("a", PROMPT)
    first.settle()
    first.close()
    other = start(kept=kept, store=url, witness="flagged")
    assert judge(routes(other.ask("b", PROMPT)), PROMPT) == {"right": len(PROMPT)}
    assert other.loaded == 2 * TOKENS


def test_a_store_that_hangs_holds_the_scheduler_once(
    start: Start, outside: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: requests are computed while a store does not answer. Method: it is held up in its first answer; two
    requests come; then it goes on, and a third one has its hit."""
    kept, store = outside(PROMPT)
    toy = start(kept=kept, store=store, witness="flagged", limits={"question_s": 3.0})
    go, asked = threading.Event(), list[str]()
    contains = FileReader.contains

    def held_up(self: FileReader, keys: Sequence[Any]) -> list[bool]:
        asked.append(threading.current_thread().name)
        assert go.wait(60)
        return contains(self, keys)

    with monkeypatch.context() as hanging, caplog.at_level(logging.WARNING):
        hanging.setattr(FileReader, "contains", held_up)
        for name in ("a", "b"):
            assert toy.scheduler.matched(Asked(name, PROMPT), 0, 2 * TOKENS, later=False) == 0
        assert asked == ["kvroute-reader"]
        assert caplog.text.count("has not answered for 3.0 s") == 1
        go.set()
        third = Asked("c", PROMPT)
        until(lambda: toy.scheduler.matched(third, 0, 2 * TOKENS, later=False) == 2 * TOKENS)


@pytest.mark.parametrize("error", [OSError("no route"), ImportError("lib.so: not there"), TypeError("a bug")])
def test_a_store_that_raises_anything_has_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Goal: the scheduling thread goes on whatever a store raises. Method: a store of others raises errors of its own
    where it is asked; the next question is asked again."""
    asked = StoreReader(f"file://{tmp_path}/rows")

    def raises(*_: Any) -> list[bool]:
        raise error

    with monkeypatch.context() as raising, caplog.at_level(logging.WARNING):
        raising.setattr(FileReader, "contains", raises)
        raising.setattr(FileStore, "contains", raises)
        assert asked.contains([b"k" * 32]) == [False]  # type: ignore[list-item]
    assert f"cannot be asked: {error!r}" in caplog.text
    caplog.clear()
    assert asked.contains([b"k" * 32]) == [False]  # type: ignore[list-item]
    assert not caplog.text
    asked.close()


def test_a_store_that_cannot_be_opened_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a store that comes later is read. Method: a directory that is not there, and then is."""
    asked = StoreReader(f"file://{tmp_path}/rows?mode=read&absent=error")
    with caplog.at_level(logging.WARNING):
        assert asked.contains([b"k" * 32]) == [False]  # type: ignore[list-item]
    assert "the store of rows cannot be asked" in caplog.text
    caplog.clear()
    from cache_manager.storage import open_store

    open_store(f"file://{tmp_path}/rows").close()
    with caplog.at_level(logging.WARNING):
        assert asked.contains([b"k" * 32]) == [False]  # type: ignore[list-item]
    assert not caplog.text
    asked.close()
