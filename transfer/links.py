"""The link that a name in a configuration stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from cache_manager.errors import ConfigError
from transfer.link import ServingLink
from transfer.mooncake_link import MooncakeLink, MooncakeLinkSettings
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings


def _zmq(settings: ZmqSettings, _: MooncakeLinkSettings | None) -> ServingLink:
    return ZmqLink(settings)


def _mooncake(settings: ZmqSettings, mooncake: MooncakeLinkSettings | None) -> ServingLink:
    if settings.curve_server is not None or settings.curve_client is not None:
        # Its engine encrypts nothing and takes what anybody writes to its ports.
        raise ConfigError("link", "'zmq' where transfers are encrypted", "'mooncake' and CURVE keys")
    return MooncakeLink(ZmqLink(settings), mooncake)


LINKS: Final[Mapping[str, Callable[[ZmqSettings, MooncakeLinkSettings | None], ServingLink]]] = {
    "zmq": _zmq,
    "mooncake": _mooncake,
}


def open_link(
    link: str, settings: ZmqSettings | None = None, mooncake: MooncakeLinkSettings | None = None
) -> ServingLink:
    """A link of one of ``LINKS``; both ends of a transfer have to have the same.

    Raises :class:`ConfigError` that names the field, :class:`~transfer.mooncake_link.MooncakeUnavailableError` where
    the wheel is missing, :class:`~transfer.errors.TransferError` where its engine does not start.
    """
    make = LINKS.get(link)
    if make is None:
        raise ConfigError("link", "one of " + ", ".join(map(repr, LINKS)), repr(link))
    return make(settings or ZmqSettings(), mooncake)


__all__ = ["LINKS", "open_link"]
