"""Blocks whose rows say whose they are, for the tests of the matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from canary import canary_rows
from numpy.typing import NDArray
from stores import SMALL_NBYTES, files

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import BlockKey, Namespace
from cache_manager.ports import StorageBackend
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage.file import FileStore

TOKENS = 64
SPEC = AuxBlockDataSpec("routing", (4, 8), "uint8", TOKENS)
BLOCKS = 8


def make_aux(store: StorageBackend | None = None, spec: AuxBlockDataSpec = SPEC, **options: Any) -> AuxBlocks:
    options = {"blocks": BLOCKS, "host_blocks": 4, "namespace": Namespace("m", 1), **options}
    return AuxBlocks([spec], store=store, **options)


def rows_of(who: str, spec: AuxBlockDataSpec = SPEC) -> NDArray[Any]:
    """The rows of one block, of which no other block has any."""
    return canary_rows(spec, [(who, at) for at in range(spec.block_tokens)])


def write(aux: AuxBlocks, block: int, who: str) -> None:
    """The block is given out to ``who``, and filled."""
    spec = aux.layout.specs[0]
    aux.renew([block])
    with aux.begin_step(np.arange(block * spec.block_tokens, (block + 1) * spec.block_tokens)) as step:
        step.write(spec.name, rows_of(who, spec))


def holds_rows_of(aux: AuxBlocks, block: int, who: str) -> bool:
    found = aux.read(aux.layout.specs[0].name, [block])
    return bool(found.valid.all()) and found.values.tobytes() == rows_of(who, aux.layout.specs[0]).tobytes()


def says_nothing(aux: AuxBlocks, block: int) -> bool:
    """No row is readable, and no byte of an earlier tenant shows."""
    found = aux.read(aux.layout.specs[0].name, [block])
    return not found.valid.any() and set(found.values.tobytes()) == {0xFF}


def key(aux: AuxBlocks, number: int) -> BlockKey:
    return aux.keys.keys(list(range(number * TOKENS, number * TOKENS + aux.block_tokens)))[0]


def persist(aux: AuxBlocks, numbers: Sequence[int]) -> bool:
    """Fill and store a block for each number under its key, block ``i`` for the ``i``-th; whether all are stored."""
    for block, number in enumerate(numbers):
        write(aux, block, f"record-{number}")
    blocks = {key(aux, number): block for block, number in enumerate(numbers)}
    done = aux.persist(blocks, aux.generations(list(blocks.values())))
    aux.store.flush()
    return all(done.values())


def restored(aux: AuxBlocks, *numbers: int, block: int = BLOCKS - 1) -> list[int]:
    """Which records come back into a block where another tenant's rows lay: what is readable then is the record's rows,
    or nothing."""
    came = []
    for number in numbers:
        write(aux, block, "an earlier tenant")
        if aux.restore({key(aux, number): block}, aux.renew([block]))[key(aux, number)]:
            assert holds_rows_of(aux, block, f"record-{number}")
            came.append(number)
        else:
            assert says_nothing(aux, block)
        assert aux.in_flight == 0
        aux.assert_consistent()
    return came


@contextmanager
def stored(directory: Path, **options: Any) -> Iterator[tuple[AuxBlocks, FileStore]]:
    """Blocks over a file store in ``directory``, which counts the bytes of its files, and no others."""
    store = FileStore(directory, quota_nbytes=1 << 20, extent_nbytes=SMALL_NBYTES)
    try:
        with make_aux(store, **options) as aux:
            yield aux, store
    finally:
        store.close()


def file_nbytes(directory: Path) -> int:
    """Bytes of all extents."""
    return sum(path.stat().st_size for path in files(directory))
