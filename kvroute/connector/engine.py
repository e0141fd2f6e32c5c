"""The facts about an engine that matter for rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from kvroute.connector.carriers.none import NoCarrier
from kvroute.connector.carriers.port import Carrier
from kvroute.connector.limits import Limits
from kvroute.connector.mtp import next_token_spec
from kvroute.connector.settings import Settings
from kvroute.connector.stages import step_spec
from kvroute.routing import ROUTING_WEIGHTS, routing_weights_spec, weights_version_spec


@dataclass(frozen=True, slots=True)
class Engine:
    """The facts about an engine that matter for rows."""

    settings: Settings
    spec: AuxBlockDataSpec  # of routing
    namespace: Namespace
    blocks: int
    max_tokens: int  # of one step
    carrier: Carrier = field(default_factory=NoCarrier)  # how rows arrive beside KV from outside
    drafts: bool = True  # a draft model computes in the same steps, and uses the memory of their slots for its own
    hashes: int = 1  # that a request has for each of its blocks
    group: int = 0  # of the engine's groups of layers: the one whose blocks rows go with
    shares_blocks: bool = False  # blocks of its pool serve other groups too, and have no rows there
    stages: int = 1  # of a pipeline, each with its own layers; in a worker ``spec`` has those of its stage
    mtp: AuxBlockDataSpec | None = None  # of the routing of a draft's MTP layer, where its rows are wanted
    limits: Limits = field(default_factory=Limits)

    @property
    def layout(self) -> RecordLayout:
        """The layout of a block: rows, and the version of the weights that made each; in a stage also its step, beside
        MTP rows the token that each was read with, and routing weights beside the ids where they are wanted."""
        specs = [self.spec, weights_version_spec(self.tokens)]
        if self.settings.routing_weights:
            specs.append(routing_weights_spec(self.spec))
        if self.stages > 1:
            specs.append(step_spec(self.tokens))
        if self.mtp is not None:
            specs += [self.mtp, next_token_spec(self.tokens)]
        return RecordLayout(tuple(specs))

    @property
    def of_a_row(self) -> list[str]:
        """The specs of which a block has a row of each, or a row of none."""
        return [self.spec.name, *([ROUTING_WEIGHTS] if self.settings.routing_weights else ())]

    @property
    def tokens(self) -> int:
        """Tokens of one block."""
        return self.spec.block_tokens

    @property
    def clock(self) -> int:
        """An extra block, used as progress counter: its generation is the number of the last step with written rows."""
        return self.blocks

    @property
    def spares(self) -> range:
        """Extra blocks, to which rows are copied that are still to be read."""
        first = self.clock + 1
        count = self.limits.spares_max
        if self.settings.field:
            count += self.limits.field_spares_max
        return range(first, first + count)

    @property
    def places(self) -> range:
        """Extra blocks, for what the engine keeps on its host; the last ones of the table."""
        return range(self.spares.stop, self.spares.stop + self.carrier.places)


__all__ = ["Engine"]
