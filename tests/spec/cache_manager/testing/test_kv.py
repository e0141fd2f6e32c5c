"""KV as one more spec of a block's record."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
from kv import SlotKV

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import StorageError
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store
from cache_manager.testing.kv import KVBlocksContract

TOKENS = 3
ROUTING = AuxBlockDataSpec("routing", (2,), "uint8", TOKENS)


class TestSlotKV(KVBlocksContract):
    def kv(self) -> SlotKV:
        return SlotKV(4, 4, TOKENS)


def blocks_of(kv: SlotKV | None, **more) -> AuxBlocks:
    return AuxBlocks([ROUTING], blocks=4, host_blocks=4, namespace=Namespace("m", 1), kv=kv, **more)


def filled(aux: AuxBlocks, block: int) -> int:
    """Give a block out and write its rows; its generation."""
    (life,) = aux.renew([block])
    aux.write_step(np.arange(TOKENS) + TOKENS * block, {"routing": np.full((TOKENS, 2), 7, np.uint8)})
    return int(life)


def test_kv_goes_along_where_rows_cannot() -> None:
    """Goal: an engine that has its KV moved by kvroute may rely on every pair. Method: a step in flight writes the
    target, so that no row can arrive there."""
    kv = SlotKV(4, 4, TOKENS)
    with blocks_of(kv) as aux:
        filled(aux, 0)
        kv.device[0] = 5
        aux.renew([1])
        step = aux.begin_step([TOKENS])
        aux.copy([(0, 1)])
        assert (kv.device[1] == 5).all()
        step.abort()
        assert not aux.read("routing", [1]).valid.any()


def test_nothing_is_stored_where_nothing_is_required_and_nothing_is_there() -> None:
    """Goal: ``required=()`` stores KV without rows, and no record of nothing. Method: a block without a row, with KV
    and without; what comes back."""
    for kv in (SlotKV(4, 4, TOKENS), None):
        with open_store("memory:") as store, blocks_of(kv, store=store, required=()) as aux:
            key = aux.keys.key(None, [1, 2, 3])
            if kv is not None:
                kv.device[0] = 9
            assert bool(aux.persist({key: 0}, aux.renew([0]))[key]) == (kv is not None)
            assert aux.restore({key: 1}, aux.renew([1])) == {key: kv is not None}
            assert kv is None or (kv.device[1] == 9).all()
            assert not aux.read("routing", [1]).valid.any()


def test_kv_that_is_being_written_is_not_stored() -> None:
    """Goal: what is stored as whole is whole. Method: nothing is required; a block that a pass in flight writes, and
    one into which a copy is under way; then again."""
    kv = SlotKV(4, 4, TOKENS)
    with open_store("memory:") as store, blocks_of(kv, store=store, required=()) as aux:
        first, second = aux.keys.key(None, [1]), aux.keys.key(None, [2])
        lives = aux.renew([0, 1])
        answers = []
        copy = kv.copy

        def persists_meanwhile(*arguments) -> None:
            answers.append(aux.persist({first: 0, second: 1}, lives))
            copy(*arguments)

        kv.copy = persists_meanwhile
        with aux.begin_step([TOKENS]):
            assert aux.persist({second: 1}, lives[1:]) == {second: 0}
        aux.copy([(0, 1)])
        (answer,) = answers
        assert answer[first]
        assert not answer[second]
        assert aux.counters.incomplete_blocks_not_persisted == 2
        assert aux.persist({second: 1}, lives[1:])[second]


NOT_FOLLOWING = ("source never given out", "target that a pass writes")


@pytest.mark.parametrize("why", NOT_FOLLOWING)
def test_kv_of_a_pair_that_cannot_follow_is_not_stored_amid_the_copy(why: str) -> None:
    """Goal: what is stored as whole is whole, also where only KV moves. Method: nothing is required; rows of a pair
    cannot follow, and its target is persisted while its KV is copied, when what stood in the way is over; then again,
    after the copy."""
    kv = SlotKV(4, 4, TOKENS)
    with open_store("memory:") as store, blocks_of(kv, store=store, required=()) as aux:
        key = aux.keys.key(None, [1])
        (life,) = aux.renew([1]).tolist()
        if why != NOT_FOLLOWING[0]:
            aux.renew([0])
        step = aux.begin_step([TOKENS]) if why == NOT_FOLLOWING[1] else None
        answers = []
        copy = kv.copy

        def copies(*arguments) -> None:
            if step is not None:
                step.abort()
            answers.append(aux.persist({key: 1}, [life])[key])
            copy(*arguments)

        kv.copy = copies
        aux.copy([(0, 1)])
        assert answers == [0]
        assert aux.renew([1]).tolist() == [life + 1], "nothing copies into it any more"
        assert aux.persist({key: 1}, [life + 1])[key]


def test_a_copy_outlasts_the_fence_of_another_one() -> None:
    """Goal: as above. Method: of two copies into one block the second one, whose rows cannot follow, is slower."""
    kv = SlotKV(4, 4, TOKENS)
    with open_store("memory:") as store, blocks_of(kv, store=store, required=()) as aux, ThreadPoolExecutor(1) as pool:
        key = aux.keys.key(None, [1])
        life = int(aux.renew([0, 1, 2])[1])
        begun, may_end = Event(), Event()
        copy = kv.copy
        second: list[Future[None]] = []

        def copies(source: str, target: str, sources: np.ndarray, targets: np.ndarray) -> None:
            if sources[0] == 0:
                second.append(pool.submit(aux.copy, [(2, 1)]))
                assert begun.wait(30)
            else:
                begun.set()
                assert may_end.wait(30)
            copy(source, target, sources, targets)

        kv.copy = copies
        try:
            aux.copy([(0, 1)])
            assert aux.persist({key: 1}, [life]) == {key: 0}, "the second copy is under way"
        finally:
            may_end.set()
        second[0].result(30)
        assert aux.persist({key: 1}, [life])[key]


@pytest.mark.parametrize("error", [StorageError("half way"), KeyboardInterrupt("half way")], ids=repr)
def test_kv_that_was_torn_by_a_restore_has_no_name(error: BaseException) -> None:
    """Goal: rows land beside whole KV only. Method: a block's KV has a name from outside; a restore into it fails half
    way, or is interrupted, and then rows of that name come."""
    with open_store("memory:") as store, blocks_of(kv := SlotKV(4, 4, TOKENS), store=store) as aux:
        key, life = aux.keys.key(None, [1, 2, 3]), filled(aux, 0)
        (origin,) = aux.persist({key: 0}, [life]).values()
        (life,) = aux.renew([1])
        assert aux.exchange.bind_origin(1, life, origin)

        def torn(blocks: np.ndarray, _: np.ndarray) -> None:
            kv.device[blocks] = 0
            raise error

        kv.fill = torn
        with pytest.raises(type(error), match="half way"):
            aux.restore({key: 1}, [life])
        assert aux.counters.failed_blocks_not_restored == 1
        assert aux.in_flight == 0
        assert aux.exchange.origins([1])[0] not in (0, origin), "what lies there is of no computation that others know"
