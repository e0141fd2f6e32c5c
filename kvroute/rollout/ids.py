"""Names of rollouts: FastDeploy's ids, made from request ids that clients choose, and safe as file names.

Pure: no I/O.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote

from cache_manager.errors import InvalidInputError

NAME_NBYTES_MAX: Final = 200
"""Bytes of a rollout id as the name of a directory."""

_REQUEST = re.compile(
    r"chatcmpl-(?P<user>.+)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(_(?P<sample>[0-9]{1,6}))?",
    re.DOTALL,
)
_SAMPLE = re.compile(r"~[0-9]+\Z")
_TURN = re.compile(r"(?P<prefix>.*:.*):(?P<turn>[0-9]{1,9}):(?P<segment>[^:]*)", re.DOTALL)


def rollout_id_of(request_id: str, sample: int = 0) -> str:
    """The rollout id of a request, as in FastDeploy: the client's ``user``.

    A request id that begins with ``chatcmpl-`` has to be ``chatcmpl-<user>-<uuid4>``, with or without a final ``_<n>``;
    any other is a rollout id itself. Samples after the first get ``~<sample>``, or ``~<n>``: FastDeploy has one id for
    all samples of a request, so that the last one would replace the others. :class:`InvalidInputError` for other ids,
    and for one that ends like that: it would be a sample's of another request. FastDeploy uses the first field of the
    UUID as user of a request without one.

    >>> rollout_id_of("chatcmpl-xxx_xxx_epoch_15:2:2:1-d9f16c5c-65f6-4815-b44d-14e2c581907c_0")
    'xxx_xxx_epoch_15:2:2:1'
    >>> rollout_id_of("chatcmpl-my-user-7:0:0:0-d9f16c5c-65f6-4815-b44d-14e2c581907c", sample=1)
    'my-user-7:0:0:0~1'
    >>> rollout_id_of("chatcmpl-my-user-7:0:0:0-d9f16c5c-65f6-4815-b44d-14e2c581907c_1")
    'my-user-7:0:0:0~1'
    """
    name = checked_id(request_id, "request id")
    if request_id.startswith("chatcmpl-"):
        match = _REQUEST.fullmatch(request_id)
        if match is None:
            wanted = "chatcmpl-<user>-<uuid4>, with or without a final _<n>"
            raise InvalidInputError("request id", wanted, repr(request_id))
        name = match["user"]
        sample = sample or int(match["sample"] or 0)
    if _SAMPLE.search(name):
        wanted = "one that does not end with ~<number>, as samples do"
        raise InvalidInputError("request id", wanted, repr(request_id))
    return checked_id(f"{name}~{sample}" if sample else name)


def previous_turn(rollout_id: str) -> str | None:
    """The id of the turn before, if it is ``<data>:<generation>:<turn>:<segment>``; ``None`` for first turns and
    others.

    >>> previous_turn("task_15:2:3:1"), previous_turn("task_15:2:0:1"), previous_turn("req-1")
    ('task_15:2:2:1', None, None)
    """
    match = _TURN.fullmatch(rollout_id)
    if match is None or int(match["turn"]) == 0:
        return None
    return f"{match['prefix']}:{int(match['turn']) - 1}:{match['segment']}"


def checked_id(rollout_id: str, field: str = "rollout id") -> str:
    """``rollout_id``, or :class:`InvalidInputError`: text that is not empty and not too long for a file name."""
    if not isinstance(rollout_id, str) or not rollout_id:
        raise InvalidInputError(field, "text that is not empty", repr(rollout_id))
    try:
        nbytes = len(rollout_id.encode())
    except UnicodeEncodeError as error:
        wanted = "text that UTF-8 can hold"
        raise InvalidInputError(field, wanted, repr(rollout_id)) from error
    if nbytes > NAME_NBYTES_MAX or (3 * nbytes > NAME_NBYTES_MAX and len(file_name(rollout_id)) > NAME_NBYTES_MAX):
        wanted = f"at most {NAME_NBYTES_MAX} bytes, percent-encoded"
        raise InvalidInputError(field, wanted, f"{nbytes} bytes")
    return rollout_id


def file_name(rollout_id: str) -> str:
    """A directory name that differs for every id and cannot leave the parent directory: clients choose ids.

    >>> file_name("task:1:0:0"), file_name("../../etc"), file_name("..")
    ('task:1:0:0', '%2E.%2F..%2Fetc', '%2E.')
    """
    quoted = quote(rollout_id, safe=":@=+,")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted
