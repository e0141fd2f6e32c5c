"""How a sequence of a block manager begins, and how it ends."""

from __future__ import annotations

from collections import Counter

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, InvalidInputError, KVRouteError
from cache_manager.keys import BlockKey, Tokens
from cache_manager.manager.calls import Calls
from cache_manager.manager.host import HostBlocks, check_no_step
from cache_manager.manager.pool import BlockPool
from cache_manager.manager.sequence import Phase, Sequence, Sequences
from cache_manager.manager.stored import Admission, AskedOfStore
from cache_manager.slots import integers


class Admissions:
    """The calls of :class:`BlockManager` that make and end sequences; there are their contracts."""

    def __init__(
        self,
        aux: AuxBlocks,
        pool: BlockPool,
        sequences: Sequences,
        host: HostBlocks,
        store: AskedOfStore,
        counts: Counter[str],
        calls: Calls,
        *,
        caching: bool,
    ) -> None:
        self._aux = aux
        self._pool = pool
        self._sequences = sequences
        self._host = host
        self._store = store
        self._counts = counts
        self._calls = calls
        self._caching = caching
        self._keys = aux.keys  # whose blocks the pool finds

    def admit(self, owner: str, tokens: Tokens, salt: bytes, *, restore: bool, queued: bool) -> Admission | None:
        self._sequences.check_new(owner)
        size = self._aux.block_tokens
        most = self._aux.device_blocks * size
        ids = integers(tokens, "tokens", "a flat sequence of integers")
        if not 1 <= ids.size <= most:
            raise InvalidInputError("tokens", f"1 to {most} tokens, all that its blocks hold", ids.size)
        base = self._aux.keys
        if base is not self._keys:  # a reset around the manager
            self.forget()
        s = Sequence(owner, base, base.salted(salt))
        if not self._sequences.free_numbers:
            return None
        findable = (ids.size - 1) // size * size if self._caching else 0  # one token is left to compute
        keys = s.keys_of(ids[:findable])
        shared = self._pool.match(keys)
        fresh = self._pool.choose(-(-ids.size // size) - len(shared), shared)
        if not fresh:
            return None
        self._pool.take(fresh)
        self._pool.share(shared)
        s.blocks = [*shared, *fresh]
        s.keys = keys[: len(shared)]
        cached = len(shared) * size
        if len(keys) > len(shared):
            s.asked = keys, ids.astype("<i8", copy=False).tobytes()
        self._sequences.add(s, cached)
        self._counts.update(sequences=1, prefix_hit_tokens=cached)
        restored = 0
        wanted = dict(zip(keys[len(shared) :], fresh, strict=False))
        if wanted and restore and self._aux.store:
            if queued:
                s.job = self._store.begin(s, self._aux.begin_restore, wanted)
                s.phase = Phase.PENDING if s.job else Phase.READY
            else:
                restored = self._restored(s, wanted)
        return Admission(tuple(s.blocks), cached + restored, restored, pending=s.job is not None)

    def _restored(self, s: Sequence, wanted: dict[BlockKey, int]) -> int:
        """Ask the store now; how many tokens have come back."""
        try:
            lives = self._aux.generations(list(wanted.values()))
            back = self._aux.restore(wanted, lives)
        except KVRouteError as error:
            self._store.failed(error)
            return 0
        except BaseException:
            self.end(s.owner)
            self._calls.undone = True
            raise
        return self._store.settle(s, back)

    def fork(self, parent: str, child: str) -> None:
        s = self._sequences.ready(parent)
        computed = self._sequences.computed(s)
        blocks = s.blocks[: -(-computed // self._aux.block_tokens)]
        check_no_step(self._aux, s, blocks, "fork")
        self._sequences.check_new(child)
        if not self._sequences.free_numbers:
            most = self._sequences.sequences_max
            raise BlockBusyError("sequences", f"fewer than {most}", most)
        self._pool.share(blocks)
        twin = Sequence(child, s.base, s.chain, blocks, keys=list(s.keys))
        self._sequences.add(twin, computed, s)
        self._sequences.place(s, computed)

    def end(self, owner: str) -> None:
        s = self._sequences.find(owner)
        self._store.settled.pop(owner, None)
        if s is None:
            return
        self._sequences.remove(s)
        if s.phase is Phase.SWAPPED:
            self._host.free += s.blocks
        else:
            self._pool.let_go(s.blocks)
        if s.job is not None:
            s.job.cancel()

    def forget(self) -> None:
        """After a reset: nothing from before is found."""
        self._pool.forget()
        self._sequences.forget_keys()
        self._keys = self._aux.keys
