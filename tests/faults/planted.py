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


MANAGER = "tests/cache_manager/test_own_managers.py::TestGated"
KEYS = "tests/cache_manager/test_vocabulary.py"
FILES = "tests/storage/test_file.py"
MISSES = "tests/storage/test_file_reader_misses.py"
FSCK = "tests/storage/test_file_fsck.py"
REQUESTS = "tests/cache_manager/test_manager.py"
DEFECTS = "tests/cache_manager/test_manager_defects.py"
SESSIONS = "tests/transfer/test_sessions.py"
ENDS = "tests/transfer/test_sessions_ends.py"
WORLD = "tests/simulation/test_transfer_simulation.py::test_every_claim_holds_under_every_fault"

JOURNAL = "tests/kvroute/test_journal.py::TestForgetfulEngine"
PROCESS = "tests/transfer_manager/test_process.py"
APART = "tests/storage/test_apart.py"

FAULTS = (
    Fault(
        "the wrong slot",
        "manager/passes.py",
        "return slots[start % size : start % size + stop - start]",
        "return slots[start % size : start % size + stop - start][::-1]",
        MANAGER,
        "content_survives",
    ),
    Fault(
        "the wrong slot in a batch",
        "manager/passes.py",
        "slots: Ints = all_.offset.take(rows) + done",
        "slots: Ints = all_.offset.take(rows) + (done ^ 1)",
        MANAGER,
        "content_survives",
    ),
    Fault(
        "the slot of a block that a fork shares by now",
        "manager/manager.py",
        "        self._sequences.limit[s.row] = 0\n",
        "",
        MANAGER,
        "shared_not_written",
    ),
    Fault(
        "numbers of sequences that were asked about once are not looked at again",
        "manager/sequence.py",
        "s.phase, self.limit[s.row], self._last = phase, 0, NOTHING",
        "s.phase, self.limit[s.row] = phase, 0",
        f"{REQUESTS}::test_the_same_numbers_are_judged_anew_when_a_sequence_has_changed",
        "test_the_same_numbers_are_judged_anew_when_a_sequence_has_changed",
    ),
    Fault(
        "a child forgets the tokens of the block that is not full",
        "manager/manager.py",
        "        self._sequences.filling[twin.row] = self._sequences.filling[s.row]\n",
        "",
        f"{REQUESTS}::test_a_block_that_a_fork_fills_is_found_under_all_of_its_tokens",
        "test_a_block_that_a_fork_fills_is_found_under_all_of_its_tokens",
    ),
    Fault(
        "a child's keys are its parent's",
        "manager/manager.py",
        "keys=list(s.keys))",
        "keys=s.keys)",
        f"{DEFECTS}::test_a_parent_and_its_child_are_found_by_keys_of_their_own",
        "test_a_parent_and_its_child_are_found_by_keys_of_their_own",
    ),
    Fault(
        "no copy on write",
        "manager/passes.py",
        "if pool.others_use(s.blocks[i])]",
        "if False]",
        REQUESTS,
        "test_forks_share_until_one_of_them_writes",
    ),
    Fault(
        "all who share a block leave it",
        "manager/pool.py",
        "return self.readers[block] > 1 or block in self.index",
        "return self.readers[block] > 0 or block in self.index",
        f"{REQUESTS}::test_of_those_that_share_a_block_the_last_one_keeps_it",
        "test_of_those_that_share_a_block_the_last_one_keeps_it",
    ),
    Fault(
        "a reused block is still found under its old key",
        "manager/index.py",
        "        blocks.remove(block)\n        if not blocks:\n            del self._blocks[key]\n",
        "",
        MANAGER,
        "own_check",
    ),
    Fault(
        "a held block may be evicted",
        "manager/index.py",
        "            self._idle.pop(block, None)\n\n    def release",
        "            pass\n\n    def release",
        MANAGER,
        "no_block_lost",
    ),
    Fault(
        "a copy of what a running sequence has displaces a cached prefix",
        "manager/pool.py",
        "if heir is not None and self._as_good(heir, block):",
        "if False:",
        f"{DEFECTS}::test_what_a_running_sequence_has_too_displaces_nothing",
        "test_what_a_running_sequence_has_too_displaces_nothing",
    ),
    Fault(
        "a key dies with the block that it is found at",
        "manager/index.py",
        "        if not blocks:\n            del self._blocks[key]\n",
        "        for other in self._blocks.pop(key):\n            del self._keys[other]\n",
        f"{DEFECTS}::test_a_duplicate_takes_over_when_the_first_of_a_group_ends",
        "test_a_duplicate_takes_over_when_the_first_of_a_group_ends",
    ),
    Fault(
        "a chain loses its head before its tail",
        "manager/pool.py",
        "for block in reversed(blocks):  # a chain",
        "for block in blocks:  # a chain",
        f"{DEFECTS}::test_a_chain_loses_its_tail_before_its_head",
        "test_a_chain_loses_its_tail_before_its_head",
    ),
    Fault(
        "a block whose KV is still written is given out",
        "manager/pool.py",
        "(self._away if written else self._free).append(block)",
        "self._free.append(block)",
        f"{DEFECTS}::test_blocks_that_a_pass_writes_are_given_out_when_it_has_ended",
        "test_blocks_that_a_pass_writes_are_given_out_when_it_has_ended",
    ),
    Fault(
        "a sequence is swapped out while a pass writes its KV",
        "manager/manager.py",
        "        if self.aux.writing(blocks).any():\n",
        "        if False:\n",
        f"{DEFECTS}::test_what_a_pass_writes_is_neither_swapped_nor_shared",
        "test_what_a_pass_writes_is_neither_swapped_nor_shared",
    ),
    Fault(
        "the blocks for a move that has failed are lost",
        "manager/passes.py",
        "            self._pool.let_go(taken)\n",
        "",
        MANAGER,
        "refusal_changes_nothing",
    ),
    Fault(
        "a block that somebody still reads is let go",
        "manager/pool.py",
        "            if not (self.readers[block] or self.keepers[block]):\n                heir",
        "            if True:\n                heir",
        MANAGER,
        "no_block_lost",
    ),
    Fault(
        "a block begins no new life when it is given out",
        "manager/pool.py",
        "        assert self._aux.renew(blocks).all(), ",
        "        new = [block for block in blocks if not self._aux.generations([block])]\n"
        "        assert self._aux.renew(new).all(), ",
        f"{REQUESTS}::test_a_block_that_is_given_out_begins_a_new_life",
        "test_a_block_that_is_given_out_begins_a_new_life",
    ),
    Fault(
        "a sequence has what the store was asked for, found or not",
        "manager/manager.py",
        "back = job.answers if s.base is self.aux.keys else {}",
        "back = dict.fromkeys(job.blocks, True)",
        "tests/cache_manager/test_own_managers.py::TestStored",
        "hit_was_written",
    ),
    Fault(
        "what is only cached is lost at a reset",
        "manager/pool.py",
        "        self._free += self.index.clear()\n",
        "        self.index.clear()\n",
        MANAGER,
        "no_block_lost",
    ),
    Fault(
        "what has come back is found under the next block's key",
        "manager/manager.py",
        "zip(s.keys, targets, strict=False)",
        "zip(s.keys[1:], targets, strict=False)",
        f"{DEFECTS}::test_what_has_come_back_is_found_under_its_own_keys",
        "test_what_has_come_back_is_found_under_its_own_keys",
    ),
    Fault(
        "a sequence from before two resets publishes",
        "manager/passes.py",
        "if self._caching and s.base is self.aux.keys:",
        "if self._caching and s.base.scope == self.aux.keys.scope:",
        f"{DEFECTS}::test_a_sequence_from_before_a_reset_there_and_back_is_not_found",
        "test_a_sequence_from_before_a_reset_there_and_back_is_not_found",
    ),
    Fault(
        "rows beyond what a sequence computed are handed out",
        "manager/manager.py",
        "        if stop > computed:  # bytes",
        "        if False:  # bytes",
        REQUESTS,
        "test_a_fork_never_sees_what_its_parent_wrote_later",
    ),
    Fault(
        "a block that others use may be written",
        "manager/passes.py",
        "for block in filter(self._pool.others_use, blocks):",
        "for block in ():",
        REQUESTS,
        "test_a_block_that_others_use_cannot_be_written",
    ),
    Fault(
        "stored bytes are served without a check",
        "storage/records.py",
        "            and checksum(payload) == header.payload_xxh3\n",
        "",
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
        "storage/file/recovery.py",
        "return LIVING if payload == unpack_checked_header(raw).payload_xxh3 else UNSOUND",
        "return LIVING",
        FILES + "::test_what_a_crash_left_in_the_newest_segment_is_cut_away",
        "test_what_a_crash_left_in_the_newest_segment_is_cut_away",
    ),
    Fault(
        "a check of many records skips their payloads",
        "storage/file/segment.py",
        ' & (headers["payload_xxh3"] == sums)',
        "",
        f"{FSCK}::test_what_is_wrong_is_named_repaired_and_then_right",
        "test_what_is_wrong_is_named_repaired_and_then_right",
    ),
    Fault(
        "a stored header is not looked at again",
        "storage/file/index.py",
        "if crc32(raw) == CRC_RESIDUE and raw.endswith(",
        "if raw.endswith(",
        FILES + "::test_a_damaged_header_is_found_by_a_read_and_costs_no_neighbour",
        "test_a_damaged_header_is_found_by_a_read_and_costs_no_neighbour",
    ),
    Fault(
        "a reader takes its last look for the truth",
        "storage/file/reader.py",
        "more = missing and self._has_more()",
        "more = False",
        f"{MISSES}::test_what_one_reader_has_found_no_other_misses",
        "test_what_one_reader_has_found_no_other_misses",
    ),
    Fault(
        "a thread does not wait for another one's look",
        "storage/file/reader.py",
        "self._refresh.acquire(blocking=more)",
        "self._refresh.acquire(blocking=False)",
        f"{MISSES}::test_threads_of_one_reader_miss_nothing_that_another_is_reading",
        "test_threads_of_one_reader_miss_nothing_that_another_is_reading",
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
        "        elif (found.peer, found.boot_id) != (peer, message.boot_id):",
        "        elif not isinstance(message, Ack) and (found.peer, found.boot_id) != (peer, message.boot_id):",
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
        ENDS,
        "test_every_end_waits_for_the_link",
        "transfer",
    ),
    Fault(
        "an ended transfer is forgotten at once",
        "prefill.py",
        "        self._ended[found.id] = Ended(outcome, found.peer, found.boot_id)\n",
        "",
        ENDS,
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
        "offer.py",
        "self.epoch, self.granted_nbytes, self.used_nbytes = pull.epoch, pull.credit_nbytes, 0",
        "self.epoch, self.granted_nbytes = pull.epoch, pull.credit_nbytes",
        SESSIONS,
        "test_a_lost_record_starts_a_new_epoch_with_new_credit",
        "transfer",
    ),
    Fault(
        "the ack comes before the last installation",
        "pull.py",
        "return bool(self.outstanding or self.installing)",
        "return bool(self.outstanding)",
        WORLD,
        "the ack follows the last installation",
        "transfer",
    ),
    Fault(
        "a record is handed out twice",
        "pull.py",
        "installing[place] = keys.pop(place)",
        "installing[place] = keys[place]",
        WORLD,
        "every wanted record is in place or missing",
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
        "pull.py",
        "                self.missing.append(Missing(*place, Reason.ABSENT))\n",
        "",
        WORLD,
        "the ack follows the last installation",
        "transfer",
    ),
    Fault(
        "a row that is computed again takes the place of the sampled one",
        "journal.py",
        "old = min(max(self.settled - routes.start, 0), len(routes))",
        "old = 0",
        JOURNAL,
        "rows_are_those_that_tokens_were_sampled_with",
        package="kvroute",
    ),
    Fault(
        "rows of a computation that was given up stay",
        "journal.py",
        "self._sampled.cut(self.settled)",
        "pass",
        JOURNAL,
        "rows_are_those_that_tokens_were_sampled_with",
        package="kvroute",
    ),
    Fault(
        "a row that differs from the one that is there is taken for it",
        "merging.py",
        "    if not same:",
        "    if False:",
        "tests/kvroute/test_routes_merge.py::test_a_row_that_differs_is_named_with_position_and_layer",
        "test_a_row_that_differs_is_named_with_position_and_layer",
        package="kvroute",
    ),
    Fault(
        "the cache-transfer process copies the other way",
        "transfer_manager/process.py",
        "np.array(command.sources), np.array(command.targets)",
        "np.array(command.targets), np.array(command.sources)",
        PROCESS,
        "test_a_copy_moves_these_records_and_nothing_else",
    ),
    Fault(
        "the cache-transfer process copies into blocks that are not there",
        "transfer_manager/process.py",
        "all(0 <= block < region.blocks",
        "all(block < region.blocks",
        PROCESS,
        "test_what_cannot_be_copied_is_refused_and_costs_the_process_nothing",
    ),
    Fault(
        "a store apart says that what its batch evicted is stored",
        "storage/apart.py",
        "        if len(parts) > 1:",
        "        if False:",
        APART,
        "test_what_a_later_part_of_a_batch_has_evicted_is_not_said_to_be_stored",
    ),
    Fault(
        "bytes of a miss come back from a store apart",
        "storage/apart.py",
        "                    if isinstance(each, RecordHeader):\n",
        "                    if True:\n",
        APART,
        "test_a_buffer_is_untouched_where_nothing_was_found",
    ),
)
