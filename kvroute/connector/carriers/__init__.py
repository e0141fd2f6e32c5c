"""How rows arrive beside KV from outside: not at all, by key from a store, by a transfer, or by the engine's own copies
to its host and back.

An engine has one carrier, a value that is made once (:mod:`~kvroute.connector.carriers.port` has its calls). What a
carrier keeps and decides is in its module, and its two sides talk by messages of their own.
"""

from kvroute.connector.carriers.by_key import ByKey
from kvroute.connector.carriers.by_pairs import ByPairs
from kvroute.connector.carriers.by_transfer import ByTransfer
from kvroute.connector.carriers.none import NoCarrier
from kvroute.connector.carriers.port import Carrier, SchedulerSide, WorkerSide

__all__ = ["ByKey", "ByPairs", "ByTransfer", "Carrier", "NoCarrier", "SchedulerSide", "WorkerSide"]
