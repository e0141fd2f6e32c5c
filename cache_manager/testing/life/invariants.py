"""The invariants, by name, and the error for a broken one.

``docs/concepts/life-cycle-kit.md`` has a story that breaks each, and reports of managers that did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

Operation: TypeAlias = tuple[Any, ...]
"""The name of an operation and its arguments: the call of a method ``do_...`` of :class:`Life`."""

INVARIANTS: Final[Mapping[str, str]] = {
    # accounting
    "no_block_lost": "Free and held blocks together are all blocks, after every operation.",
    "all_come_back": "When every sequence has ended all blocks are free, and one sequence can have them all.",
    "none_free_and_held": "A held block is not among the free ones, and none is free twice.",
    "given_once": "A block that is handed out anew is held by no other sequence.",
    "ref_count_is_holders": "The reference count of a block is the number of sequences that hold it.",
    "host_conserved": "Free and held host blocks together are all host blocks.",
    "background_ends": "Background work ends only for a sequence that waits for it.",
    # tables
    "ids_are_blocks": "A table names blocks of the pool, each at most once.",
    "table_covers": "A table reaches every position that is computed, or about to be.",
    "others_untouched": "An operation on one sequence changes the table of no other.",
    # content
    "shared_not_written": "A block is written only while its writer is its only holder.",
    "content_survives": "A sequence finds, at each position that it has computed, the KV of its own tokens, as long as "
    "it lives.",
    "hit_is_its_prefix": "A hit hands over only blocks whose KV is of that same prefix.",
    "hit_was_written": "A hit hands over no block whose KV was never computed.",
    "hit_leaves_one": "A hit is whole blocks, and leaves at least one token to compute.",
    "held_is_found": "A full block that a running sequence holds is found by an equal prefix.",
    "salts_apart": "No block is shared by sequences of different salts: tenants, adapters.",
    "reset_forgets": "After a reset nothing is found that was computed with other weights.",
    "rows_follow_kv": "A row that is read was made by the pass that computed the KV beside it, or is reported missing.",
    "rows_are_kept": "A row is not missing while its KV is there, unless its pass made none or the weights are new.",
    # protocol
    "refusal_changes_nothing": "An operation that is refused, or whose copy fails, leaves tables, counts and free "
    "blocks as they were.",
    "refusal_is_honest": "Nothing is refused for lack of blocks while enough are free.",
    "free_is_final": "A second free() of a sequence changes nothing.",
    "copies_are_sound": "Copies go from blocks with an owner to distinct blocks that no other sequence has.",
    "no_unexpected_error": "A call that the protocol allows does not raise.",
    "own_check": "The manager's own check passes.",
}


class InvariantBroken(AssertionError):  # noqa: N818 - it is a finding, and reads as one
    """An invariant does not hold; ``program`` are the operations that lead there, see :func:`replay`."""

    def __init__(self, name: str, what: str, program: list[Operation], told: str = "") -> None:
        super().__init__(told or f"{name}: {what}")
        self.name = name
        self.what = what
        self.program = program
