"""Routes for the trainer: the experts that each token's MoE layers chose; missing ones are masked, never guessed.

Left imports right: ``routes`` -> ``fill``, ``wire`` -> ``cells`` -> ``layout``, ``spans``, ``token_hash``; ``shards``
-> ``fill``, ``split``. ``layout`` describes a model's rows; ``parts`` how they are cut for a store; ``split`` which of
them a rank has.
"""

from kvroute.routes.cells import union
from kvroute.routes.layout import Layout
from kvroute.routes.routes import Routes
from kvroute.routes.shards import shard_packed, shard_padded
from kvroute.routes.split import Split

__all__ = ["Layout", "Routes", "Split", "shard_packed", "shard_padded", "union"]
