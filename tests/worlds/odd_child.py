"""A child process that does what tests request: ``python -m odd_child``."""

from __future__ import annotations

import os
import sys
import time

from cache_manager.child import serve

CHANNEL = int(sys.argv[3]) if __name__ == "__main__" else -1


def answer(body: bytes) -> bytes:
    match body:
        case b"half":
            os.write(CHANNEL, b"\0\0\0\x64half")
        case b"too long":
            os.write(CHANNEL, b"\x40\0\0\0")
        case b"twice":
            os.write(CHANNEL, 2 * b"\0\0\0\x05twice")  # both are there when the first is
        case b"end":
            os._exit(3)
        case b"raise":
            raise ValueError("on purpose")
    if body in (b"half", b"too long", b"twice", b"silence"):
        time.sleep(600)
    return body


if __name__ == "__main__":
    serve(answer)
