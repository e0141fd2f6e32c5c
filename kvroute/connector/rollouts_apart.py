"""Rollouts apart: a process of their own reads, cuts, hashes and stores the rows of ended requests.

The law. The engine's process hands over names, tokens, blocks and lives, and keeps the rows readable until the process
has answered: :class:`~kvroute.connector.unread.UnreadRows` reads what is given out meanwhile, and holds spare blocks.
The process stores an end if it has read all of its rows in these lives. It answers that it lacks some otherwise, and
has stored nothing; then the engine's process reads what it has not read yet, and hands the rows over themselves.

A process that is killed, hangs or crashes is replaced (:mod:`cache_manager.storage.apart`). A question without an
answer is asked once more, of the next one: what the first had stored is found there by its bytes, and not stored
again. If that fails too, each of its requests is told so, and counted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from cache_manager.errors import KVRouteError, RowError, StoreUnavailableError
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage.apart import ApartSettings, ApartStore
from kvroute.connector.end import End
from kvroute.connector.left import rollout_name
from kvroute.connector.limits import Limits
from kvroute.connector.rollouts_wire import ANSWERS, Ended, Opening, RolloutsQuestion, TakenRollout, encode_message
from kvroute.connector.settings import apart_url
from kvroute.connector.takers import TakerOutcome
from kvroute.connector.unread import RowsToRead

logger = logging.getLogger(__name__)

MODULE: Final = "kvroute.connector.rollouts_process"
TRIES_MAX: Final = 2
"""How often a question is asked."""
QUESTION_NBYTES: Final = 8 << 20
"""Rows and tokens of a question, beyond its first end."""
RETRY_S: Final = 0.01


class RolloutsApart:
    """A ``RolloutTaker`` whose store is in another process. The constructor starts that; raises what opening the store
    raises, and :class:`StorageError` if no process can be started.

    ``rollouts`` is the setting, and the rows are of ``spec``; ``flagged`` is the operator's choice for unproved ids.
    """

    def __init__(self, rollouts: str, spec: AuxBlockDataSpec, *, flagged: bool, limits: Limits) -> None:
        url, call_s = apart_url(rollouts)
        opening = Opening.of(url, spec, flagged=flagged, cuts_max=limits.cuts_max)
        calls = ApartSettings(call_s=call_s, arena_nbytes=1)  # no record lies in the arena
        self._limits = limits
        self._apart = ApartStore(f"apart:{url}", calls, MODULE, msgspec.json.encode(opening).decode())
        self.burst_max = 2 * limits.burst_max  # a question takes the engine's process as long as ten ends
        self._gone_s: float | None = None  # since when there is no process
        self._voids: deque[str] = deque(maxlen=limits.ends_max)
        self._counts = Counter(stored=0, unstored=0, read_here=0)  # no new names: another thread looks at them

    @property
    def pid(self) -> int | None:
        """The current process's id; ``None`` while there is none."""
        return self._apart.pid

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts so far: ``stored`` and ``unstored`` requests, those ``read_here`` because the process lacked a row,
        and ``lost_calls`` and ``restarts`` of the process."""
        return self._counts | Counter(self._apart.counters)

    def take(self, ends: Sequence[End], unread: RowsToRead) -> list[TakerOutcome]:
        outcomes = dict[End, TakerOutcome]()
        lacking = self._take_all(ends, unread, outcomes)
        if lacking:
            self._counts["read_here"] += len(lacking)
            try:
                unread.read(computation for end in lacking for computation in end.computations)
            except Exception:
                logger.exception("the rows of requests cannot be read together")
            for end in self._take_all(lacking, unread, outcomes):
                self._lose(end, RowError("rows", "those that the worker has written", "some cannot be read"), outcomes)
        return [outcomes[end] for end in ends]

    def close(self) -> None:
        self._apart.close()

    def _take_all(
        self,
        ends: Sequence[End],
        unread: RowsToRead,
        outcomes: dict[End, TakerOutcome],
    ) -> list[End]:
        """Fill in the ``outcomes`` of ``ends``; those of which the process lacks rows."""
        lacking = list[End]()
        for end in ends:
            if end.failure:
                self._lose(end, RowError("rows", "those that the worker has written", end.failure), outcomes)
        ends = [end for end in ends if not end.failure]
        regions, namespace = unread.source()  # first: a later one would be another's than that of the rows
        for batch in self._batches(ends, unread, outcomes):
            question = RolloutsQuestion(regions, namespace, False, [], [ended for _, ended in batch])
            stored = 0
            for (end, _), of_end in zip(batch, self._taken(question), strict=True):
                if isinstance(of_end, KVRouteError):
                    self._lose(end, of_end, outcomes)
                elif of_end.values is not None:
                    stored += 1
                    outcomes[end] = of_end.values
                elif of_end.failure is not None:  # the process leaves no earlier one's routes in their place
                    self._counts["unstored"] += 1
                    outcomes[end] = of_end.failure.error()
                else:
                    lacking.append(end)
            self._counts["stored"] += stored
        return lacking

    def _batches(
        self, ends: Sequence[End], unread: RowsToRead, outcomes: dict[End, TakerOutcome]
    ) -> Iterator[list[tuple[End, Ended]]]:
        """The ends as the process is told of them; those that cannot be told have their outcome."""
        batch = list[tuple[End, Ended]]()
        nbytes = 0
        groups = [end.computations for end in ends]
        for end, computations, seen in zip(ends, groups, unread.seen(groups), strict=True):
            if isinstance(seen, RowError):
                self._lose(end, seen, outcomes)
                continue
            try:
                ended = Ended.of(end, computations, seen)
            except Exception as error:
                logger.exception("rows of request %r are lost", end.key.text)
                self._lose(end, RowError("rows", "left for the client", repr(error)), outcomes)
                continue
            if batch and nbytes + ended.nbytes > QUESTION_NBYTES:
                yield batch
                batch = []
                nbytes = 0
            batch.append((end, ended))
            nbytes += ended.nbytes
        if batch:
            yield batch

    def _lose(
        self,
        end: End,
        error: KVRouteError,
        outcomes: dict[End, TakerOutcome],
    ) -> None:
        """The end leaves nothing, for that reason: the next question has routes of an earlier one forgotten."""
        self._counts["unstored"] += 1
        outcomes[end] = error
        if end.key.of_client:
            with suppress(KVRouteError, UnicodeError):  # under a name that is none nothing lies
                name = rollout_name(end.key, end.request_tokens)
                name.encode()
                self._voids.append(name)

    def _taken(self, question: RolloutsQuestion) -> Sequence[TakenRollout | KVRouteError]:
        """The process's answer, or for each end why there is none."""
        ends = question.ends
        try:
            return self._ask(question)
        except KVRouteError as error:
            return [error for _ in ends]
        except Exception as error:  # what MessagePack cannot hold, as in a key: that costs no other end
            if len(ends) > 1:
                alone = [self._taken(msgspec.structs.replace(question, ends=[ended])) for ended in ends]
                return [taken for (taken,) in alone]
            logger.exception("rows of request %r are lost", ends[0].key)
            return [RowError("rows", "left for the client", repr(error))]

    def _ask(self, question: RolloutsQuestion) -> list[TakenRollout]:
        """The process's answer. :class:`RowError` if one after the other is lost, or there is none for too long."""
        voids = list(self._voids)
        for number in range(TRIES_MAX):
            self._wait_for_process()
            asked = msgspec.structs.replace(question, again=number > 0, voids=voids)
            try:
                taken = ANSWERS.decode(self._apart.ask("work", encode_message(asked)))
            except StoreUnavailableError as error:
                lost = error
                continue
            for _ in voids:
                self._voids.popleft()
            return taken
        raise RowError("rows", "a process that stores them", f"none: {lost}")

    def _wait_for_process(self) -> None:
        """Until there is one; :class:`RowError` if there has been none for ``answer_s``, in this call or before it."""
        while self._apart.pid is None:
            now_s = time.monotonic()
            if self._gone_s is None:
                self._gone_s = now_s
            if now_s - self._gone_s > self._limits.answer_s:
                wanted = "a process that stores them"
                got = f"none for {self._limits.answer_s} s: another one is being started"
                raise RowError("rows", wanted, got)
            time.sleep(RETRY_S)
        self._gone_s = None


__all__ = ["RolloutsApart"]
