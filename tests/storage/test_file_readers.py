"""A writer and readers of a file store in any order of events: what a reader reads is what was put, or missing."""

from __future__ import annotations

import errno
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from budget import examples
from faulty_disk import FaultyDisk
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache_manager.errors import StorageError
from cache_manager.ports import Absence
from cache_manager.storage.file import FileReader, FileStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.contract import numbers
from cache_manager.testing.records import LAYOUT, get, key_of, payload_of, put
from tests.storage.file_stores import SEGMENT_NBYTES

MISSING = Absence.MISS
NEVER = 1e9


class ReaderMachine(RuleBasedStateMachine):
    """A writer and two readers, one that looks at every miss and one that looks when told, in any order of events."""

    @initialize(quota=st.integers(2, 5))
    def start(self, quota: int) -> None:
        self.scratch = Path(tempfile.mkdtemp())
        self.quota_nbytes = quota * SEGMENT_NBYTES
        self.put_ever: set[int] = set()
        self.deleted: set[int] = set()  # and not put since
        self.taken_back: set[int] = set()  # in a batch that failed
        self.open_writer()
        self.readers = [self.open_reader(0.0), self.open_reader(NEVER)]

    def open_writer(self) -> None:
        self.disk = FaultyDisk()
        backend = FileStore(self.scratch, quota_nbytes=self.quota_nbytes, segment_nbytes=SEGMENT_NBYTES, disk=self.disk)
        self.store = RecordStore(backend, LAYOUT)

    def open_reader(self, refresh_s: float) -> RecordStore:
        return RecordStore(FileReader(self.scratch, refresh_s=refresh_s), LAYOUT)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for each in (*self.readers, self.store):
                each.close()
            shutil.rmtree(self.scratch)

    @rule(wanted=numbers)
    def put(self, wanted: list[int]) -> None:
        answers = put(self.store, wanted)  # one that was there may make room for another
        self.put_ever.update(wanted)
        self.deleted.difference_update(n for n, stored in zip(wanted, answers, strict=True) if stored)

    @rule(wanted=numbers)
    def delete(self, wanted: list[int]) -> None:
        self.store.backend.delete([key_of(n) for n in wanted])
        self.deleted.update(wanted)

    @rule(wanted=st.lists(st.integers(0, 23), min_size=2, max_size=8, unique=True), nbytes=st.integers(0, 20_000))
    def a_write_fails_in_the_middle(self, wanted: list[int], nbytes: int) -> None:
        """Readers may have seen the first records of the batch, which the writer takes back."""
        self.disk.write_budget_nbytes, self.disk.write_errno = nbytes, errno.EIO
        self.disk.at_limit = lambda: [reader.contains([key_of(99)]) for reader in self.readers] and None
        with suppress(StorageError):
            put(self.store, wanted)
        self.put_ever.update(wanted)
        self.taken_back.update(wanted)
        self.deleted.difference_update(wanted)
        self.disk.write_budget_nbytes = self.disk.at_limit = None

    @rule()
    def the_writer_starts_again(self) -> None:
        self.store.close()
        self.open_writer()

    @rule()
    def look(self) -> None:
        self.readers[1].backend.refresh()  # type: ignore[attr-defined]

    @rule()
    def another_reader(self) -> None:
        self.readers[1].close()
        self.readers[1] = self.open_reader(NEVER)

    @rule(wanted=st.permutations(range(24)))
    def a_reader_that_looks_sees_what_the_writer_sees(self, wanted: list[int]) -> None:
        self.readers[0].backend.refresh()  # type: ignore[attr-defined]
        theirs = get(self.readers[0], wanted)
        for n, mine, answer in zip(wanted, get(self.store, wanted), theirs, strict=True):
            assert answer == mine or (n in self.taken_back and answer is Absence.CORRUPT)

    @invariant()
    def a_record_read_is_the_record_put_or_missing(self) -> None:
        for reader in self.readers:
            for n, answer in enumerate(get(reader, range(24))):
                if answer is MISSING:
                    continue
                assert n in self.put_ever
                assert answer == payload_of(n) or (n in self.taken_back and answer is Absence.CORRUPT)

    @invariant()
    def what_the_writer_deleted_no_reader_has(self) -> None:
        """Once it has looked: of a file that was dropped before, an old descriptor still has what was in it."""
        wanted = sorted(self.deleted)
        self.readers[0].backend.refresh()  # type: ignore[attr-defined]
        assert get(self.readers[0], wanted) == [MISSING] * len(wanted)


TestReaders = ReaderMachine.TestCase
TestReaders.settings = examples(30, stateful_step_count=20)
