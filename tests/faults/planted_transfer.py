"""Faults of transfers: offers, pulls, and whose records are taken."""

from __future__ import annotations

from planted import Fault

SESSIONS = "tests/transfer/test_sessions.py"
ENDS = "tests/transfer/test_sessions_ends.py"
IDENTITY = "tests/transfer/test_identity.py"
KEPT = "tests/transfer/test_kept.py"
WORLD = "tests/simulation/test_transfer_simulation.py::test_every_claim_holds_under_every_fault"
HELD = "kv_lent_by_reference_is_held_until_acknowledged_or_expired"
SETTLED = "every wanted record is in place or missing"


def _fault(name: str, file: str, before: str, after: str, where: str, claim: str) -> Fault:
    return Fault(name, file, before, after, where if where == WORLD else f"{where}::{claim}", claim, "transfer")


TRANSFER_FAULTS = tuple(
    _fault(*fault)
    for fault in (
        (
            "a pull before its offer is refused at once",
            "offers.py",
            "early.until_s if early else now_s + self.limits.early_s",
            "now_s",
            SESSIONS,
            "test_a_pull_before_its_offer_waits_for_it",
        ),
        (
            "a block that is added is not sent to who waits for it",
            "offer.py",
            "            if (asked := self.later.pop(block.index, None)) is not None:",
            "            if (asked := self.later.get(-1)) is not None:",
            SESSIONS,
            "test_an_open_offer_is_answered_as_its_blocks_come",
        ),
        (
            "a pull waits for ever for an offer that grows",
            "pulls.py",
            "        if pull.retries >= self.limits.retries_max or now_s >= pull.give_up_s:",
            "        if pull.retries >= self.limits.retries_max:",
            SESSIONS,
            "test_a_slow_prefill_outlasts_every_retry_but_not_the_lease",
        ),
        (
            "rows of another rank are taken that are not the same on every rank",
            "identity.py",
            "if all(part.replicated for part in own.parts) else scope:",
            "if any(part.replicated for part in own.parts) else scope:",
            IDENTITY,
            "test_replicated_rows_cross_between_unequal_ranks",
        ),
        (
            "a message is put together in memory that another is sent from",
            "kept.py",
            "                buffer.append(buffer.pop())",
            "                len(buffer)",
            KEPT,
            "test_what_is_sent_is_not_written_over",
        ),
        (
            "an ack of another peer counts",
            "offers.py",
            "        if found.owner not in (None, who):",
            "        if not isinstance(message, wire.Ack) and found.owner not in (None, who):",
            WORLD,
            HELD,
        ),
        (
            "a lease never ends",
            "offers.py",
            "[o for o in self._offers.values() if o.expires_s <= now_s]",
            "list[Offer]()",
            WORLD,
            "quiescent_means_nothing_in_flight",
        ),
        (
            "a reset forgets the transfers",
            "offers.py",
            "self._end(o, wire.Outcome.RESET)]",
            "()]",
            ENDS,
            "test_a_reset_ends_everything_on_both_sides",
        ),
        (
            "an older pull counts",
            "offers.py",
            "            case wire.Pull() if message.epoch > found.epoch:",
            "            case wire.Pull() if message.epoch:",
            SESSIONS,
            "test_repeated_and_late_messages_change_nothing",
        ),
        (
            "a record that is not settled is forgotten",
            "pull.py",
            "                counters.postponed_records += 1\n                continue",
            "                placed = False",
            SESSIONS,
            "test_a_block_with_another_owner_is_missing_and_a_busy_one_asked_for_again",
        ),
        (
            "a record is handed out twice",
            "pull.py",
            "            del self.outstanding[place]\n            if placed:",
            "            if placed:",
            WORLD,
            "installed_once_per_transfer",
        ),
        (
            "a record from somebody else is taken",
            "pulls.py",
            "                if pull.peer != peer:",
            "                if False:",
            SESSIONS,
            "test_a_damaged_record_is_asked_for_again",
        ),
        (
            "a record that is not there is not reported",
            "pull.py",
            "            self.missing.append(Missing(*place, Reason.ABSENT))\n",
            "",
            WORLD,
            SETTLED,
        ),
    )
)
