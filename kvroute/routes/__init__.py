"""Routes for the trainer: the experts that each token's MoE layers chose; missing ones are masked, never guessed.

Left imports right: ``routes`` -> ``fill``, ``wire`` -> ``cells`` -> ``parts`` -> ``layout``, ``spans``. ``layout``
describes a model's rows; ``parts`` how they are cut for a store; ``split`` which of them a rank has; ``fill`` spells
them for a trainer. ``support`` is of sampling, and goes beside routes in a record.
"""

from kvroute.routes.cells import union
from kvroute.routes.fill import shard_packed, shard_padded
from kvroute.routes.layout import Layout
from kvroute.routes.routes import Routes
from kvroute.routes.routing_weights import RoutingWeights
from kvroute.routes.split import Split
from kvroute.routes.support import SamplingSupport

__all__ = [
    "Layout",
    "Routes",
    "RoutingWeights",
    "SamplingSupport",
    "Split",
    "shard_packed",
    "shard_padded",
    "union",
]
