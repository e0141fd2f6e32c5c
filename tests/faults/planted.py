"""Faults to plant in a copy of the code, each with the test that must catch it and the claim that must break.

``docs/invariants.md`` shows this table to people.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """Replace ``before``, which occurs once in ``file`` of ``package``, by ``after``; ``test`` must then fail, saying
    ``claim``.
    """

    name: str
    file: str
    before: str
    after: str
    test: str
    claim: str
    package: str = "cache_manager"


AUX = "tests/cache_manager/test_aux_blocks_machine.py::TestAuxBlocksHeap"
MANAGER = "tests/cache_manager/test_manager_machine.py::TestManagerGate"
LIFE = "tests/cache_manager/test_lifecycle.py::TestLifecycle"
INDEX = "tests/cache_manager/test_prefix_index.py::TestPrefixIndex"
KEYS = "tests/cache_manager/test_vocabulary.py"
HAZARDS = "tests/cache_manager/test_aux_blocks.py"
FILES = "tests/storage/test_file.py"
REQUESTS = "tests/cache_manager/test_manager.py"
SESSIONS = "tests/transfer/test_sessions.py"
WORLD = "tests/simulation/test_transfer_simulation.py::test_every_claim_holds_under_every_fault"

PROCESS = "tests/transfer_manager/test_process.py"

FAULTS = (
    Fault(
        "a step commits without comparing generations",
        "step.py",
        "live = self._live & (self._tier.life.generations[table.blocks] == self._generations)",
        "live = self._live",
        AUX,
        "a_row_read_is_the_row_written_or_missing",
    ),
    Fault(
        "an older step overwrites a newer one",
        "step.py",
        "                earlier._yield_to(table)",
        "                pass",
        HAZARDS,
        "test_of_two_steps_that_write_a_slot_the_later_one_counts",
    ),
    Fault(
        "a restore lands without comparing generations",
        "archive.py",
        "live = device.life.generations[self._ids] == self._generations",
        "live = np.ones(len(self._ids), dtype=np.bool_)",
        HAZARDS,
        "test_a_reset_while_the_store_is_read_drops_what_was_read",
    ),
    Fault(
        "a block given to a new owner is not invalidated",
        "tier.py",
        "        self.region.valid[ids] = 0\n",
        "",
        AUX,
        "a_row_read_is_the_row_written_or_missing",
    ),
    Fault(
        "a row being rewritten stays readable",
        "tier.py",
        "        if hit.any():\n",
        "        if False:\n",
        AUX,
        "a_row_read_is_the_row_written_or_missing",
    ),
    Fault(
        "a reset forgets the generations",
        "lifecycle.py",
        "        self._apply(Event.RESET_UNHELD, unheld)\n        self.generations += 1",
        "        self._apply(Event.RESET_UNHELD, unheld)",
        LIFE,
        "a_generation_is_a_count_of_lives",
    ),
    Fault(
        "a released owner keeps one lease",
        "leases.py",
        "for block in list(held) if blocks is None else blocks:",
        "for block in list(held)[: len(held) - (len(held) > 1)] if blocks is None else blocks:",
        AUX,
        "released_owners_hold_nothing",
    ),
    Fault(
        "a move leaves a lease behind",
        "leases.py",
        "map(mine.pop, sources)",
        "map(mine.get, sources)",
        AUX,
        "no_block_is_free_and_owned",
    ),
    Fault(
        "a failed move counts as arrived",
        "move.py",
        "self._target.life.end_arrival(self._targets, arrived=arrived)",
        "self._target.life.end_arrival(self._targets, arrived=True)",
        AUX,
        "bytes_used_plus_free_equal_capacity",
    ),
    Fault(
        "a block in motion may be written",
        "lifecycle.py",
        "        Event.SHARE: State.LEAVING,\n",
        "        Event.SHARE: State.LEAVING,\n        Event.WRITE: State.LEAVING,\n",
        AUX,
        "a_block_in_motion_cannot_be_freed_or_written",
    ),
    Fault(
        "a block in motion may be freed",
        "lifecycle.py",
        "        Event.LAST_RELEASE: State.LEAVING,\n",
        "        Event.LAST_RELEASE: State.CACHED,\n",
        LIFE,
        "states_are_what_happened",
    ),
    Fault(
        "the first of two copies lets the block go",
        "lifecycle.py",
        "last = ids[self._departures[ids] == 0]",
        "last = ids",
        LIFE,
        "states_are_what_happened",
    ),
    Fault(
        "the wrong slot",
        "manager.py",
        "* self._tokens + positions % self._tokens",
        "* self._tokens + (positions + 1) % self._tokens",
        MANAGER,
        "every_sequence_finds_its_own_kv",
    ),
    Fault(
        "no copy on write",
        "manager.py",
        "if self._others_use(blocks[i])]",
        "if False]",
        REQUESTS,
        "test_forks_share_until_one_of_them_writes",
    ),
    Fault(
        "a reused block is still found under its old key",
        "prefix_index.py",
        "        del self._blocks[self._keys.pop(block)]\n        return block",
        "        self._keys.pop(block)\n        return block",
        INDEX,
        "no_leased_block_is_evictable",
    ),
    Fault(
        "a held block may be evicted",
        "prefix_index.py",
        "            self._idle.pop(block, None)\n\n    def release",
        "            pass\n\n    def release",
        INDEX,
        "no_leased_block_is_evictable",
    ),
    Fault(
        "rows beyond what a sequence computed are handed out",
        "manager.py",
        "        if stop > sequence.computed:  # bytes",
        "        if False:  # bytes",
        REQUESTS,
        "test_a_fork_never_sees_what_its_parent_wrote_later",
    ),
    Fault(
        "a block that others use may be written",
        "manager.py",
        "            if stop > sequence.computed and self._others_use(block):",
        "            if False:",
        REQUESTS,
        "test_a_block_that_others_use_cannot_be_written",
    ),
    Fault(
        "a fork copies more rows than it may",
        "move.py",
        "valid if self._rows is None else valid & self._rows",
        "valid",
        HAZARDS,
        "test_a_copy_can_be_limited_to_the_first_rows",
    ),
    Fault(
        "stored bytes are served without a check",
        "record.py",
        "if (found := checksum(payload)) != header.payload_xxh3:",
        "if (found := checksum(payload)) != header.payload_xxh3 and False:",
        REQUESTS,
        "test_a_flipped_bit_is_a_miss_and_is_counted",
    ),
    Fault(
        "keys forget the namespace",
        "keys.py",
        '        seed.update(_part(b"namespace", namespace.canonical))\n',
        "",
        KEYS,
        "test_keys_are_equal_exactly_for_equal_prefixes_in_equal_namespaces",
    ),
    Fault(
        "keys forget the parent",
        "keys.py",
        '                len(parent).to_bytes(8, "little"),\n                parent,\n',
        '                len(b"").to_bytes(8, "little"),\n                b"",\n',
        KEYS,
        "test_keys_are_equal_exactly_for_equal_prefixes_in_equal_namespaces",
    ),
    Fault(
        "a header with a wrong sum is believed",
        "record.py",
        "    if found != crc:",
        "    if False:",
        KEYS,
        "test_a_flipped_bit_in_a_header_is_an_error",
    ),
    Fault(
        "a corrupt record is not quarantined",
        "storage/records.py",
        "            self.backend.delete(keys)\n",
        "            pass\n",
        REQUESTS,
        "test_a_flipped_bit_is_a_miss_and_is_counted",
    ),
    Fault(
        "a cut record is taken into the index",
        "storage/segment.py",
        "            if not payload_is_sound(disk, fd, found, at, payload):\n",
        "            if False:\n",
        FILES + "::test_what_a_crash_left_in_the_newest_segment_is_cut_away",
        "test_what_a_crash_left_in_the_newest_segment_is_cut_away",
    ),
    Fault(
        "a stored header is not looked at again",
        "storage/segment.py",
        "return zlib.crc32(raw) == CRC_RESIDUE and",
        "return len(raw) > 0 and",
        FILES + "::test_a_damaged_header_is_found_by_a_read_and_costs_no_neighbour",
        "test_a_damaged_header_is_found_by_a_read_and_costs_no_neighbour",
    ),
    Fault(
        "a record lands in a block of another life",
        "install.py",
        "if life.generations[index] != generation or not",
        "if not",
        WORLD,
        "a_row_read_is_the_row_written_or_missing",
    ),
    Fault(
        "a record lands on a row that a step will write",
        "install.py",
        "landed = bits & ~taken & ~_pending_bits(device, ledger, index)",
        "landed = bits & ~taken",
        WORLD,
        "a_row_read_is_the_row_written_or_missing",
    ),
    Fault(
        "a record lands on the rows that are there",
        "install.py",
        "landed = bits & ~taken & ~_pending",
        "landed = bits & ~_pending",
        WORLD,
        "a_row_read_is_the_row_written_or_missing",
    ),
    Fault(
        "a block is released while the link reads it",
        "prefill.py",
        "        if found.in_link:\n            found.apply(Event.END_HELD)",
        "        if False:\n            found.apply(Event.END_HELD)",
        WORLD,
        "prefill_releases_only_after_ack_or_lease_end",
        "transfer",
    ),
    Fault(
        "an ack of another peer counts",
        "prefill.py",
        "        elif (found.peer, found.run) != (peer, message.run):",
        "        elif not isinstance(message, Ack) and (found.peer, found.run) != (peer, message.run):",
        WORLD,
        "prefill_releases_only_after_ack_or_lease_end",
        "transfer",
    ),
    Fault(
        "a renewal is not heard",
        "prefill.py",
        "        found.expires_s = max(",
        "        _ = max(",
        WORLD,
        "prefill_releases_only_after_ack_or_lease_end",
        "transfer",
    ),
    Fault(
        "a lease never ends",
        "prefill.py",
        "        while self._expiries and self._expiries[0][0] <= now_s:",
        "        while False:",
        WORLD,
        "quiescent_means_nothing_in_flight",
        "transfer",
    ),
    Fault(
        "a reset forgets the transfers",
        "prefill.py",
        "        actions = self._end_all(Outcome.RESET)\n",
        "        actions = list[PrefillAction]()\n",
        SESSIONS,
        "test_every_end_waits_for_the_link",
        "transfer",
    ),
    Fault(
        "an ended transfer is forgotten at once",
        "prefill.py",
        "        self._ended[found.id] = Ended(outcome, found.peer, found.run)\n",
        "",
        SESSIONS,
        "test_a_message_after_the_end_is_counted_and_refused",
        "transfer",
    ),
    Fault(
        "an older pull counts",
        "prefill.py",
        "        if pull.epoch <= found.epoch:",
        "        if False:",
        SESSIONS,
        "test_an_older_pull_or_credit_changes_nothing",
        "transfer",
    ),
    Fault(
        "credit of an epoch is spent in the next",
        "prefill.py",
        "        found.epoch, found.used_nbytes = pull.epoch, 0",
        "        found.epoch = pull.epoch",
        SESSIONS,
        "test_a_lost_record_starts_a_new_epoch_with_new_credit",
        "transfer",
    ),
    Fault(
        "the ack comes before the last installation",
        "decode.py",
        "        if pull.keys or pull.installing:",
        "        if pull.keys:",
        WORLD,
        "the ack follows the last installation",
        "transfer",
    ),
    Fault(
        "a record is handed out twice",
        "decode.py",
        "installing[place] = keys.pop(place)",
        "installing[place] = keys[place]",
        WORLD,
        "installed_once_per_transfer",
        "transfer",
    ),
    Fault(
        "a record from somebody else is taken",
        "decode.py",
        "                if pull.peer != peer:",
        "                if False:",
        SESSIONS,
        "test_records_from_somebody_else_are_dropped",
        "transfer",
    ),
    Fault(
        "a record that is not there is not reported",
        "decode.py",
        "                pull.missing.append(Missing(*place, Reason.ABSENT))\n",
        "",
        WORLD,
        "the ack follows the last installation",
        "transfer",
    ),
    Fault(
        "a lease given up during a move stays at the source",
        "leases.py",
        "            if current <= names:",
        "            if current == names:",
        HAZARDS,
        "test_a_lease_given_up_during_a_move_leaves_no_ghost_at_the_source",
    ),
    Fault(
        "the cache-transfer process moves one part of a block",
        "transfer_manager/process.py",
        "        for part in self._parts:\n            source, target",
        "        for part in self._parts[:1]:\n            source, target",
        PROCESS,
        "test_a_move_copies_every_part_and_nothing_else",
    ),
    Fault(
        "the cache-transfer process does not compare generations",
        "transfer_manager/process.py",
        "            if found != wanted:",
        "            if False:",
        PROCESS,
        "test_a_block_of_another_generation_is_refused_and_not_written",
    ),
)
