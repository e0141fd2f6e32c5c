"""Asking the master without the native library: is it there, is it ready, how full is the pool; with deadlines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from http.client import HTTPConnection, HTTPException
from typing import Final, TypeVar

from cache_manager.errors import StorageError

RESPONSE_NBYTES_MAX: Final = 16 << 20
_GAUGES: Final = {
    "master_key_count": "records",
    "master_allocated_bytes": "used_nbytes",
    "master_total_capacity_bytes": "capacity_nbytes",
}
_T = TypeVar("_T")


def reach(address: tuple[str, int], timeout_s: float) -> str:
    """Connect and hang up; the local address that was used. A closed port would hold up a native set-up for long."""

    def connect() -> str:
        with socket.create_connection(address, timeout_s) as connection:
            return str(connection.getsockname()[0])

    try:
        return _in_time(connect, timeout_s)
    except OSError as error:
        raise StorageError(f"no Mooncake master at {address[0]}:{address[1]}: {str(error) or 'no answer'}") from error


def check_ready(admin: tuple[str, int], timeout_s: float) -> None:
    """:class:`StorageError` when the master says that it is not ready, or says nothing.

    A master whose admin port cannot be reached at all is left to the native client's own probe.
    """
    body = _body(admin, "/health", timeout_s)
    if body is not None and b'"service_ready":true' not in body:
        raise StorageError(f"the Mooncake master (admin {admin[0]}:{admin[1]}) is not ready")


def pool_usage(admin: tuple[str, int], timeout_s: float) -> Mapping[str, int]:
    """Objects and bytes of the whole pool, whoever stored them."""
    body = _body(admin, "/metrics", timeout_s)
    if body is None:
        raise StorageError(f"no Mooncake admin port at {admin[0]}:{admin[1]} (parameter admin)")
    pairs = (line.partition(" ") for line in body.decode(errors="replace").splitlines())
    found = {_GAUGES[name]: int(float(value)) for name, _, value in pairs if name in _GAUGES}
    if len(found) != len(_GAUGES):
        raise StorageError(f"Mooncake metrics at {admin[0]}:{admin[1]} lack {sorted({*_GAUGES.values()} - {*found})}")
    # The gauges are read one after another while others write; the pool is never more than full.
    found["used_nbytes"] = min(found["used_nbytes"], found["capacity_nbytes"])
    found["free_nbytes"] = found["capacity_nbytes"] - found["used_nbytes"]
    return found


def _body(admin: tuple[str, int], path: str, timeout_s: float) -> bytes | None:
    """What a GET brings, empty when it was refused; ``None`` when nobody listens there."""

    def get() -> bytes | None:
        connection = HTTPConnection(*admin, timeout=timeout_s)
        try:
            connection.connect()
        except OSError:
            return None
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.read(RESPONSE_NBYTES_MAX) if response.status == 200 else b""
        finally:
            connection.close()

    try:
        if timeout_s <= 0:  # a socket refuses it, and is left open
            raise TimeoutError("no time is left")
        return _in_time(get, timeout_s)
    except (OSError, HTTPException) as error:
        why = f"{type(error).__name__} {error}"
        raise StorageError(f"the Mooncake master does not answer {path} at {admin[0]}:{admin[1]}: {why}") from error


def _in_time(ask: Callable[[], _T], timeout_s: float) -> _T:
    """Its answer, or :class:`TimeoutError`, however long a name takes to resolve and however slowly bytes come."""
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except (OSError, HTTPException, ValueError) as error:
            answer.set_exception(OSError(str(error)) if isinstance(error, ValueError) else error)

    threading.Thread(target=run, name="kvroute-mooncake-ask", daemon=True).start()
    return answer.result(timeout_s)
