"""The rows of requests step by step, each position once and in order: for an engine that returns them with its tokens.

The scheduling thread makes :class:`StepRows` of each step's outputs, and waits for nothing: :meth:`RowStream.take`. The
thread that sends the outputs reads them: :meth:`RowStream.read`. All or nothing: after a missing row a request gets no
further ones, and a reason. Between the two calls blocks may be given out anew: the rows are read at that moment, or
their blocks are copied to spare ones if a worker behind its device has not written them yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

import kvroute
from cache_manager.feed import BlockFeed
from cache_manager.publish import Rows
from kvroute.connector.limits import Limits
from kvroute.connector.spares import SpareBlocks
from kvroute.connector.stages import RowsView
from kvroute.connector.step_rows import Batch, Outcome, Piece, Steady, StepRows
from kvroute.connector.tickets import MissingSpan, gaps_of
from kvroute.routes.spans import runs

NOT_WRITTEN: Final = "no row was written, or it was lost; the log and kvroute:tokens_without_rows_total say why"
BEHIND: Final = "the worker is more than {:.0f} s behind"
NO_BLOCKS: Final = "the request had lost its blocks"
GROWN: Final = "the prompt of a session has grown, and its last token was taken back"


class OutputRequest(Protocol):
    """A request as its scheduler has it, under vLLM's names."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...


@dataclass(slots=True)
class _Sequence:
    """A request between two outputs."""

    sent: int  # the first position without a piece
    slot: int = -1  # of position ``sent - 1``, if it is known to be in the request's present blocks,
    life: int = 0  # and the life of its block
    under_way: tuple[int, Batch] | None = None  # rows of steps under way when it was preempted, from this position on;
    # there are none where the slot is known


class RowStream:
    """The stream of rows of one engine's requests.

    ``blocks_of(id, first, last)`` returns the blocks ``[first, last)`` that a request has now. ``doubts(slots, lives)``
    says of which rows ``[n]`` the last router's choice is not proved; ``None``: of none. ``why(id)`` are the reasons
    for rows of a request that did not come, by block.
    """

    def __init__(
        self,
        spec: kvroute.AuxBlockDataSpec,
        feed: BlockFeed,
        spares: SpareBlocks,
        clock: int,
        limits: Limits,
        *,
        blocks_of: Callable[[str, int, int], list[int]],
        doubts: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_] | None],
        why: Callable[[str], Mapping[int, str]],
    ) -> None:
        self._spec = spec
        self._size = spec.block_tokens
        self._feed = feed
        self._spares = spares
        self._clock = clock
        self._limits = limits
        self._blocks_of = blocks_of
        self._doubts = doubts
        self._why = why
        self._view: RowsView | None = None
        self.late = False
        """Whether rows may be written after their step's outputs are there."""
        self._lock = threading.Lock()
        self._unread: dict[Batch, None] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._ended: dict[str, Piece] = {}  # of requests that ended in the step at hand
        self._lost: set[str] = set()
        self._refused: dict[str, str] = {}  # requests that get no rows from the first on, and why
        self._asleep_s = 0.0

    def attach(self, view: RowsView, *, late: bool) -> None:
        self._view = view
        self.late = late

    # ---------------------------------------------------------------- the scheduling thread

    def refuse(self, name: str, why: str) -> None:
        """This request, which begins, gets no rows, for the reason ``why``."""
        self._refused[name] = why

    def ended(
        self,
        request: OutputRequest,
        start: int,
        blocks: Sequence[int],
        number: int,
    ) -> None:
        """The request has ended and still has ``blocks``; :meth:`take` gives its last piece to its last output."""
        piece = self._piece(request, start, number, blocks)
        piece.last = True
        self._refused.pop(request.request_id, None)
        self._ended[request.request_id] = piece
        sequence = self._sequences.pop(request.request_id)
        if sequence.under_way is not None and sequence.under_way[1] is not piece.batch:
            self._drop(sequence.under_way[1])

    def preempted(
        self,
        request: OutputRequest,
        start: int,
        stop: int,
        number: int,
    ) -> None:
        """The request is about to lose its blocks; steps under way compute its rows up to ``stop``.

        An engine may still deliver the tokens of these steps: :meth:`take` is told that they are stale.
        """
        sequence = self._sequences.setdefault(request.request_id, _Sequence(start))
        sequence.slot = -1
        if sequence.under_way is not None:
            self._drop(sequence.under_way[1])
            sequence.under_way = None
        if stop > sequence.sent and request.request_id not in self._refused:
            slots, lives, held = self._slots(request.request_id, sequence.sent, stop, None)
            sequence.under_way = sequence.sent, self._batch(number, slots, lives, held)

    def take(
        self,
        outputs: Iterable[tuple[str, OutputRequest | None]],
        number: int,
        *,
        start: Callable[[OutputRequest], int],
        stale: AbstractSet[str] = frozenset(),
    ) -> StepRows:
        """The rows of a step's outputs, each an id and its request, or ``None`` for one that was :meth:`ended` in it.

        ``start(request)`` is the first position that its client wants; outputs of the ``stale`` ones are of a step
        before their preemption. ``number`` is the worker's step.
        """
        size = self._size
        sequences = self._sequences
        pieces: list[Piece] = []
        slots: list[int] = []
        lives: list[int] = []
        names: list[str] = []
        stops: list[int] = []
        counts: list[int] = []
        for name, request in outputs:
            if request is None:
                lost = self._refused.get(name, NO_BLOCKS)
                piece = self._ended.pop(name, None) or Piece(name, 0, 0, last=True, lost=lost)
                pieces.append(piece)
                continue
            sequence = sequences.get(name)
            if sequence is None or sequence.slot < 0 or name in stale:
                pieces.append(self._piece(request, start(request), number, stale=name in stale))
                continue
            stop = request.num_tokens - 1
            count = stop - sequence.sent
            slot = sequence.slot + 1
            if count == 1 and slot % size:  # one token, in the block of the one before
                slots.append(slot)
                lives.append(sequence.life)
                sequence.slot = slot
                sequence.sent = stop
            elif not self._next_rows(sequence, request, slots, lives):
                pieces.append(self._piece(request, sequence.sent, number))
                continue
            names.append(name)
            stops.append(stop)
            counts.append(count)
        steady = None
        if names:
            ids = np.array(slots, np.int64)
            batch = self._batch(number, ids, np.array(lives, np.int64), (ids // size).tolist())
            steady = Steady(names, stops, counts, batch)
        for name, piece in self._ended.items():  # no output tells of these: their clients have ended them
            self._drop(piece.batch)
            pieces.append(Piece(name, 0, 0, last=True))
        self._ended.clear()
        return StepRows(pieces, steady, time.monotonic())

    def _next_rows(
        self,
        sequence: _Sequence,
        request: OutputRequest,
        slots: list[int],
        lives: list[int],
    ) -> bool:
        """Append the slots and lives of the few rows since the last output, whose slot is known; ``False``, and nothing
        is changed, if another way has to find them."""
        size = self._size
        start = sequence.sent
        stop = request.num_tokens - 1
        if not 0 < stop - start <= size:
            return False
        room = -start % size  # in the block of the row before
        slot = sequence.slot
        life = sequence.life
        same_block = min(room, stop - start)
        slots.extend(range(slot + 1, slot + 1 + same_block))
        lives.extend([life] * same_block)
        slot += same_block
        next_block = stop - start - same_block
        if next_block:
            index = (stop - 1) // size
            held = self._blocks_of(request.request_id, index, index + 1)
            if not held:
                del slots[len(slots) - same_block :], lives[len(lives) - same_block :]
                return False
            slot = held[0] * size
            life = int(self._feed.generations[held[0]])
            slots.extend(range(slot, slot + next_block))
            lives.extend([life] * next_block)
            slot += next_block - 1
        sequence.slot = slot
        sequence.life = life
        sequence.sent = stop
        return True

    def given(self, blocks: Sequence[int], step: int) -> None:
        """These blocks begin new lives. The worker learns of that, and of the copies, with this ``step``."""
        if not self._unread:
            return
        new = set(blocks)
        with self._lock:
            hit = [batch for batch in self._unread if not new.isdisjoint(batch.blocks)]
            through = self._through() if hit else 0
            ready = [batch for batch in hit if batch.number <= through]
            self._read(ready)
            for batch in hit:
                if batch.rows is None:
                    self._move(batch, sorted(new & batch.blocks), step)

    def forgotten(self) -> None:
        """All rows are about to be forgotten: read those that are written soon; the others become missing."""
        with self._lock:
            batches = list(self._unread)
        if not batches:
            return
        self._wait(max(batch.number for batch in batches), time.monotonic() + self._limits.forgetting_s)
        with self._lock:
            self._read([batch for batch in batches if batch.rows is None and batch.number <= self._through()])
            for batch in batches:
                if batch.rows is None:
                    missing = np.zeros(len(batch.slots), np.bool_)
                    rows = np.zeros((len(batch.slots), *self._spec.row_shape), self._spec.dtype)
                    self._over(batch, Rows(rows, missing))

    # ---------------------------------------------------------------- the thread that sends

    def read(
        self,
        step: StepRows,
        *,
        apart: bool,
    ) -> tuple[list[Outcome], NDArray[np.generic] | None]:
        """What the outputs get, after a wait for the worker if it is :attr:`late`: an outcome for each, and the rows of
        the steady ones together, one after the other. They have outcomes, too, where one of them may have lost a row,
        or where they are wanted ``apart``.

        One piece may have no outcome: that of a request that has ended without an output, or has lost a row before.
        """
        pieces = step.pieces
        steady = step.steady
        batches = step.batches()
        self._read_in_time(batches, step.taken_s + self._limits.answer_s)
        with self._lock:
            together: NDArray[np.generic] | None = None
            if steady is not None:
                rows = steady.batch.rows if steady.batch.whole else None
                if rows is None or apart or not self._lost.isdisjoint(steady.names):
                    pieces = [*pieces, *steady.pieces()]
                else:
                    together = rows.values
            outcomes = [outcome for piece in pieces if (outcome := self._outcome(piece)) is not None]
            self._give_up(batches)
            return outcomes, together

    def _read_in_time(self, batches: Iterable[Batch], give_up_s: float) -> None:
        """Read these batches as soon as the worker has written them, if that is before ``give_up_s``. One that
        :meth:`given` moves meanwhile is written by a later step."""
        unread = [batch for batch in batches if batch.rows is None]
        in_time = True
        while unread and in_time:
            self._wait(max(batch.number for batch in unread), give_up_s)
            in_time = time.monotonic() < give_up_s
            with self._lock:
                through = self._through()
                self._read([batch for batch in unread if batch.rows is None and batch.number <= through])
                unread = [batch for batch in unread if batch.rows is None]

    def lose(self, step: StepRows, why: str) -> list[Outcome]:
        """These requests get no further rows: what their outputs get."""
        pieces = [*step.pieces, *(step.steady.pieces() if step.steady is not None else ())]
        with self._lock:
            for piece in pieces:
                if piece.last:
                    self._lost.discard(piece.name)
                else:
                    self._lost.add(piece.name)
            self._give_up(step.batches())
        return [Outcome(piece, None, [(piece.start, piece.stop, why)]) for piece in pieces]

    def _outcome(self, piece: Piece) -> Outcome | None:
        name = piece.name
        n = piece.stop - piece.start
        batch = piece.batch
        known = name in self._lost
        if piece.last:
            self._lost.discard(name)
        if known:
            return None
        if batch is not None and batch.whole and batch.rows is not None:
            return Outcome(piece, batch.rows.values[piece.first_row : piece.first_row + n])
        gaps: list[MissingSpan] = []
        rows: NDArray[np.generic] | None = None
        if batch is None:
            gaps = [(piece.start, piece.stop, piece.lost)] if piece.lost else []
            if not gaps and not n:
                return None
        elif batch.rows is None:
            gaps = [(piece.start, piece.stop, BEHIND.format(self._limits.answer_s))]
        else:
            part = slice(piece.first_row, piece.first_row + n)
            valid = batch.rows.valid[part]
            if batch.doubted is not None:
                valid = valid & ~batch.doubted[part]
            if valid.all():
                rows = batch.rows.values[part]
            else:
                missing = [(piece.start + first, piece.start + stop) for first, stop in runs(~valid)]
                gaps = gaps_of(missing, piece.why, self._size, NOT_WRITTEN)
        if gaps and not piece.last:
            self._lost.add(name)
        return Outcome(piece, rows, gaps)

    # ---------------------------------------------------------------- in any of them

    def _piece(
        self,
        request: OutputRequest,
        start: int,
        number: int,
        blocks: Sequence[int] | None = None,
        *,
        stale: bool = False,
    ) -> Piece:
        """The piece of a request whose rows are wanted from ``start`` on; ``blocks``: all of its blocks."""
        name = request.request_id
        sequence = self._sequences.setdefault(name, _Sequence(start))
        first = sequence.sent
        stop = request.num_tokens - 1
        piece = Piece(name, first, max(first, stop), why=self._why(name))
        if name in self._refused:
            piece.lost = self._refused[name]
            return piece
        if stop < first:
            piece.lost = GROWN
            return piece
        sequence.sent = stop
        if sequence.under_way is not None:
            begins, batch = sequence.under_way
            if stale and begins <= first and stop - begins <= len(batch.slots):
                piece.batch = batch
                piece.first_row = first - begins
                batch.handed = True
                return piece
            self._drop(batch)
            sequence.under_way = None
        slots, lives, held = self._slots(name, first, stop, blocks)
        if len(slots) < stop - first:
            piece.lost = NO_BLOCKS
            return piece
        piece.batch = self._batch(number, slots, lives, held)
        piece.batch.doubted = self._doubts(slots, lives)
        if len(slots):
            sequence.slot = int(slots[-1])
            sequence.life = int(lives[-1])
        return piece

    def _slots(
        self, name: str, start: int, stop: int, blocks: Sequence[int] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Sequence[int]]:
        """The slots of the positions ``[start, stop)``, as far as there are blocks, the lives of their blocks ``[n]``
        each, and these blocks."""
        size = self._size
        first = start // size
        last = -(-stop // size)
        held = self._blocks_of(name, first, last) if blocks is None else blocks[first:last]
        ids = np.array(held, np.int64)
        positions = np.arange(start, min(stop, (first + len(ids)) * size))
        places = positions // size - first
        return ids[places] * size + positions % size, self._feed.generations[ids][places], held

    def _batch(
        self,
        number: int,
        slots: NDArray[np.int64],
        lives: NDArray[np.int64],
        blocks: Sequence[int],
    ) -> Batch:
        batch = Batch(number, slots, lives, frozenset(blocks))
        with self._lock:
            self._unread[batch] = None
        return batch

    def _drop(self, batch: Batch | None) -> None:
        """No output will ask for its rows. One that has it already reads it or gives it up."""
        if batch is not None and not batch.handed:
            with self._lock:
                self._done(batch)

    def _through(self) -> float:
        """The last step that the worker has finished."""
        assert self._view is not None, "the handshake comes before the first request"
        return self._view.generation(self._clock) if self.late else float("inf")

    def _wait(self, number: int, give_up_s: float) -> None:
        """Until the worker has finished this step: asleep for most of what the last wait took, then looking."""
        begun_s = time.monotonic()
        if self._through() >= number:
            return
        time.sleep(max(0.0, min(self._asleep_s, give_up_s - begun_s)))
        while self._through() < number and time.monotonic() < give_up_s:
            time.sleep(self._limits.output_poll_s)
        self._asleep_s = min(self._limits.asleep_max_s, 0.8 * (time.monotonic() - begun_s))

    # ---------------------------------------------------------------- held: _lock

    def _read(self, batches: Sequence[Batch]) -> None:
        if not batches:
            return
        assert self._view is not None
        slots = np.concatenate([batch.slots for batch in batches])
        lives = np.concatenate([batch.lives for batch in batches])
        rows = self._view.read_slots(self._spec.name, slots, generations=lives)
        first = 0
        for batch in batches:
            part = slice(first, first + len(batch.slots))
            self._over(batch, Rows(rows.values[part], rows.valid[part]))
            first = part.stop

    def _over(self, batch: Batch, rows: Rows) -> None:
        batch.rows = rows
        batch.whole = batch.doubted is None and bool(rows.valid.all())
        self._done(batch)

    def _give_up(self, batches: Iterable[Batch]) -> None:
        """The requests of those that have not been read get no rows any more."""
        for batch in batches:
            if batch.rows is None:
                self._done(batch)

    def _done(self, batch: Batch) -> None:
        """Nothing is read of its blocks any more."""
        self._unread.pop(batch, None)
        self._spares.free(batch.spares)
        batch.spares = []

    def _move(self, batch: Batch, blocks: Sequence[int], step: int) -> None:
        """The worker copies these blocks of the batch to spare ones with this ``step``."""
        spares = self._spares.take_over(blocks)
        for block, (spare, life) in spares.items():
            moved = batch.slots // self._size == block
            batch.slots = np.where(moved, batch.slots - block * self._size + spare * self._size, batch.slots)
            batch.lives = np.where(moved, life, batch.lives)
            batch.spares.append(spare)
        batch.blocks = frozenset((batch.slots // self._size).tolist())
        if spares:
            batch.number = max(batch.number, step)


__all__ = ["RowStream"]
