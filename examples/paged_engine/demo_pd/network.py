"""Where the servers listen: ports of this machine, or addresses of network namespaces that a bridge connects.

Namespaces are nameless: they, the bridge and its cables end with the processes in them. The demo itself runs in the
namespace with the bridge, so that nothing of the machine's own network is touched.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Final, Protocol

HUB: Final = "10.77.0.1"
ENTER_S: Final = 30.0
_WAIT: Final = ("/bin/sh", "-c", 'read _ && exec "$@"', "sh")
"""A process that goes on as another program as soon as it is given a line."""


class Network(Protocol):
    """Runs programs where they can reach each other."""

    name: str

    def host(self, number: int) -> str:
        """The address that program ``number`` can listen on."""

    def port(self, wanted: int) -> int:
        """A port that is free there; ``wanted``, if that can be."""

    def start(self, number: int, command: Sequence[str], log: int) -> subprocess.Popen[bytes]:
        """Start a program with standard output and error to the file descriptor ``log``."""


class Loopback:
    """All on 127.0.0.1."""

    name = "loopback"

    def host(self, number: int) -> str:  # noqa: ARG002 - all have one
        return "127.0.0.1"

    def port(self, wanted: int) -> int:  # noqa: ARG002 - any that is free
        with socket.create_server(("127.0.0.1", 0)) as found:
            return int(found.getsockname()[1])

    def start(self, number: int, command: Sequence[str], log: int) -> subprocess.Popen[bytes]:  # noqa: ARG002
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603


class Namespaces:
    """Each in a network namespace of its own, with a cable to the bridge in ours, which must be nobody else's."""

    name = "namespaces"

    def __init__(self) -> None:
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "br0", "type", "bridge")
        _ip("addr", "add", f"{HUB}/24", "dev", "br0")
        _ip("link", "set", "br0", "up")

    def host(self, number: int) -> str:
        return f"10.77.0.{10 + number}"

    def port(self, wanted: int) -> int:
        return wanted

    def start(self, number: int, command: Sequence[str], log: int) -> subprocess.Popen[bytes]:
        started = subprocess.Popen(  # noqa: S603
            (_tool("unshare"), "--net", "--", *_WAIT, *command), stdin=subprocess.PIPE, stdout=log, stderr=log
        )
        try:
            self._plug(number, started.pid)
            assert started.stdin is not None
            started.stdin.write(b"\n")
            started.stdin.close()
        except BaseException:
            started.kill()
            started.wait()
            raise
        return started

    def _plug(self, number: int, pid: int) -> None:
        own, deadline_s = os.readlink("/proc/self/ns/net"), time.monotonic() + ENTER_S
        while os.readlink(f"/proc/{pid}/ns/net") == own:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"process {pid} got no network namespace within {ENTER_S} s")
            time.sleep(0.01)
        cable = f"veth{number}"
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        _ip("link", "set", cable, "master", "br0", "up")
        inside = (_tool("nsenter"), "--net", "--target", str(pid))
        _ip("addr", "add", f"{self.host(number)}/24", "dev", "eth0", inside=inside)
        _ip("link", "set", "eth0", "up", inside=inside)
        _ip("link", "set", "lo", "up", inside=inside)


def why_no_namespaces() -> str | None:
    """What keeps this process from making network namespaces; ``None``: nothing does."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    probe = f"{_tool('ip')} link add br0 type bridge && {_tool('ip')} link add v0 type veth peer name v1"
    tried = subprocess.run(  # noqa: S603
        (_tool("unshare"), "--net", "--", "/bin/sh", "-c", probe),
        capture_output=True,
        text=True,
        timeout=ENTER_S,
        check=False,
    )
    return None if tried.returncode == 0 else tried.stderr.strip().splitlines()[-1]


def in_own_namespace(command: Sequence[str]) -> int:
    """Run ``command`` in a new network namespace; its exit status."""
    return subprocess.call((_tool("unshare"), "--net", "--", *command))  # noqa: S603


def _tool(name: str) -> str:
    return shutil.which(name) or name


def _ip(*arguments: str, inside: Sequence[str] = ()) -> None:
    subprocess.run((*inside, _tool("ip"), *arguments), check=True, timeout=ENTER_S)  # noqa: S603


__all__ = ["Loopback", "Namespaces", "Network", "in_own_namespace", "why_no_namespaces"]
