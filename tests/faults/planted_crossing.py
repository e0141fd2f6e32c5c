"""Faults of rows that cross between two engines; see :mod:`planted`."""

from __future__ import annotations

from planted import Fault

LAW = "tests/kvroute/test_crossing.py::"
KV = "tests/kvroute/test_crossing_kv.py::"
TICKETS = "tests/kvroute/test_crossing_tickets.py::"


def _fault(name: str, file: str, before: str, after: str, where: str, claim: str) -> Fault:
    return Fault(name, f"connector/{file}", before, after, where + claim, claim, "kvroute")


CROSSING_FAULTS = [
    _fault(
        "rows of an earlier computation of a prompt stay lent",
        "tickets.py",
        "if start < min(lent.blocks * size, prompt) or mixed:",
        "if mixed:",
        LAW,
        "test_kv_that_fails_to_load_at_prefill_is_lent_anew",
    ),
    _fault(
        "a ticket says nothing of weights that have changed",
        "tickets.py",
        "Ticket(why=MIXED if mixed else ",
        "Ticket(why=",
        LAW,
        "test_kv_of_two_weights_is_not_lent",
    ),
    _fault(
        "a ticket is good for any prompt of its length",
        "tickets.py",
        "if ticket.digest != (digest := token_hash(prompt).hex()):",
        'if not (digest := "any"):',
        TICKETS,
        "test_a_ticket_of_another_prompt",
    ),
    _fault(
        "the row of a prompt's last token is taken for prefill's",
        "tickets.py",
        "stop = min(start + external, len(prompt) - 1)",
        "stop = min(start + external, len(prompt))",
        LAW,
        "test_rows_that_were_not_captured_are_missing_alone",
    ),
    _fault(
        "lent rows outlive their weights",
        "transfers.py",
        "        self.crossing.follow()\n",
        "",
        LAW,
        "test_weights_that_are_reset_at_prefill",
    ),
    _fault(
        "rows land in whatever life their block is in",
        "crossing.py",
        "self.rows.install(self.ids[at], self.lives[at], header, payload)",
        "self.rows.install(self.ids[at], int(self.rows.generations([self.ids[at]])[0]), header, payload)",
        KV,
        "test_what_lands_in_another_life_is_dropped",
    ),
    _fault(
        "KV of a block's next life is lent",
        "crossing.py",
        "record if origins[i] and now[i] == lives[i] else None",
        "record if origins[i] else None",
        KV,
        "test_a_block_given_out_again_before_it_was_lent_is_absent",
    ),
    _fault(
        "what lies behind a prompt goes with its last block",
        "crossing.py",
        "            raw[i, count * (kv.spec.block_nbytes // self._blocks.block_tokens) :] = 0"
        "  # the rest is of other KV\n",
        "",
        KV,
        "test_blocks_cross_as_they_are_filled",
    ),
    _fault(
        "rows of KV that did not come land",
        "crossing.py",
        "        if self.ids[at] in self.given_up:\n            return False\n",
        "",
        KV,
        "test_rows_of_kv_that_did_not_come_land_nowhere",
    ),
    _fault(
        "copies that are lent are bounded by nothing",
        "crossing.py",
        "if self.lent_nbytes + nbytes > self._lent_nbytes_max:",
        "if False:",
        KV,
        "test_lent_copies_are_bounded_by_their_bytes",
    ),
]
