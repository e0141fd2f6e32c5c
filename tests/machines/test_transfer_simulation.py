"""Prefill, decode and the links between them, under every fault at once, from seeds.

``KVROUTE_SIMULATION_STEPS`` says how long (a million at night), ``KVROUTE_SIMULATION_SEED`` replays one run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from budget import scaled
from transfer_world import World

import transfer.messages
from transfer.link import Arrival
from transfer.testing.loopback import Faults, Network

ENOUGH_STEPS = 72_000
"""For everything to have happened."""

STEPS = int(os.environ.get("KVROUTE_SIMULATION_STEPS", scaled(ENOUGH_STEPS)))
STEPS_A_RUN = 40
SEED = os.environ.get("KVROUTE_SIMULATION_SEED")


@pytest.fixture(scope="module", autouse=True)
def small_payloads_alone() -> Iterator[None]:
    """Small KV, too, is sent from where it lies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer.messages, "JOINED_NBYTES_MAX", 28)
        yield


def seeds() -> range:
    return range(int(SEED), int(SEED) + 1) if SEED else range(max(1, STEPS // STEPS_A_RUN))


@pytest.mark.timeout(0 if STEPS > 200_000 else 900)
def test_every_claim_holds_under_every_fault() -> None:
    """Goal: all invariants of transfers hold, whatever fails and when. Method: seeded runs in virtual time; every claim
    is checked after every step, and at the end of each run everything has come back. Then: each kind of fault and each
    way to go on and to end really happened."""
    happened: Counter[str] = Counter()
    for seed in seeds():
        world = World(seed)
        world.run(STEPS_A_RUN)
        happened += world.happened + world.network.happened
        happened += Counter({f"P {k}": v for k, v in _counts(world.prefill.session.counters).items()})
        happened += Counter({f"D {k}": v for k, v in _counts(world.decode.session.counters).items()})
    print(dict(sorted(happened.items())))
    if SEED or STEPS < ENOUGH_STEPS:
        return
    missed = [name for name in EXPECTED if not happened[name]]
    assert not missed, f"never happened: {missed}"


def test_a_seed_is_a_run() -> None:
    """Goal: a failure can be replayed. Method: the same seed twice gives the same history, another seed another."""

    def history(seed: int) -> tuple[object, ...]:
        world = World(seed)
        world.run(STEPS_A_RUN)
        return (
            world.now_s,
            world.happened,
            world.network.happened,
            world.prefill.session.counters,
            world.decode.session.counters,
        )

    assert history(5) == history(5)
    assert history(5) != history(6)


def test_a_buffer_is_read_when_it_is_delivered() -> None:
    """Goal: a sender that changes a buffer too early is detected by the simulation."""
    network = Network(1, Faults(), clock=lambda: 0.0, queue_max=9, tap=lambda *_: None)
    a, b, buffer = network.endpoint("a"), network.endpoint("b"), bytearray(b"before")
    assert a.send(b.name, b"c", [buffer])
    buffer[:] = b"after!"
    (arrival,) = b.poll()
    assert isinstance(arrival, Arrival)
    assert arrival.bulk[0] == b"after!"


def _counts(counters: object) -> dict[str, int]:
    return {name: value for name in counters.__slots__ if (value := getattr(counters, name))}


EXPECTED = (
    *(
        "drop",
        "duplicate",
        "delay",
        "reorder",
        "truncate",
        "flip",
        "full",
        "crash",
        "lost",
        "forged",
        "grown",
        "sealed",
    ),
    *("crash P", "crash D", "reset P", "reset D", "P table full", "D table full", "P bad message", "D bad message"),
    *("released acked", "released aborted", "released expired", "released reset", "installed", "stale"),
    *("pull done", "pull gone", "pull timeout", "pull refused", "pull aborted", "pull reset", "complete pull"),
    *("P late_messages", "P foreign_messages", "P stale_messages", "P unknown_transfers"),
    *("P early_pulls", "P refused_pulls", "P records_absent", "P sends_refused", "D told_later"),
    *("D corrupt_records", "D duplicate_records", "D foreign_messages", "D stale_messages"),
    *("D postponed_records", "D sends_refused", "D retries", "D records_stale", "D refusals"),
)
