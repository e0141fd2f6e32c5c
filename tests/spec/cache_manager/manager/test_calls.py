"""Calls of a block manager that an exception from a signal handler ends in the middle, and calls inside other calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
from house import House
from kv import prefix_digest
from stopped import EVERY, is_stopped

from cache_manager.errors import BlockBusyError, BlockStateError, StorageError

SIZE = 4
TOKENS = {name: [100 * n + i for i in range(11)] for n, name in enumerate("abdef")} | {
    "c": [100 + i for i in range(11)]
}
"""Of each sequence; the first ones of c are those of b, of which it is a fork."""


def _house(store=None) -> House:
    """Sequences in each state: a computed in part, b and c of one partial block, d swapped out, f at a block's end."""
    house = House(store, device=24, host=8)
    house.run("a", TOKENS["a"][:7])
    house.run("b", TOKENS["b"][:6])
    house.manager.fork("b", "c")
    house.run("d", TOKENS["d"][:9])
    assert house.manager.preempt("d")
    house.run("f", TOKENS["f"][:8])
    return house


@pytest.fixture
def stored() -> Iterator[object]:
    """A store that has the blocks of e."""
    house = House(device=24)
    house.run("e", TOKENS["e"][:9])
    assert house.persist("e") == 2
    yield house.store
    house.close()


def _batch(house: House) -> tuple[np.ndarray, list[str]]:
    owners = ["a", "c", "f"]
    return np.array([house.manager.sequence(owner) for owner in owners]), owners


def _written(house: House) -> None:
    """The next token of each of the batch has KV and rows, and is not published."""
    seqs, owners = _batch(house)
    slots = house.manager.append_batch(seqs)
    for owner, slot in zip(owners, slots.tolist(), strict=True):
        done = house.manager.state(owner).computed_tokens
        house.kv.write([slot], [prefix_digest(TOKENS[owner][: done + 1])])


def _grown(house: House) -> None:
    """All tokens of a have KV, and are not published."""
    assert house.manager.append("a", 11)
    done = house.manager.state("a").computed_tokens
    slots = house.manager.slots("a", done, 11).tolist()
    house.kv.write(slots, [prefix_digest(TOKENS["a"][: at + 1]) for at in range(done, 11)])


def _nothing(house: House) -> None: ...


def _asked(house: House) -> None:
    house.manager.begin_allocate("e", TOKENS["e"])
    house.settle()


CALLS: dict[str, tuple[Callable[[House], object], Callable[[House], object]]] = {
    "allocate": (_nothing, lambda h: h.manager.allocate("new", [*TOKENS["a"][:4], 7, 8, 9, 10, 11])),
    "restore": (_nothing, lambda h: h.manager.allocate("e", TOKENS["e"])),
    "begin_allocate": (_nothing, lambda h: h.manager.begin_allocate("e", TOKENS["e"])),
    "poll": (_asked, lambda h: h.manager.poll()),
    "append": (_nothing, lambda h: h.manager.append("c", 10)),
    "append_batch": (_nothing, lambda h: h.manager.append_batch(_batch(h)[0])),
    "publish": (_grown, lambda h: h.manager.publish("a", TOKENS["a"])),
    "publish_batch": (
        _written,
        lambda h: h.manager.publish_batch(
            _batch(h)[0], [TOKENS[owner][h.manager.state(owner).computed_tokens] for owner in _batch(h)[1]]
        ),
    ),
    "fork": (_nothing, lambda h: h.manager.fork("a", "twin")),
    "free": (_nothing, lambda h: [h.manager.free(owner) for owner in "abd"]),
    "preempt": (_nothing, lambda h: h.manager.preempt("b")),
    "resume": (_nothing, lambda h: h.manager.resume("d")),
    "begin_persist": (_nothing, lambda h: h.manager.begin_persist("f")),
    "reset": (_nothing, lambda h: h.manager.reset(weights_version=1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_interrupted_ends_all_sequences_and_mixes_no_content(name: str, stored) -> None:
    """Goal: whatever a signal handler raises in the middle of a call, no key finds other tokens, each sequence has its
    own KV or has ended, and every block comes back. Method: each call, interrupted at each possible place; sequences
    that are left go on with other tokens than before, others are admitted to what is cached, and all end."""
    before, call = CALLS[name]
    at, stopped, interrupted = 1, True, 0
    while stopped:
        house = _house(stored)
        before(house)
        owners = house.manager.owners
        stopped = is_stopped(lambda: call(house), at)  # noqa: B023
        house.manager.assert_consistent()  # the next call: it begins anew
        if house.manager.counters.interrupted_calls:
            interrupted += 1
            assert house.manager.owners == frozenset()
            assert house.manager.in_flight == 0
            assert house.manager.allocate("first", [*TOKENS["a"][:4], 1], restore=False).cached_tokens == 0
            house.manager.free("first")
        elif name not in ("free", "allocate", "restore", "begin_allocate", "fork"):
            assert house.manager.owners == owners
        if name == "poll" and "e" in house.manager.owners:
            assert house.manager.poll().keys() <= {"e"}
            assert house.manager.append("e", 9), "it does not wait for the store any more"
            house.manager.free("e")
        _goes_on(house, f"{name}, interrupted at place {at}")
        at += EVERY
    assert interrupted, "it was never interrupted"


def _goes_on(house: House, when: str) -> None:
    manager = house.manager
    tokens = {owner: TOKENS[{"new": "a", "twin": "a"}.get(owner, owner)] for owner in manager.owners}
    house.settle()
    manager.poll()
    for owner in sorted(manager.owners):
        assert manager.resume(owner), when
        done = manager.state(owner).computed_tokens
        assert house.has_kv_of(owner, tokens[owner][:done]), when
        others = [*tokens[owner][:done], *(1000 + ord(owner[0]) + i for i in range(6))]
        assert manager.append(owner, len(others)), when
        house.compute(owner, others)
        tokens[owner] = others
    for owner in manager.owners:
        assert house.has_kv_of(owner, tokens[owner]), when
        manager.free(owner)
    for n, prompt in enumerate((*TOKENS.values(), *tokens.values())):
        assert manager.allocate(f"again {n}", [*prompt, 1]) is not None, when
        done = manager.state(f"again {n}").computed_tokens
        assert house.has_kv_of(f"again {n}", prompt[:done]), when
        manager.free(f"again {n}")
    house.close()


CHANGES = {
    "free": lambda manager: manager.free("a"),
    "append_batch": lambda manager: manager.append_batch([0]),
}
LOOKS = {
    "free_device_blocks": lambda manager: manager.free_device_blocks,
    "free_host_blocks": lambda manager: manager.free_host_blocks,
    "in_flight": lambda manager: manager.in_flight,
    "owners": lambda manager: manager.owners,
    "sequence": lambda manager: manager.sequence("a"),
    "table": lambda manager: manager.table("a"),
    "state": lambda manager: manager.state("a"),
    "keys": lambda manager: manager.keys("a", [1]),
    "read": lambda manager: manager.read("routing", "a", 0, 1),
    "slots": lambda manager: manager.slots("a", 0, 1),
    "hold": lambda manager: manager.hold("a", "somebody"),
    "release": lambda manager: manager.release("somebody"),
}


def test_a_call_inside_another_is_refused(monkeypatch) -> None:
    """Goal: a finaliser or a signal handler finds no manager half done. Method: each call from within a copy of KV."""
    house, seen = House(device=24, host=8), []
    house.run("a", TOKENS["a"])
    copy = house.kv.copy

    def calls(*given: object) -> None:
        for name, call in {**CHANGES, **LOOKS}.items():
            with pytest.raises(BlockBusyError, match="manager: wanted a call while no other one of this thread runs"):
                call(house.manager)
            seen.append(name)
        copy(*given)

    monkeypatch.setattr(house.kv, "copy", calls)
    assert house.manager.preempt("a")
    assert seen == [*CHANGES, *LOOKS]
    assert house.manager.owners == {"a"}
    house.close()


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_after_an_interrupted_call_nothing_that_has_ended_is_seen(look, monkeypatch) -> None:
    """Goal: no look, hold or release goes by what an interrupted call has left. Method: each as the next call."""
    house = House(device=24, host=8)
    house.run("a", TOKENS["a"])
    with monkeypatch.context() as within:
        within.setattr(house.aux, "renew", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            house.manager.allocate("b", [1])
    with suppress(BlockStateError):  # the sequence has ended
        look(house.manager)
    assert house.manager.counters.interrupted_calls == 1
    assert house.manager.owners == frozenset()
    assert house.manager.free_device_blocks == 24
    house.close()


@pytest.mark.parametrize("take_in", [lambda manager: manager.poll() == {}, lambda manager: manager.drain(0)])
def test_after_an_interrupted_call_nothing_comes_to_what_has_ended(take_in, stored, monkeypatch) -> None:
    """Goal: what the store brings to sequences that an interrupted call has ended is nobody's, and is not counted.
    Method: a restore that is done and not collected; the manager is interrupted, and asked what has come."""
    house = House(stored, device=24, host=8)
    _asked(house)
    with monkeypatch.context() as within:
        within.setattr(house.aux, "renew", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            house.manager.allocate("b", [1])
    assert take_in(house.manager)
    assert house.manager.counters.interrupted_calls == 1
    assert house.manager.counters.restored_tokens == 0
    assert house.manager.owners == frozenset()
    house.close()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_inside_one_of_the_rows_is_refused_and_changes_nothing(name: str, stored, monkeypatch) -> None:
    """Goal: a refused call loses no block, and tried again it gives out no block of an older life. Method: each call
    from within a persist of the rows, by the same thread; then again, and sequences go on and end."""
    before, call = CALLS[name]
    house = _house(stored)
    before(house)
    (key,), blocks = house.manager.keys("f", TOKENS["f"][:4]), house.manager.table("f")[:1]
    state, lives = house.state(), house.aux.generations(range(house.aux.device_blocks))
    refused: list[BlockBusyError] = []

    def calls(*_: object) -> None:
        try:
            call(house)
        except BlockBusyError as error:
            refused.append(error)

    with monkeypatch.context() as within:
        within.setattr(house.kv, "take", calls)
        house.aux.persist({key: blocks[0]}, house.aux.generations(blocks))
    assert bool(refused) == (name not in {"publish", "publish_batch", "free", "begin_persist"}), "these ask for none"
    if refused:
        assert house.state() == state
        house.manager.assert_consistent()
        call(house)
    had = {owner: table for owner, (table, _) in state[0].items()}
    for owner in house.manager.owners:
        fresh = [block for block in house.manager.table(owner) if block not in had.get(owner, [])]
        if not house.manager.state(owner).is_swapped and owner not in ("twin", "new"):  # these share older blocks
            assert (house.aux.generations(fresh) > lives[fresh]).all(), "a block of an older life"
    _goes_on(house, f"{name}, refused first")


def test_a_refused_call_costs_nothing_that_is_cached(monkeypatch) -> None:
    """Goal: only an interrupted call ends sequences. Method: a call that is refused, and one whose store fails;
    what was cached is found."""
    house = House(device=24)
    house.run("a", TOKENS["a"][:8])
    house.manager.free("a")
    with pytest.raises(Exception, match="an owner with a sequence"):
        house.manager.append("nobody", 3)
    monkeypatch.setattr(house.aux, "restore", lambda *_: (_ for _ in ()).throw(StorageError("no")))
    assert house.run("b", [*TOKENS["a"][:8], 1, 2, 3, 4, 5]) == 8
    assert house.manager.counters.interrupted_calls == 0
    house.close()
