"""Asking the master without the native library: is it there, is it ready, how full is the pool; with deadlines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Final

from cache_manager.errors import StorageError

RESPONSE_NBYTES_MAX: Final = 16 << 20
_GAUGES: Final = {
    "master_key_count": "records",
    "master_allocated_bytes": "used_nbytes",
    "master_total_capacity_bytes": "capacity_nbytes",
}


def reach(address: tuple[str, int], timeout_s: float) -> str:
    """Connect and hang up; the local address that was used. A closed port would hold up a native set-up for long."""
    try:
        with _connected(address, timeout_s) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise StorageError(f"no Mooncake master at {address[0]}:{address[1]}: {error}") from error


def check_ready(admin: tuple[str, int], timeout_s: float) -> None:
    """:class:`StorageError` when the master says that it is not ready, or says nothing.

    A master whose admin port cannot be reached at all is left to the native client's own probe.
    """
    give_up_s = time.monotonic() + timeout_s
    try:
        connection = _connected(admin, timeout_s)
    except OSError:
        return
    with connection:
        if b'"service_ready":true' not in _body(connection, admin, "/health", give_up_s):
            raise StorageError(f"the Mooncake master (admin {admin[0]}:{admin[1]}) is not ready")


def pool_usage(admin: tuple[str, int], timeout_s: float) -> Mapping[str, int]:
    """Objects and bytes of the whole pool, whoever stored them."""
    give_up_s = time.monotonic() + timeout_s
    try:
        connection = _connected(admin, timeout_s)
    except OSError as error:
        raise StorageError(f"no Mooncake admin port at {admin[0]}:{admin[1]} (parameter admin): {error}") from error
    with connection:
        text = _body(connection, admin, "/metrics", give_up_s).decode(errors="replace")
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in _GAUGES:
            found[_GAUGES[name]] = int(float(value))
    if len(found) != len(_GAUGES):
        raise StorageError(f"Mooncake metrics at {admin[0]}:{admin[1]} lack {sorted({*_GAUGES.values()} - {*found})}")
    # The gauges are read one after another while others write; the pool is never more than full.
    found["used_nbytes"] = min(found["used_nbytes"], found["capacity_nbytes"])
    found["free_nbytes"] = found["capacity_nbytes"] - found["used_nbytes"]
    return found


def _connected(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Connect, or ``OSError`` in time, however long the name takes to resolve."""
    opening: Future[socket.socket] = Future()

    def connect() -> None:
        try:
            connection = socket.create_connection(address, timeout_s)
        except (OSError, UnicodeError) as error:
            with suppress(InvalidStateError):  # nobody waits for it any more
                opening.set_exception(OSError(str(error)))
        else:
            try:
                opening.set_result(connection)
            except InvalidStateError:
                connection.close()

    if address[0].replace(".", "").isdigit():
        return socket.create_connection(address, timeout_s)
    threading.Thread(target=connect, name="kvroute-mooncake-connect", daemon=True).start()
    try:
        return opening.result(timeout_s)
    except TimeoutError:
        if not opening.cancel():  # it came after all
            return opening.result()
        raise OSError(f"no connection within {timeout_s:.1f} s") from None


def _body(connection: socket.socket, admin: tuple[str, int], path: str, give_up_s: float) -> bytes:
    """The body of a GET; the deadline holds however slowly the bytes come."""
    response = bytearray()
    try:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {admin[0]}\r\nConnection: close\r\n\r\n".encode())
        while not _whole(response):
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or len(response) > RESPONSE_NBYTES_MAX:
                raise TimeoutError("no whole answer in time")
            connection.settimeout(left_s)
            part = connection.recv(1 << 16)
            if not part:
                break
            response += part
    except OSError as error:
        raise StorageError(f"the Mooncake master does not answer {path} at {admin[0]}:{admin[1]}: {error}") from error
    head, _, body = bytes(response).partition(b"\r\n\r\n")
    return body if head.split(b"\r\n", 1)[0].split()[1:2] == [b"200"] else b""


def _whole(response: bytearray) -> bool:
    head, end, body = response.partition(b"\r\n\r\n")
    if not end:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return False  # until the connection ends
