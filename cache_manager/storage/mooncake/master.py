"""Asking the master without the native library: is it there, is it ready, how full is the pool.

A socket's limit is for each of its calls; what bounds the whole is the deadline of the process that asks.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from typing import Final

from cache_manager.errors import StorageError

ASK_S: Final = 2.0
RESPONSE_NBYTES_MAX: Final = 16 << 20
_GAUGES: Final = {
    "master_key_count": "records",
    "master_allocated_bytes": "used_nbytes",
    "master_total_capacity_bytes": "capacity_nbytes",
}


def reach(address: tuple[str, int]) -> str:
    """Connect and hang up; the local address that was used. A closed port would hold up a native set-up for long."""
    try:
        with socket.create_connection(address, ASK_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise StorageError(f"no Mooncake master at {address[0]}:{address[1]}: {error}") from error


def check_ready(admin: tuple[str, int]) -> None:
    """:class:`StorageError` when the master says that it is not ready, or says nothing.

    A master whose admin port cannot be reached at all is left to the native client's own probe.
    """
    body = _body(admin, "/health")
    if body is not None and b'"service_ready":true' not in body:
        raise StorageError(f"the Mooncake master (admin {admin[0]}:{admin[1]}) is not ready")


def pool_usage(admin: tuple[str, int]) -> Mapping[str, int]:
    """Objects and bytes of the whole pool, those of all clients."""
    body = _body(admin, "/metrics")
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


def _body(admin: tuple[str, int], path: str) -> bytes | None:
    """What a GET brings, empty when it was refused; ``None`` when nobody listens there."""
    connection = HTTPConnection(*admin, timeout=ASK_S)
    try:
        connection.connect()
    except OSError:
        return None
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read(RESPONSE_NBYTES_MAX) if response.status == 200 else b""
    except (OSError, HTTPException, ValueError) as error:
        why = f"{type(error).__name__} {error}"
        raise StorageError(f"the Mooncake master does not answer {path} at {admin[0]}:{admin[1]}: {why}") from error
    finally:
        connection.close()
