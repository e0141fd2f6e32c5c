"""The embedder's surface where blocks have owners: rows that follow KV blocks through one process."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.block_set import BlockSet
from cache_manager.checks import owner_name
from cache_manager.errors import ConfigError
from cache_manager.keys import BlockKey
from cache_manager.lifecycle import State
from cache_manager.move import Move, Pairs, split_pairs
from cache_manager.ports import TierName
from cache_manager.records import Claim, Export
from cache_manager.table import Blocks, BlockTable


class AuxBlocks(BlockSet):
    """Auxiliary rows for ``device_blocks`` KV blocks on the device and ``host_blocks`` on the CPU.

    ``required`` names the specs whose rows a block must have in full to be persisted or counted as complete (all, if
    not given). With ``memory="shared"`` the rows lie in SharedMemory regions that other processes can attach; an
    embedder may pass regions of its own by tier. At most ``steps_max`` steps may be in flight.

    Rows are moved by the thread that asks, and so is the KV if ``kv`` moves it: then ``swap_out``, ``persist`` and
    their kin move both, and ``policy`` says what KV without rows is worth. A ``mover``, called once with the device and
    the host region, answers what moves everything instead. Store, ``kv`` and mover stay the caller's to close.
    ``jobs`` bounds what the store is asked to do in the background.

    Methods that take blocks succeed for all of them or raise and change nothing.
    """

    @property
    def has_store(self) -> bool:
        return self._mover.stores

    def blocks_in(self, state: State, tier: TierName = "device") -> int:
        """How many blocks of a tier are in ``state``."""
        with self._lock:
            return int(count(self._table(tier).states == state))

    def holds(self, owner: Hashable, block: int, tier: TierName = "device") -> bool:
        with self._lock:
            return self._table(tier).leases.holds(owner, block)

    def holders(self, tier: TierName = "device") -> NDArray[np.int32]:
        """How many leases there are on each block of a tier, those of jobs included: as it is when it is looked at."""
        view = self._table(tier).leases.holders.view()
        view.flags.writeable = False
        return view

    def available(self, blocks: Blocks, tier: TierName = "device") -> NDArray[np.bool_]:
        """Which blocks could be given to an owner now: unheld, not in motion, and no device still writes them."""
        return self._ask(blocks, tier, BlockTable.available)

    def has_step(self, blocks: Blocks) -> bool:
        """Whether a step in flight writes one of the device blocks."""
        return bool(count(self._ask(blocks, "device", BlockTable.busy)))

    # ---------------------------------------------------------------- owning

    def allocate(self, blocks: Blocks, owner: Hashable) -> None:
        """Give unheld device blocks to ``owner``: new generations, no readable row.

        Raises :class:`BlockStateError` when somebody holds one of them, ``BlockBusyError`` when one is in motion or a
        device still writes it.
        """
        with self._lock:
            table = self._device
            table.allocate(table.ids(blocks), owner_name(owner))

    def allocate_each(self, blocks: Blocks, owners: Sequence[Hashable]) -> None:
        """:meth:`allocate` for many owners in one call: ``owners[i]`` gets ``blocks[i]``."""
        with self._lock:
            table = self._device
            table.allocate(table.ids(blocks), each=[owner_name(owner) for owner in owners])

    def share(self, blocks: Blocks, owner: Hashable) -> None:
        """Let a further owner hold device blocks whose rows it will use: a prefix hit or a fork."""
        with self._lock:
            table = self._device
            table.share(table.ids(blocks), owner_name(owner))

    def free(self, owner: Hashable, blocks: Blocks | None = None, tier: TierName | None = None) -> None:
        """End the owner's leases, all or those on ``blocks`` of ``tier``; idempotent.

        Blocks that nobody holds any more keep their rows until they are allocated again or evicted.
        """
        owner = owner_name(owner)
        everywhere = tier is None and blocks is None
        tables = list(self._open.values()) if everywhere else [self._table("device" if tier is None else tier)]
        ids = None if blocks is None else tables[0].ids_often(blocks)
        self._lock.now_or_later(lambda: [table.release(owner, ids) for table in tables])

    def evict(self, blocks: Blocks, tier: TierName = "device") -> None:
        """Forget the rows of blocks that nobody holds."""
        with self._lock:
            table = self._table(tier)
            table.evict(table.ids(blocks))

    # ---------------------------------------------------------------- moving

    def begin_swap_out(self, pairs: Pairs, owner: Hashable | None = None, *, leases: str = "follow") -> Move:
        """Copy device blocks to unheld host blocks; ``pairs`` are (device, host), one target a source.

        The leases of all owners, or only of ``owner``, follow when the move commits; with ``leases="stay"`` nobody's
        do: a backup, whose source goes on as it is. A failed move changes nothing; its targets are without rows.
        """
        return self._move("device", "host", pairs, owner, leases)

    def begin_swap_in(self, pairs: Pairs, owner: Hashable | None = None, *, leases: str = "follow") -> Move:
        """Copy host blocks to unheld device blocks; ``pairs`` are (host, device). See above.

        With ``leases="stay"`` the targets may be blocks that were given out and have no readable row yet.
        """
        return self._move("host", "device", pairs, owner, leases)

    def begin_copy(self, pairs: Pairs, rows: Sequence[int] | None = None) -> Move:
        """Copy device blocks to device blocks without rows; ``pairs`` are (source, target).

        Leases stay as they are: allocate the targets first. A partial block's rows are copied as far as they go, or as
        far as ``rows``, one count for each pair, says.
        """
        return self._move("device", "device", pairs, None, "stay", rows)

    def _move(
        self,
        source: TierName,
        target: TierName,
        pairs: Pairs,
        owner: Hashable | None,
        leases: str,
        rows: Sequence[int] | None = None,
    ) -> Move:
        if leases not in ("follow", "stay"):
            raise ConfigError("leases", "'follow' or 'stay'", repr(leases))
        owner = None if owner is None else owner_name(owner)
        tables = self._table(source), self._table(target)
        with self._lock:
            ids = split_pairs(pairs, *tables)
        return Move(self._books, *tables, *ids, mover=self._mover, follow=leases == "follow", owner=owner, rows=rows)

    def swap_out(self, pairs: Pairs, owner: Hashable | None = None, *, leases: str = "follow") -> None:
        """:meth:`begin_swap_out` and commit."""
        self.begin_swap_out(pairs, owner, leases=leases).commit()

    def swap_in(self, pairs: Pairs, owner: Hashable | None = None, *, leases: str = "follow") -> None:
        """:meth:`begin_swap_in` and commit."""
        self.begin_swap_in(pairs, owner, leases=leases).commit()

    def copy(self, pairs: Pairs, rows: Sequence[int] | None = None) -> None:
        """:meth:`begin_copy` and commit."""
        self.begin_copy(pairs, rows).commit()

    # ---------------------------------------------------------------- crossing

    def export(
        self,
        blocks: Mapping[BlockKey, int],
        rows: Sequence[int] | None = None,
        *,
        owner: Hashable | None = None,
        generations: Blocks | None = None,
    ) -> Export:
        """Records of device blocks, for another process; at most the first ``rows`` of each, where given.

        ``owner`` or ``generations`` as in :meth:`begin_persist`. Give ``rows`` for a partial block: its key names so
        many tokens, and rows beyond them belong to other keys. A record is ``None`` where the block has no readable
        row, is in another life, or the key is of another namespace. End the export when nobody reads the records.
        """
        return Export(self._device, self._books, Claim(blocks, owner, generations), rows)
