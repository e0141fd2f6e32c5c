"""The invariants, by name: what each claims, a story that breaks it, and reports of managers that broke it.

The reports are threads of public trackers in which the same claim failed, in whatever component; ``()`` where we know
of none. A story is the shortest that a planted fault has led to, in the words of a failure's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Invariant:
    name: str
    claim: str
    story: str
    reports: tuple[str, ...] = ()


_ALL = (
    # ---------------------------------------------------------------- accounting
    Invariant(
        "no_block_lost",
        "Free, held and kept blocks together are all blocks, after every operation.",
        "admit a; free a; its block is neither free nor anybody's",
        ("sglang#28902", "sglang#9927", "vllm#46283"),
    ),
    Invariant(
        "all_come_back",
        "When every sequence has ended all blocks are free, and one sequence can have them all.",
        "admit a; admit b, refused, holding the blocks that it hit; free a; one block is never free again",
        ("LMCache#1034", "vllm#44100"),
    ),
    Invariant(
        "none_free_and_held",
        "A block that somebody holds is not among the free ones, and none is free twice.",
        "admit a; admit b, which hits a's block; free a puts the block on the free list; b still holds it",
        ("vllm#42571", "mini-sglang PR142"),
    ),
    Invariant(
        "given_once",
        "A block that is handed out anew is held by nobody else.",
        "admit a; free a twice: its block is free twice; admit b; admit c gets b's block",
        ("LMCache#5005",),
    ),
    Invariant(
        "ref_count_is_holders",
        "The reference count of a block is the number of sequences that hold it.",
        "admit a; fork a as b; free a; the count of the shared block is 2",
        ("LMCache#1365", "LMCache#3381"),
    ),
    Invariant(
        "host_conserved",
        "Free and held host blocks together are all host blocks.",
        "admit a; preempt a; free a frees its host block twice",
        ("sglang#13483",),
    ),
    Invariant(
        "background_ends",
        "When all work in the background has ended, no block is kept for it and nobody waits.",
        "persist a; free a; the store is done; a's block is still kept",
        ("vllm-ascend#16662", "TensorRT-LLM#17665"),
    ),
    # ---------------------------------------------------------------- tables
    Invariant(
        "ids_are_blocks",
        "A table names blocks of the pool, each at most once.",
        "admit a of two blocks; its table is [b0 b0]",
        ("kvcached PR398",),
    ),
    Invariant(
        "table_covers",
        "A table reaches every position that is computed, or about to be.",
        "admit a of one full block; step a + [0]; there is room, says the manager, and no second block",
    ),
    Invariant(
        "others_untouched",
        "An operation on one sequence changes the table of no other.",
        "admit a; admit b; free a takes the block away from b too",
        ("LMCache PR5098",),
    ),
    # ---------------------------------------------------------------- content
    Invariant(
        "shared_not_written",
        "A block is written only while its writer is the only one who holds it.",
        "admit a [0]; fork a as b; step b + [0] writes into the block that a still reads",
        ("xllm PR1984", "sglang#24527"),
    ),
    Invariant(
        "content_survives",
        "A sequence finds, at each position that it has computed, the KV of its own tokens, as long as it lives.",
        "admit a; preempt a copies to another host block than the table says; resume a",
        ("vllm#45704", "DingoCache#231", "vllm#53505"),
    ),
    Invariant(
        "hit_is_its_prefix",
        "A hit hands over only blocks whose KV is that very prefix's.",
        "admit a [0,0,1,1]; admit b [1,1,0] hits a's second block, whose KV was computed after [0,0]",
        ("openvino.genai#3722", "LMCache#4385"),
    ),
    Invariant(
        "hit_was_written",
        "A hit hands over no block whose KV was never computed.",
        "admit a [0,0,0]; free a, its step is lost; admit b [0,0,0] hits a block that nobody has written",
        ("sglang#30233", "vllm#34526", "LMCache#4991"),
    ),
    Invariant(
        "hit_leaves_one",
        "A hit is whole blocks, and leaves at least one token to compute.",
        "admit a [0,0]; admit b [0,0] gets 2 of 2 tokens, and has no logits to sample from",
        ("LMCache PR3322",),
    ),
    Invariant(
        "held_is_found",
        "A full block that a running sequence holds is found by an equal prefix.",
        "admit a [0,0,0]; admit b [0,0,0] gets 0 tokens cached",
        ("vllm PR11186",),
    ),
    Invariant(
        "salts_apart",
        "No block is shared by sequences of different salts: tenants, adapters.",
        "admit a [0,0] under salt 'A'; admit b [0,0,0] without one hits a's block",
        ("vllm#44701",),
    ),
    Invariant(
        "reset_forgets",
        "After a reset nothing is found that was computed with other weights.",
        "admit a [0,0]; free a; reset; admit b [0,0,0] hits a's block",
        ("vllm#57727", "lmdeploy#4917"),
    ),
    Invariant(
        "rows_follow_kv",
        "A row that is read was made by the pass that computed the KV beside it, or is reported missing.",
        "admit a; persist a; free a; admit b in a's block; admit c, restored: its rows are b's",
        ("vllm#56402",),
    ),
    Invariant(
        "rows_are_kept",
        "A row is not missing while its KV is there, unless its pass made none or the weights are new.",
        "admit a; preempt a; resume a; its KV is back and its rows are not",
        ("vllm#55584",),
    ),
    # ---------------------------------------------------------------- protocol
    Invariant(
        "refusal_changes_nothing",
        "An operation that is refused, or whose copy fails, leaves tables, counts and free blocks as they were.",
        "admit a [0,0]; admit b, which hits a's block and is refused for the rest: the block's count is 2",
        ("vllm PR41269",),
    ),
    Invariant(
        "refusal_is_honest",
        "Nothing is refused for want of blocks while enough are free.",
        "admit a [0,0]; free a; admit all, 16 new tokens, is refused while 8 blocks of 2 are free",
        ("sglang#35270", "LMCache#1285"),
    ),
    Invariant(
        "free_is_final",
        "A second free() of a sequence changes nothing.",
        "admit a; free a twice: there is one free block more",
        ("vllm#25562", "LMCache#5005"),
    ),
    Invariant(
        "copies_are_sound",
        "Copies go from blocks with an owner to distinct blocks that nobody else has.",
        "admit a; preempt a; admit b; resume a into b's block",
        ("vllm#46951", "vllm#47282"),
    ),
    Invariant(
        "no_unexpected_error",
        "A call that the protocol allows does not raise.",
        "admit a; preempt a; free a raises",
        ("vllm#46014", "vllm#25562"),
    ),
    Invariant("own_check", "The manager's own check passes.", "whatever the check says"),
    Invariant(
        "determinism",
        "The same calls give the same answers and the same blocks, so that ranks agree.",
        "admit a: blocks [b0 b1], and [b1 b0] when it was done again",
        ("LMCache#1379", "LMCache#1467"),
    ),
)

INVARIANTS: Final[Mapping[str, Invariant]] = {invariant.name: invariant for invariant in _ALL}

__all__ = ["INVARIANTS", "Invariant"]
