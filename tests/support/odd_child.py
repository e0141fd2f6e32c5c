"""A child that does what its requests say, to be asked by tests: ``python -m odd_child SOCKET_FD PARENT_PID``."""

from __future__ import annotations

import os
import socket
import struct
import sys

import msgspec

from cache_manager.child import Parent, send_frame


class Asked(msgspec.Struct):
    number: int
    how: str


class Answer(msgspec.Struct):
    number: int
    said: str


def main() -> None:
    parent, end = Parent(*map(int, sys.argv[1:3])), socket.socket(fileno=os.dup(int(sys.argv[1])))
    while (body := parent.receive()) is not None:
        asked = msgspec.msgpack.decode(body, type=Asked)
        answer = msgspec.msgpack.encode(Answer(asked.number, asked.how))
        match asked.how:
            case "half":
                end.sendall(struct.pack("<I", 100) + b"half")
            case "too long":
                end.sendall(struct.pack("<I", 1 << 30))
            case "garbage":
                send_frame(end, bytes(100))
            case "unknown":
                send_frame(end, msgspec.msgpack.encode(Answer(asked.number + 7, "")))
            case "silence":
                continue
            case "end":
                os._exit(3)
            case _:
                parent.send(answer)
                if asked.how == "twice":
                    parent.send(answer)
    os._exit(0)


if __name__ == "__main__":
    main()
