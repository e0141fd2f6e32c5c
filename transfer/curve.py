"""The CURVE key pair of a deployment: a process that has it is a peer, and peers' messages are encrypted.

``NAME.key_secret`` is a certificate of ``zmq.auth``, for its owner alone: the pair is refused when anyone else may read
it. Every peer has the same file.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cache_manager.errors import ConfigError

SECRET_SUFFIX: Final = ".key_secret"  # noqa: S105 - a file name's suffix, not a secret
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def make_keys(directory: Path, name: str) -> Path:
    """Write a new pair to ``DIRECTORY/NAME.key_secret`` (0600); an existing file is refused and left unchanged."""
    import zmq

    if not _NAME.fullmatch(name):
        raise ConfigError("key name", f"a name like {_NAME.pattern}", repr(name))
    path = directory / (name + SECRET_SUFFIX)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f'metadata\ncurve\n    public-key = "{public}"\n    secret-key = "{secret}"\n')
    except FileExistsError as error:
        raise ConfigError("key name", "one that has no key file yet", str(path)) from error
    except OSError as error:
        raise ConfigError("key directory", "a directory to write to", f"{directory}: {error.strerror}") from error
    return path


def read_keys(path: Path) -> CurveKeys:
    """The pair in ``path``, a file that only its owner may be able to read."""
    from zmq.auth import load_certificate

    try:
        keys, mode = load_certificate(path), stat.S_IMODE(path.stat().st_mode)
    except (OSError, ValueError) as error:
        raise ConfigError("secret key file", "a file with a public and a secret key", f"{path}: {error}") from error
    if not all(key and _Z85.fullmatch(key) for key in keys):
        raise ConfigError("secret key file", "a public and a secret key of 40 characters of Z85", str(path))
    if mode & 0o077:
        raise ConfigError("secret key file", "mode 0600, for its owner alone", f"{path}: {mode:04o}")
    return CurveKeys(*(key or b"" for key in keys))


__all__ = ["CurveKeys", "make_keys", "read_keys"]
