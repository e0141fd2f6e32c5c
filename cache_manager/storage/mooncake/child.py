"""The native client's own process: ``python -m cache_manager.storage.mooncake.child SOCKET_FD PARENT_PID [ARENA_FD]``.

The native library ends the process that misuses it, holds the interpreter's lock for seconds in set-up and close, hangs
after ``fork`` and has no deadlines. Here it may: the store that started this process waits with a deadline, kills it
and starts another. This is the only module that imports mooncake.

A client either makes calls or lends memory. One that makes calls just ends: its native close would take a second, and
be a crash beside a call. One that lends memory hands it back first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from typing import Any, Final, NoReturn

from cache_manager.child import Parent
from cache_manager.storage.arena import CALLS_MAX
from cache_manager.storage.mooncake import wire

LOCAL_BUFFER_NBYTES: Final = 16 << 20


class Child:
    """Answers requests from one socket until it is told to close or the other end is gone."""

    def __init__(self, parent: Parent, arena_fd: int) -> None:
        self._parent = parent
        self._arena_fd = arena_fd
        self._receiving = threading.Lock()
        self._store: Any = None  # makes calls
        self._lender: Any = None  # or lends memory
        self._memory: mmap.mmap | None = None
        self._address = 0

    def serve(self) -> NoReturn:
        """Threads take turns at the socket: the one that receives a call makes it, and the next one receives."""
        for _ in range(CALLS_MAX):
            threading.Thread(target=self._take_turns, daemon=True).start()
        self._take_turns()

    def _take_turns(self) -> NoReturn:
        while True:
            with self._receiving:
                body = self._parent.receive()
                if body is None:
                    self._close()
                    os._exit(0)
                asked = wire.decode_asked(body)
                if isinstance(asked.request, wire.SetUp | wire.Close):  # nothing else is received meanwhile
                    self._answer(asked)
                    continue
            self._answer(asked)

    def _answer(self, asked: wire.Asked) -> None:
        try:
            answer = wire.Answer(asked.number, self._codes(asked.request))
        except Exception as error:  # noqa: BLE001 - this process's loop edge: the asker gets the reason
            answer = wire.Answer(asked.number, [], f"{type(error).__name__}: {error}")
        self._parent.send(wire.encode(answer))
        if isinstance(asked.request, wire.Close):
            os._exit(0)

    def _codes(self, request: wire.Request) -> list[int]:
        match request:
            case wire.SetUp():
                return [self._set_up(request)]
            case wire.Close():
                return [self._close()]
        store = self._store
        if store is None:
            raise AssertionError("a call before set-up")
        match request:
            case wire.Put():
                return self._put(request)
            case wire.Head(names, offsets, nbytes):  # a range of every object
                self._check(request)
                targets, zeros = [self._address + at for at in offsets], [[[0]] for _ in names]
                counts = [[[count]] for count in nbytes]
                found = store.get_into_ranges(targets, [[name] for name in names], zeros, zeros, counts)
                return [codes[0][0] for codes in found]
            case wire.Get(names, offsets, nbytes):
                self._check(request)
                return list(store.batch_get_into(names, [self._address + at for at in offsets], nbytes))
            case wire.Exist(names):
                return list(store.batch_is_exist(names))
            case wire.Remove(names):
                return list(store.batch_remove(names, True))

    def _set_up(self, request: wire.SetUp) -> int:
        from mooncake.store import MooncakeDistributedStore

        if not request.master or self._store is not None or self._lender is not None:
            raise AssertionError("set up once, with a master")
        store = MooncakeDistributedStore()
        code = store.setup(
            request.host,
            "P2PHANDSHAKE",
            request.segment_nbytes,
            LOCAL_BUFFER_NBYTES,
            request.protocol,
            request.devices,
            request.master,
        )
        if code == 0 and request.arena_nbytes:
            self._memory = mmap.mmap(self._arena_fd, request.arena_nbytes)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            code = store.register_buffer(self._address, request.arena_nbytes)
        if code:
            store.close()
        elif request.segment_nbytes:
            self._lender = store
        else:
            self._store = store
        return int(code)

    def _put(self, put: wire.Put) -> list[int]:
        """In sessions: a plain put answers 0 for a name that exists, as if it had stored these bytes."""
        from mooncake.store import ReplicateConfig

        self._check(put)
        assert len(set(put.names)) == len(put.names)  # of two equal names the native side would store either
        config = ReplicateConfig()
        if put.groups:
            assert len(put.groups) == len(put.names)
            config.group_ids = put.groups
        codes = list(self._store.batch_put_session_start(put.names, put.nbytes, config))
        begun = [i for i, code in enumerate(codes) if code == 0]
        if not begun:
            return codes
        for i in begun:
            codes[i] = wire.LOST
        try:
            moved = self._store.batch_put_from_multi_buffer_ranges(
                [put.names[i] for i in begun],
                [[self._address + put.offsets[i]] for i in begun],
                [[put.nbytes[i]] for i in begun],
                [[0] for _ in begun],
            )
            for i, count in zip(begun, moved, strict=True):
                codes[i] = 0 if count == put.nbytes[i] else min(count, wire.LOST)
            whole = [i for i in begun if codes[i] == 0]
            ended = self._store.batch_put_session_end([put.names[i] for i in whole]) if whole else []
            for i, code in zip(whole, ended, strict=True):
                codes[i] = code
        finally:
            if left := [put.names[i] for i in begun if codes[i] != 0]:  # else nobody could store them for a while
                self._store.batch_put_session_revoke(left)
        return codes

    def _check(self, call: wire.Get) -> None:
        """What the native side does not check, and would crash on or answer with 0."""
        assert self._memory is not None
        assert len(call.names) == len(call.offsets) == len(call.nbytes)
        ranges = zip(call.offsets, call.nbytes, strict=True)
        assert all(at >= 0 and n > 0 and at + n <= len(self._memory) for at, n in ranges)

    def _close(self) -> int:
        return int(self._lender.close()) if self._lender is not None else 0


if __name__ == "__main__":
    Child(Parent(*map(int, sys.argv[1:3])), int(sys.argv[-1])).serve()
