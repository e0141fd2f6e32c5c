"""CURVE key pairs: who a peer is, proven by a key, and what it says, encrypted.

A pair is two certificates of ``zmq.auth``. ``NAME.key`` holds the public key and may be read by anyone;
``NAME.key_secret`` holds both and is refused when anyone but its owner may read it. A server lists the public keys of
the clients it serves; a client pins the public key of its server.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from cache_manager.errors import ConfigError

PUBLIC_SUFFIX: Final = ".key"
SECRET_SUFFIX: Final = ".key_secret"  # noqa: S105 - a file name's end, no secret
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
    from zmq.auth import create_certificates

    if not _NAME.fullmatch(name):
        raise ConfigError("key name", f"a name like {_NAME.pattern}", repr(name))
    made: list[Path] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryDirectory(dir=directory) as private:  # nobody else may look inside, whatever the files' modes are
            for source in map(Path, reversed(create_certificates(private, name))):
                source.chmod(0o600 if source.suffix == SECRET_SUFFIX else 0o644)
                os.link(source, directory / source.name)  # never over another file
                made.append(directory / source.name)
    except FileExistsError as error:
        for path in made:
            path.unlink()
        raise ConfigError("key name", "one that has no key file yet", str(error.filename2)) from error
    except OSError as error:
        raise ConfigError("key directory", "a directory to write to", f"{directory}: {error.strerror}") from error
    return made[1], made[0]


def read_public(path: Path) -> bytes:
    """The public key in ``path`` (either file of a pair)."""
    return _read(path)[0]


def read_keys(path: Path) -> CurveKeys:
    """The pair in the secret file ``path``, which nobody but its owner may be able to read."""
    public, secret = _read(path)
    if secret is None:
        raise ConfigError("secret key file", "a file with a public and a secret key", str(path))
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError("secret key file", "mode 0600, for its owner alone", f"{path}: {mode:04o}")
    return CurveKeys(public, secret)


def read_clients(path: Path) -> frozenset[bytes]:
    """An allow-list: the public keys of every ``*.key`` file in the directory ``path``, or of the one file ``path``."""
    if not path.is_dir():
        return frozenset([read_public(path)])
    return frozenset(read_public(file) for file in sorted(path.glob("*" + PUBLIC_SUFFIX)))


def _read(path: Path) -> tuple[bytes, bytes | None]:
    from zmq.auth import load_certificate

    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError("key file", "a file of one or two CURVE keys", f"{path}: {error}") from error
    _checked(f"key file {path}", public)
    if secret is not None:
        _checked(f"key file {path}", secret, shown=False)
    return public, secret


def _checked(name: str, key: bytes, *, shown: bool = True) -> None:
    if not isinstance(key, bytes) or not _Z85.fullmatch(key):
        raise ConfigError(name, "40 characters of Z85", repr(key[:64]) if shown else "something else")


__all__ = ["CurveClient", "CurveKeys", "CurveServer", "make_keys", "read_clients", "read_keys", "read_public"]
