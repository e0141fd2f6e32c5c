"""CURVE key pairs: who a peer is, proven by a key, and what it says, encrypted.

A pair is two files. ``NAME.key`` holds the public key, a line of 40 characters of Z85, and may be read by anyone;
``NAME.key_secret`` holds both and is refused when anyone but its owner may read it. A server lists the public keys of
the clients it serves; a client pins the public key of its server.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cache_manager.errors import ConfigError

PUBLIC_SUFFIX: Final = ".key"
SECRET_SUFFIX: Final = ".key_secret"  # noqa: S105 - a file name's end, no secret
_KEY_FILE_NBYTES_MAX: Final = 4096
_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One side's key pair, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _checked("public key", self.public)
        _checked("secret key", self.secret, shown=False)


@dataclass(frozen=True, slots=True)
class CurveServer:
    """A server's own pair, and the public keys of all the clients it talks to; any other gets nothing."""

    keys: CurveKeys
    clients: frozenset[bytes]

    def __post_init__(self) -> None:
        if not self.clients:
            raise ConfigError("curve clients", "the public key of at least one client", "none")
        for key in self.clients:
            _checked("curve clients", key)


@dataclass(frozen=True, slots=True)
class CurveClient:
    """A client's own pair, and the public key that its servers must have."""

    keys: CurveKeys
    server: bytes

    def __post_init__(self) -> None:
        _checked("curve server", self.server)


def make_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """Write a new pair ``DIRECTORY/NAME.key`` and ``.key_secret`` (0600); an existing file is left and refused."""
    import zmq

    if not _NAME.fullmatch(name):
        raise ConfigError("key name", f"a name like {_NAME.pattern}", repr(name))
    public_path, secret_path = directory / (name + PUBLIC_SUFFIX), directory / (name + SECRET_SUFFIX)
    public, secret = zmq.curve_keypair()
    try:
        for path in (public_path, secret_path):
            if path.exists():
                raise ConfigError("key name", "one that has no key file yet", str(path))
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # exclusive and private from the first byte on
        for path, text, mode in (
            (secret_path, public + b"\n" + secret + b"\n", 0o600),
            (public_path, public + b"\n", 0o644),
        ):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError("key directory", "a directory to write to", f"{directory}: {error.strerror}") from error
    return public_path, secret_path


def read_public(path: Path) -> bytes:
    """The public key in ``path`` (either file of a pair)."""
    return _lines(path, private=False)[0]


def read_keys(path: Path) -> CurveKeys:
    """The pair in the secret file ``path``, which nobody but its owner may be able to read."""
    lines = _lines(path, private=True)
    if len(lines) != 2:
        raise ConfigError("secret key file", "two lines: public key, secret key", f"{path}: {len(lines)} lines")
    return CurveKeys(lines[0], lines[1])


def read_clients(path: Path) -> frozenset[bytes]:
    """An allow-list: the public keys of every ``*.key`` file in the directory ``path``, or of the one file ``path``."""
    if not path.is_dir():
        return frozenset([read_public(path)])
    return frozenset(read_public(file) for file in sorted(path.glob("*" + PUBLIC_SUFFIX)))


def _lines(path: Path, *, private: bool) -> list[bytes]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if private and stat.S_IMODE(mode) & 0o077:
                raise ConfigError(
                    "secret key file", "mode 0600, for its owner alone", f"{path}: {stat.S_IMODE(mode):04o}"
                )
            text = file.read(_KEY_FILE_NBYTES_MAX + 1)
    except OSError as error:
        raise ConfigError("key file", "a file that can be read", f"{path}: {error.strerror}") from error
    lines = text.split()
    if len(text) > _KEY_FILE_NBYTES_MAX or not lines:
        raise ConfigError("key file", f"one or two keys in at most {_KEY_FILE_NBYTES_MAX} bytes", f"{path}")
    for i, line in enumerate(lines):
        _checked(f"key file {path}", line, shown=i == 0)
    return lines


def _checked(name: str, key: bytes, *, shown: bool = True) -> None:
    if not isinstance(key, bytes) or not _Z85.fullmatch(key):
        raise ConfigError(name, "40 characters of Z85", repr(key[:64]) if shown else "something else")


__all__ = ["CurveClient", "CurveKeys", "CurveServer", "make_keys", "read_clients", "read_keys", "read_public"]
