"""Questions to the master without the native library: is it there, and how full is the pool?

A socket's limit is for each of its calls; the deadline of the asking process bounds the whole.
"""

from __future__ import annotations

import socket
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
    """Connect and hang up; the local address that was used. A native set-up would wait long for a closed port."""
    try:
        with socket.create_connection(address, ASK_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise StorageError(f"no Mooncake master at {address[0]}:{address[1]}: {error}") from error


def pool_usage(admin: tuple[str, int]) -> dict[str, int]:
    """Objects and bytes of the whole pool, for all clients."""
    connection = HTTPConnection(*admin, timeout=ASK_S)
    where = f"Mooncake's admin port {admin[0]}:{admin[1]}"
    try:
        connection.request("GET", "/metrics")
        body = connection.getresponse().read(RESPONSE_NBYTES_MAX)
    except (OSError, HTTPException, ValueError) as error:
        raise StorageError(f"{where} (parameter admin) does not answer: {type(error).__name__} {error}") from error
    finally:
        connection.close()
    pairs = (line.partition(" ") for line in body.decode(errors="replace").splitlines())
    found = {_GAUGES[name]: int(float(value)) for name, _, value in pairs if name in _GAUGES}
    if len(found) != len(_GAUGES):
        raise StorageError(f"{where} lacks {sorted({*_GAUGES.values()} - {*found})}")
    # The gauges are read one after another while others write; the pool is never more than full.
    found["used_nbytes"] = min(found["used_nbytes"], found["capacity_nbytes"])
    found["free_nbytes"] = found["capacity_nbytes"] - found["used_nbytes"]
    return found
