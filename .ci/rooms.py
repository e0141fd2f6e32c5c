"""The rooms of a row's way: the modules and functions that a profile of one block enters, printed and counted.

A function *has* the row (``*``) if, when it returns, a buffer with the row's bytes has a name there, or lies in a value
that has one. The others decide or look something up. What stands inside a function counts with it.

Run at the root of a checkout: ``PYTHONPATH=. python .ci/rooms.py``.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec
import numpy as np

import kvroute
from cache_manager.publish import Copies, Rows
from cache_manager.record import OfferedRecord
from kvroute.connector.crossing import Crossing, link_of

ROOT: Final = Path(kvroute.__file__).parents[1]
PACKAGES: Final = tuple(f"{ROOT}/{name}/" for name in ("cache_manager", "transfer", "kvroute"))
SPEC: Final = kvroute.AuxBlockDataSpec("routing", row_shape=(4, 2), dtype="uint8", block_tokens=4)
NAMESPACE: Final = kvroute.Namespace(model="m", weights_version=1)
ROWS: Final = np.arange(100, 132, dtype=np.uint8).reshape(4, 4, 2)
ROW: Final = ROWS[1].tobytes()
DEPTH_MAX: Final = 8
WAIT_S: Final = 0.02
TURNS_MAX: Final = 500


def has_row(value: object, depth: int = DEPTH_MAX) -> bool:
    """Whether it is a buffer with the row's bytes, or a plain value that has one."""
    if isinstance(value, (bytes, bytearray, memoryview, np.ndarray)):
        return ROW in bytes(value)
    if not depth:
        return False
    if isinstance(value, (list, tuple)):
        return any(has_row(member, depth - 1) for member in value)
    if isinstance(value, dict):
        return has_row(list(value.values()), depth)
    if isinstance(value, msgspec.Struct):
        return has_row([getattr(value, name) for name in value.__struct_fields__], depth)
    if isinstance(value, OfferedRecord):
        return has_row(value.payload, depth)
    if isinstance(value, Copies):
        return has_row(value.rows, depth)
    return isinstance(value, Rows) and has_row(value.values, depth)


class Rooms:
    """The functions that are entered while it is ``open``, by module, in the order of their first calls."""

    def __init__(self) -> None:
        self.open = False
        self._functions: dict[str, dict[str, bool]] = {}
        self._looks = threading.local()  # what a look calls is no room
        threading.setprofile(self._see)  # of threads that begin from here on
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        is_room = event in ("call", "return") and code.co_filename.startswith(PACKAGES)
        if not self.open or not is_room or getattr(self._looks, "now", False):
            return
        self._looks.now = True
        module = str(Path(code.co_filename).relative_to(ROOT))
        functions = self._functions.setdefault(module, {})
        function = code.co_qualname.split(".<locals>")[0]
        has = functions.setdefault(function, False)
        if event == "return" and not has:
            own = [value for name, value in frame.f_locals.items() if name != "self"]
            functions[function] = has_row([returned, *own])
        self._looks.now = False

    @contextmanager
    def way(self, name: str) -> Iterator[None]:
        """Print which functions the block enters, and how many."""
        self._functions = {}
        self.open = True
        try:
            yield
        finally:
            self.open = False
        entered = [len(functions) for functions in self._functions.values()]
        having = [sum(functions.values()) for functions in self._functions.values()]
        with_row = f"{len(having) - having.count(0)} and {sum(having)} of them have the row"
        print(f"{name}: {len(entered)} modules, {sum(entered)} functions; {with_row}")
        for module, functions in self._functions.items():
            names = [f"{function}*" if has else function for function, has in functions.items()]
            print(f"    {module}: {', '.join(names)}")


def write(blocks: kvroute.AuxBlocks) -> list[int]:
    """Give block 7 out and write all of its rows; its generation ``[1]``."""
    lives: list[int] = blocks.renew([7]).tolist()
    blocks.write_step(np.arange(28, 32), {"routing": ROWS})
    return lives


def check(blocks: kvroute.AuxBlocks, block: int, lives: list[int]) -> None:
    rows = blocks.read("routing", [block], generations=lives)
    assert rows.valid.all(), "a row is missing"
    assert (rows.values == ROWS).all(), "another row"


def step_to_read(rooms: Rooms) -> None:
    with kvroute.AuxBlocks([SPEC], blocks=16, namespace=NAMESPACE) as blocks, rooms.way("begin_step to read"):
        check(blocks, 7, write(blocks))


def file_and_back(rooms: Rooms, directory: str) -> None:
    store = kvroute.open_store(f"file://{directory}/store")
    with store, kvroute.AuxBlocks([SPEC], blocks=16, namespace=NAMESPACE, store=store) as blocks:
        (key,) = blocks.keys.keys([1, 2, 3, 4])
        with rooms.way("a step to the file and back to a read"):
            lives = write(blocks)
            blocks.persist({key: 7}, lives)
            lives = blocks.renew([3]).tolist()
            assert blocks.restore({key: 3}, lives)[key]
            check(blocks, 3, lives)


def crossing(rooms: Rooms, directory: str) -> None:
    with (
        kvroute.AuxBlocks([SPEC], blocks=16, namespace=NAMESPACE) as prefill,
        kvroute.AuxBlocks([SPEC], blocks=16, namespace=NAMESPACE) as decode,
    ):
        lends = Crossing(prefill, link_of(f"ipc://{directory}/lends"))
        fetches = Crossing(decode, link_of(f"ipc://{directory}/fetches"))
        (key,) = prefill.keys.keys([1, 2, 3, 4])
        transfer = secrets.token_bytes(16)
        with rooms.way("P's capture to D's read"):
            lives = write(prefill)
            lends.lender.lend(transfer, 0, {key: 7}, lives, 4)
            lives = decode.renew([3]).tolist()
            fetches.borrower.fetch(transfer, lends.address, 0, {key: 3}, lives, 4)
            turns = 0
            while not fetches.poll():
                turns += 1
                assert turns < TURNS_MAX, "nothing came"
                time.sleep(WAIT_S)
            check(decode, 3, lives)
        lends.close()
        fetches.close()


def main() -> None:
    rooms = Rooms()
    with tempfile.TemporaryDirectory() as directory:
        step_to_read(rooms)
        file_and_back(rooms, directory)
        crossing(rooms, directory)


if __name__ == "__main__":
    main()
