"""Faults in the core: lives, steps, moves, and devices that write in place."""

from __future__ import annotations

from planted import Fault
from planted_jobs import JOB_FAULTS
from planted_origins import LANDS, ORIGIN_FAULTS, ROW

MACHINE = "tests/cache_manager/test_blocks_machine.py::TestBlocksHeap"
BLOCKS = "tests/cache_manager/test_blocks.py::"
KEYS = "tests/cache_manager/test_vocabulary.py::"

FENCE = "a step lands where no device may still write"
BOOKS = "the_books_are_in_order"

CORE_FAULTS = [
    Fault(
        "a new life does not make the steps of the old one late",
        "table.py",
        "        self._take_away(ids, self.tokens)\n",
        "",
        MACHINE,
        FENCE,
    ),
    Fault(
        "an older step overwrites a newer one",
        "table.py",
        "        self._take_away(claim.slots)\n",
        "",
        MACHINE,
        FENCE,
    ),
    Fault(
        "what was known of a step's blocks holds after a change",
        "lock.py",
        "        table.latest = None\n",
        "",
        MACHINE,
        BOOKS,
    ),
    Fault(
        "what was known of a step's blocks holds in their next life",
        "table.py",
        "if latest is not None and not count(self.among(latest[1], ids)):",
        "if latest is not None:",
        MACHINE,
        BOOKS,
    ),
    Fault(
        "what was known of a step's blocks holds for other blocks",
        "step.py",
        "cells.tobytes() == latest[0]:",
        "cells.size == latest[1].size:",
        MACHINE,
        BOOKS,
    ),
    Fault(
        "a restore lands whatever has become of its block",
        "stored.py",
        "(table.changes.take(ids) == self.changes) & table.fillable(ids)",
        "table.fillable(ids)",
        MACHINE,
        LANDS,
    ),
    Fault(
        "a restore lands over rows",
        "stored.py",
        "        live &= table.empty(ids) & ~table.own.take(ids)\n",
        "        live &= ~table.own.take(ids)\n",
        MACHINE,
        LANDS,
    ),
    Fault(
        "a block given to a new owner is not invalidated",
        "publish.py",
        "    bits[ids] = np.zeros(1, bits.dtype)\n",
        "",
        MACHINE,
        ROW,
    ),
    Fault(
        "a row being rewritten stays readable",
        "publish.py",
        "        if hit.tobytes() != bytes(hit.nbytes):  # some readable",
        "        if False:  #",
        MACHINE,
        ROW,
    ),
    Fault(
        "a reset leaves rows readable",
        "table.py",
        "        republish(self.region, self.generations)\n",
        "        pass\n",
        MACHINE,
        BOOKS,
    ),
    Fault(
        "a fork copies more rows than it may",
        "moves.py",
        "                valid &= limits[good]\n",
        "                pass\n",
        BLOCKS + "test_a_copy_brings_the_first_rows_that_it_may",
        "test_a_copy_brings_the_first_rows_that_it_may",
    ),
    Fault(
        "a block in motion may be written",
        "table.py",
        "        return given & ~self.fenced(ids) if self.fences else given\n",
        "        return given\n",
        MACHINE,
        "a step writes what it may, and no other",
    ),
    Fault(
        "a block into which bytes are copied is given out",
        "blocks.py",
        "                good[good] = ~table.fenced(ids[good])\n",
        "                pass\n",
        MACHINE,
        "an_old_generation_never_becomes_valid",
    ),
    Fault(
        "a move that has failed keeps its blocks",
        "moves.py",
        "        fence.over = True  # in one instruction",
        "        pass  # in one instruction",
        BLOCKS + "test_a_move_that_fails_brings_nothing_and_keeps_nothing",
        "test_a_move_that_fails_brings_nothing_and_keeps_nothing",
    ),
    Fault(
        "a move takes along what a step has committed meanwhile",
        "moves.py",
        "            arrived = target.arrive(fence, same, valid, origins)\n",
        "            arrived = target.arrive(fence, same | True, bits_of(source.region, sources), origins)\n",
        MACHINE,
        ROW,
    ),
    Fault(
        "the rows of a block that was copied over stay",
        "table.py",
        "            self.forget(here)\n",
        "            pass\n",
        MACHINE,
        ROW,
    ),
    Fault(
        "keys forget the parent",
        "keys.py",
        'digest.update(b"".join((_PARENT, parent, self._full',
        'digest.update(b"".join((_PARENT, bytes(32), self._full',
        KEYS + "test_keys_are_equal_exactly_for_equal_prefixes_in_equal_namespaces",
        "test_keys_are_equal_exactly_for_equal_prefixes_in_equal_namespaces",
    ),
    *ORIGIN_FAULTS,
    # ---- devices that write in place
    Fault(
        "a step commits where a device may still write",
        "table.py",
        "(found := self._outside_fences(claim))",
        "(found := claim.mine)",
        BLOCKS + "test_a_step_in_place_waits_for_the_device_of_the_one_before_it",
        "test_a_step_in_place_waits_for_the_device_of_the_one_before_it",
    ),
    Fault(
        "a step keeps what it copies to where a device may still write",
        "table.py",
        "            claim.mine = self._outside_fences(claim)\n",
        "            pass\n",
        MACHINE,
        FENCE,
    ),
    Fault(
        "a block that a device still writes is filled",
        "table.py",
        "step.blocks if step.in_place else step.blocks[present]",
        "step.blocks[present]",
        MACHINE,
        LANDS,
    ),
    Fault(
        "slots that were dropped are not fenced",
        "table.py",
        "            claim.reach, others = np.append(claim.slots, lost), ",
        "            claim.reach, others = claim.slots, ",
        MACHINE,
        FENCE,
    ),
    Fault(
        "what lay at the slots of a refused pass stays readable",
        "table.py",
        "        here = np.unique(ids[(ids >= 0) & (ids < self.blocks)])\n",
        "        here = ids[:0]\n",
        MACHINE,
        LANDS,
    ),
    Fault(
        "a block that a refused pass has written is filled",
        "table.py",
        "            self.write_under_own_origin(here, NO_INTS)\n",
        "",
        MACHINE,
        LANDS,
    ),
    Fault(
        "slots that are no integers name blocks",
        "numbers.py",
        "    return (numbers if whole else None), array.size\n",
        "    return numbers, array.size\n",
        "tests/cache_manager/test_blocks_mistakes.py",
        "test_where_the_slots_of_a_pass_cannot_be_read_no_row_of_before_is",
    ),
    *JOB_FAULTS,
]
