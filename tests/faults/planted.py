"""Faults to plant in a copy of the code, each with the test that must catch it and the claim that must break.

``docs/invariants.md`` has the claims.
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

    @property
    def node(self) -> str:
        """What is run: of a file, the test that has the claim's name."""
        return self.test if "::" in self.test else f"{self.test}::{self.claim}"


MANAGER = "tests/cache_manager/test_own_managers.py::TestGated"
REQUESTS = "tests/cache_manager/test_manager.py"
DEFECTS = "tests/cache_manager/test_manager_defects.py"
INTERRUPTED = "tests/cache_manager/test_manager_interrupted.py"


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
        "the slot of a block that a fork shares by now",
        "manager/manager.py",
        "        self._sequences.place(s, computed)\n",
        "",
        MANAGER,
        "shared_not_written",
    ),
    Fault(
        "the slot behind a block that a decode step has filled",
        "manager/passes.py",
        "            slots[left == 1] = [UNKNOWN + all_.computed(s) + 1 for s in full]\n",
        "",
        MANAGER,
        "no_unexpected_error",
    ),
    Fault(
        "numbers of sequences that were asked about once are not looked at again",
        "manager/sequence.py",
        "s.phase, s.blocks, self._last = phase, blocks, NOTHING",
        "s.phase, s.blocks = phase, blocks",
        f"{REQUESTS}::test_the_same_numbers_are_judged_anew_when_a_sequence_has_changed",
        "test_the_same_numbers_are_judged_anew_when_a_sequence_has_changed",
    ),
    Fault(
        "a child's keys are its parent's",
        "manager/manager.py",
        "keys=list(s.keys))",
        "keys=s.keys)",
        MANAGER,
        "held_is_found",
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
        "a reused block is still found under its old key",
        "manager/pool.py",
        "                blocks.remove(block)\n",
        "",
        MANAGER,
        "own_check",
    ),
    Fault(
        "a block whose KV is still written is given out",
        "manager/pool.py",
        "            if written or block in kept:\n",
        "            if block in kept:\n",
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
        "a block that somebody still reads is let go",
        "manager/pool.py",
        "            if not self.readers[block]:\n                self._away.append(block)\n",
        "            self.readers[block] = 0\n            self._away.append(block)\n",
        MANAGER,
        "no_block_lost",
    ),
    Fault(
        "a block begins no new life when it is given out",
        "manager/pool.py",
        "        lives = self._aux.renew(blocks)\n",
        "        new = [block for block in blocks if not self._aux.generations([block])]\n"
        "        lives = self._aux.renew(new)\n",
        f"{REQUESTS}::test_a_block_that_is_given_out_begins_a_new_life",
        "test_a_block_that_is_given_out_begins_a_new_life",
    ),
    Fault(
        "a sequence has what the store was asked for, found or not",
        "manager/manager.py",
        "run = list(takewhile(back.get, back))",
        "run = list(back)",
        "tests/cache_manager/test_own_managers.py::TestStored",
        "hit_was_written",
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
        "if self._caching and s.base is self.aux.keys and",
        "if self._caching and s.base.scope == self.aux.keys.scope and",
        f"{DEFECTS}::test_a_sequence_from_before_a_reset_there_and_back_is_not_found",
        "test_a_sequence_from_before_a_reset_there_and_back_is_not_found",
    ),
    Fault(
        "a key names a block behind one whose key is missing",
        "manager/passes.py",
        " and len(s.keys) == column:",
        ":",
        f"{DEFECTS}::test_no_key_names_a_block_behind_one_whose_key_is_missing",
        "test_no_key_names_a_block_behind_one_whose_key_is_missing",
    ),
    Fault(
        "a manager goes on with what an interrupted call has left",
        "manager/passes.py",
        "        self._torn = self._inside = True\n",
        "        self._inside = True\n",
        f"{INTERRUPTED}::test_a_call_that_is_interrupted_loses_no_block_and_mixes_no_content",
        "test_a_call_that_is_interrupted_loses_no_block_and_mixes_no_content",
    ),
    Fault(
        "a call in the middle of another puts a manager in order",
        "manager/passes.py",
        "        if self._inside:\n",
        "        if False:\n",
        f"{INTERRUPTED}::test_a_call_inside_another_is_refused",
        "test_a_call_inside_another_is_refused",
    ),
    Fault(
        "rows beyond what a sequence computed are handed out",
        "manager/manager.py",
        "        if stop > computed:  # bytes",
        "        if False:  # bytes",
        REQUESTS,
        "test_a_fork_never_sees_what_its_parent_wrote_later",
    ),
)
