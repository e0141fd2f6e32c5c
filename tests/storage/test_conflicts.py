"""Equal tokens computed twice: no put succeeds silently that stored nothing, in no store."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_manager.storage import open_store
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import BOTH, FIRST, LAYOUT, key_of, payload_of, valid_of

URLS = ("memory:?capacity=1MiB", "file://{}/s?quota=1MiB", "tiered:memory:?capacity=1MiB,file://{}/t?quota=1MiB")


@pytest.mark.parametrize("url", URLS)
def test_a_conflicting_put_says_whose_record_is_stored(tmp_path: Path, url: str) -> None:
    """Goal: both puts were answered as stored, and the first one's rows came back. Method: other rows, then more rows.

    And rows of a second spec that are completed later are stored, where they are of the same computation.
    """
    store = RecordStore(open_store(url.format(tmp_path)), LAYOUT)

    def put(origin: int, specs: int) -> tuple[int, bytes]:
        payload = payload_of(0, origin=origin)
        (answer,) = store.put([key_of(0)], [payload], [valid_of(0, specs)], [1], [origin])
        return answer.origin, answer.valid

    assert put(7, FIRST) == (7, valid_of(0, FIRST))
    assert put(9, BOTH) == (7, valid_of(0, FIRST))
    assert put(7, BOTH) == (7, valid_of(0, BOTH))
    buffer = memoryview(bytearray(LAYOUT.nbytes))
    (found,) = store.get_into([key_of(0)], [buffer])
    assert (found.origin, found.valid, buffer) == (7, valid_of(0, BOTH), payload_of(0, origin=7))
    counters = store.counters
    assert (counters.stored, counters.kept, counters.conflicts, counters.refused) == (2, 0, 1, 0)
    store.close()
