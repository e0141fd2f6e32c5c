"""What adversarial tests and a full reading found in the core, by example: each of these failed before."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from cache_manager.leases import Leases
from canary import canary_rows
from job_house import JobHouse
from origins_of import origins_of
from waiting import until_it_waits

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError
from cache_manager.keys import Namespace
from cache_manager.regions.view import RegionView
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store

SPEC = AuxBlockDataSpec("routing", (3, 2), "uint8", 4)
OPTIONAL = AuxBlockDataSpec("logprobs", (2,), "float32", 4)


@pytest.fixture
def aux():
    with AuxBlocks(
        [SPEC, OPTIONAL],
        device_blocks=6,
        host_blocks=3,
        namespace=Namespace("m", 1),
        store=open_store("memory:?capacity=1MiB"),
        required=["routing"],
        steps_max=4,
    ) as blocks:
        yield blocks


def fill(aux: AuxBlocks, block: int, who: str, *specs: AuxBlockDataSpec) -> None:
    with aux.step(range(block * 4, block * 4 + 4)) as step:
        for spec in specs or (SPEC,):
            step.write(spec.name, rows_of(spec, who))


def rows_of(spec: AuxBlockDataSpec, who: str) -> np.ndarray:
    return canary_rows(spec, [(who, i) for i in range(4)])


def holds(aux: AuxBlocks, block: int, who: str) -> bool:
    read = aux.read("routing", [block])
    return bool(read.valid.all()) and np.array_equal(read.values, rows_of(SPEC, who))


# ---------------------------------------------------------------- finalisers and signal handlers


class Request:
    """Gives its blocks back when it is collected, which may be in the middle of anything."""

    def __init__(self, aux: AuxBlocks, owner: str, block: int) -> None:
        self.aux, self.owner, self.itself = aux, owner, self  # a cycle: only the collector ends it
        aux.allocate([block], owner)

    def __del__(self) -> None:
        self.aux.free(self.owner)


def test_a_request_that_is_collected_inside_a_call_frees_its_blocks_after_it(aux, monkeypatch) -> None:
    """Goal: no deadlock, nothing half done. Method: collect while leases are passed on, under the lock, as GC may."""
    Request(aux, "lost", 5)
    gc.collect()
    assert not aux.holds("lost", 5)
    aux.allocate([0], "a")
    fill(aux, 0, "a")
    Request(aux, "lost", 4)
    pass_on, seen = Leases.pass_on, []

    def collecting(self, *arguments) -> None:
        gc.collect()
        seen.append(aux._device.leases.holds("lost", 4))
        pass_on(self, *arguments)

    monkeypatch.setattr(Leases, "pass_on", collecting)
    aux.swap_out([(0, 1)])
    assert seen == [True], "inside the call nothing has changed under it"
    assert not aux.holds("lost", 4)
    assert aux.holds("a", 1, "host")
    aux.assert_consistent()


def test_collections_at_every_allocation_deadlock_nobody(aux) -> None:
    """Goal: the same wherever the collector runs. Method: the lowest threshold, requests that are lost all the time."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for n in range(60):
            Request(aux, f"lost {n}", 5) if aux.available([5])[0] else None
            aux.allocate([0], "a")
            fill(aux, 0, "a")
            aux.swap_out([(0, 0)])
            aux.swap_in([(0, 1)])
            aux.free("a")
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert not any(aux.holds(f"lost {n}", 5) for n in range(60))
    aux.assert_consistent()


def test_a_signal_handler_may_look_and_give_up_and_nothing_else(aux, monkeypatch) -> None:
    """Goal: no deadlock with oneself. Method: a signal under the lock, whose handler counts, frees, aborts, reads."""
    aux.allocate([0, 1], "a")
    aux.allocate([2], "b")
    fill(aux, 0, "a")
    step = aux.begin_step([4])
    seen: list[object] = []

    def handler(*_: object) -> None:
        seen.append(aux.counters.rows_committed)
        aux.free("b")
        step.abort()
        try:
            aux.allocate([3], "c")
        except BlockBusyError as error:
            seen.append(str(error))

    pass_on = Leases.pass_on

    def interrupted(self, *arguments) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        pass_on(self, *arguments)

    monkeypatch.setattr(Leases, "pass_on", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        aux.swap_out([(0, 1)])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen[0] == 4
    assert "a finaliser or a signal handler" in str(seen[1])
    assert not aux.holds("b", 2)
    assert (aux.in_flight, aux.counters.steps_aborted) == (0, 1)
    aux.assert_consistent()


def test_another_thread_is_no_finaliser_and_waits(aux, monkeypatch) -> None:
    """Goal: the lock still keeps threads apart. Method: a thread asks while a call holds the lock."""
    aux.allocate([0], "a")
    fill(aux, 0, "a")
    pass_on, ended = Leases.pass_on, []
    thread = threading.Thread(target=lambda: (aux.allocate([3], "c"), ended.append(True)), daemon=True)

    def beside(self, *arguments) -> None:
        thread.start()
        assert until_it_waits(thread)
        pass_on(self, *arguments)

    monkeypatch.setattr(Leases, "pass_on", beside)
    aux.swap_out([(0, 1)])
    thread.join(60)
    assert ended == [True]
    assert aux.holds("c", 3)


# ---------------------------------------------------------------- what is dropped


def test_a_step_that_is_dropped_is_aborted_and_counted(aux) -> None:
    """Goal: losing one is not fatal. Method: drop more steps than may be in flight."""
    aux.allocate([0], "a")
    for _ in range(9):
        aux.begin_step([0]).write("routing", rows_of(SPEC, "x")[:1])
    gc.collect()
    assert (aux.in_flight, aux.counters.steps_dropped) == (0, 9)
    fill(aux, 0, "a")
    assert holds(aux, 0, "a")


def test_a_step_in_place_that_is_dropped_can_be_found_and_ended(aux) -> None:
    """Goal: nobody tells the device. Method: drop the handle; the fence stays until the embedder ends the step."""
    aux.allocate([0], "a")
    aux.begin_step([0], in_place=True)
    gc.collect()
    aux.free("a")
    with pytest.raises(BlockBusyError):
        aux.allocate([0], "b")
    (step,) = aux.steps
    assert step.in_place
    step.abort()
    assert aux.steps == []
    aux.allocate([0], "b")


def test_a_move_that_is_dropped_is_aborted_and_a_listed_one_can_be(aux) -> None:
    aux.allocate([0], "a")
    fill(aux, 0, "a")
    aux.begin_swap_out([(0, 1)])
    gc.collect()
    assert (aux.in_flight, aux.counters.moves_aborted) == (0, 1)
    kept = aux.begin_swap_out([(0, 1)])
    assert aux.moves == [kept]
    aux.moves[0].abort()
    assert (aux.moves, aux.holds("a", 0)) == ([], True)
    assert holds(aux, 0, "a")


def test_a_job_that_is_dropped_lands_when_somebody_polls_and_a_listed_one_can_be_cancelled() -> None:
    house = JobHouse()
    house.fill(0, "a")
    house.aux.begin_persist({house.key: 0}, owner="a")
    gc.collect()
    house.settle()
    (job,) = house.aux.jobs
    job.cancel()
    house.gate.open()
    assert house.aux.wait(60.0)
    assert house.aux.poll() == [job]
    assert (house.aux.in_flight, house.aux.counters.jobs_cancelled) == (0, 1)
    house.aux.close()


def test_everything_in_flight_can_be_listed_and_ended_before_a_close(aux) -> None:
    """Goal: an embedder that has lost its handles can go. Method: one of each kind, ended by the lists alone."""
    aux.allocate([0, 1, 2], "a")
    for block in (0, 1):
        fill(aux, block, "a", SPEC, OPTIONAL)
    handles = (
        aux.begin_step([8]),
        aux.begin_swap_out([(0, 1)], leases="stay"),
        aux.export({aux.keys.key(None, [1]): 1}, owner="a"),
    )
    with pytest.raises(BlockStateError, match="nothing in flight"):
        aux.close()
    assert aux.in_flight == len(handles)
    for handle in (*aux.steps, *aux.moves):
        handle.abort()
    assert aux.in_flight == 0


# ---------------------------------------------------------------- which life a key is bound to


@pytest.mark.parametrize("say", ["owner", "generations"])
def test_a_block_that_has_become_somebody_else_s_is_stored_and_filled_for_nobody(aux, say: str) -> None:
    """Goal: a key is bound to a life. Method: decide for A's block, free it, let B have it and write, then ask."""
    aux.allocate([0], "A")
    fill(aux, 0, "A")
    life = {"owner": "A"} if say == "owner" else {"generations": aux.generations([0])}
    aux.free("A")
    aux.allocate([0], "B")
    fill(aux, 0, "B")
    key = aux.keys.key(None, [1])
    if say == "owner":
        for call in (aux.persist, aux.restore, aux.export):
            with pytest.raises(BlockStateError, match="one that 'A' holds"):
                call({key: 0}, **life)
    else:
        assert aux.persist({key: 0}, **life) == {key: 0}
        assert aux.restore({key: 0}, **life) == {key: False}
        assert aux.export({key: 0}, **life).records == [None]
        assert aux.counters.stale_blocks == 3
    assert aux.stored([key]) == [False]
    assert holds(aux, 0, "B")
    for call in (aux.persist, aux.restore, aux.export):
        with pytest.raises(InvalidInputError, match="to say for which life, got neither"):
            call({key: 0})


def test_an_export_s_rows_are_those_of_its_key_whatever_comes_after_it(aux) -> None:
    """Goal: export pins. Method: export, reset, try to compute the block again in place, and only then seal."""
    aux.allocate([0], "a")
    fill(aux, 0, "first", SPEC, OPTIONAL)
    key = aux.keys.key(None, [1])
    with aux.export({key: 0}, owner="a") as export:
        before = bytes(export.records[0].payload)
        aux.reset(weights_version=2)
        with pytest.raises(BlockBusyError):
            fill(aux, 0, "second", SPEC, OPTIONAL)
        assert bytes(export.records[0].payload) == before
        assert export.records[0].seal().generation == aux.generations([0])[0] - 1
    fill(aux, 0, "second", SPEC, OPTIONAL)
    assert holds(aux, 0, "second")


def test_optional_rows_that_are_completed_later_are_stored(aux) -> None:
    """Goal: more valid rows of one origin replace fewer. Method: persist, an optional spec by installation, again."""
    aux.allocate([0, 1], "a")
    fill(aux, 0, "a", SPEC, OPTIONAL)
    key = aux.keys.key(None, [1])
    with aux.export({key: 0}, owner="a") as export:
        header, payload = export.records[0].seal(), bytes(export.records[0].payload)
    words = len(header.valid) // 2
    part = {name: getattr(header, name) for name in header.__struct_fields__}
    only = type(header)(**{**part, "valid": header.valid[:words] + bytes(words)})
    life = int(aux.generations([1])[0])
    aux.bind_origin(1, life, header.origin, 4)
    assert aux.install(1, life, only, payload) == 4
    assert aux.persist({key: 1}, owner="a") == {key: header.origin}
    assert aux.install(1, life, header, payload) == 4
    assert aux.persist({key: 1}, owner="a") == {key: header.origin}
    aux.allocate([2], "b")
    assert aux.restore({key: 2}, owner="b") == {key: True}
    assert aux.read("logprobs", [2]).valid.all()
    assert np.array_equal(aux.read("logprobs", [2]).values, rows_of(OPTIONAL, "a"))


def test_what_is_written_after_a_block_was_stored_is_another_computation_s(aux) -> None:
    """Goal: one origin, one content. Method: persist, write the optional rows by a further step, persist again."""
    aux.allocate([0, 1], "a")
    fill(aux, 0, "a")
    key, first = aux.keys.key(None, [1]), origins_of(aux, [0])[0]
    assert aux.persist({key: 0}, owner="a") == {key: first}
    fill(aux, 0, "b", SPEC, OPTIONAL)
    assert origins_of(aux, [0]) != [first]
    assert aux.persist({key: 0}, owner="a") == {key: first}, "the whole record that is there stays, and is named"
    assert aux.restore({key: 1}, owner="a") == {key: True}
    assert holds(aux, 1, "a")


# ---------------------------------------------------------------- the rest


def test_a_reset_reaches_readers_in_other_processes() -> None:
    """Goal: after_reset_nothing_older_is_readable, by a view too. Method: a shared region, a view, a reset."""
    with AuxBlocks([SPEC], device_blocks=2, namespace=Namespace("m", 1), memory="shared") as aux:
        aux.allocate([0], "a")
        fill(aux, 0, "a")
        with RegionView(aux.region("device").name) as view:
            assert view.read("routing", [0], generations=aux.generations([0])).valid.all()
            aux.reset(weights_version=2)
            fill(aux, 0, "b")
            lives = aux.generations([0])
            assert not view.read("routing", [0], generations=lives).valid.any(), "of a namespace it has not heard of"
            view.follow(aux.namespace.fingerprint)
            assert np.array_equal(view.read("routing", [0], generations=lives).values, rows_of(SPEC, "b"))


def test_rejected_rows_are_not_late_ones(aux) -> None:
    aux.allocate([0], "a")
    step = aux.begin_step(range(4))
    step.write("routing", rows_of(SPEC, "a"))
    step.commit(np.array([True, False, True, False]))
    counters = aux.counters
    assert (counters.rows_committed, counters.rows_rejected, counters.late_writes_dropped) == (2, 2, 0)


@pytest.mark.parametrize("value", [-1, 256])
def test_a_value_that_does_not_fit_is_an_error_and_never_another_value(aux, value: int) -> None:
    """Goal: int8 -1 is not 255. Method: wider and signed rows with one value outside."""
    aux.allocate([0], "a")
    step = aux.begin_step(range(4))
    rows = np.zeros((4, 3, 2), np.int8 if value < 0 else np.int16)
    rows[1, 1, 1] = value
    with pytest.raises(InvalidInputError, match="routing"):
        step.write("routing", rows)
    step.commit()
    assert not aux.read("routing", [0]).valid.any()


@pytest.mark.parametrize("memory", ["heap", "shared"])
def test_memory_that_the_process_may_not_have_is_a_typed_error(memory: str) -> None:
    """Goal: no bare OSError. Method: a child that limits its address space and then asks for too much."""
    script = f"""
import resource, sys
from cache_manager.blocks import AuxBlocks
from cache_manager.errors import KVRouteError
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    AuxBlocks([AuxBlockDataSpec("routing", (48, 8), "uint8", 64)], device_blocks=8192,
              namespace=Namespace("m", 1), memory={memory!r})
except KVRouteError as error:
    print(type(error).__name__, error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Error" in ran.stdout
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 0
