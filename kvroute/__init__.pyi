# What kvroute/__init__.py finds by its table when it is asked for; tests/test_imports.py holds them together.

from cache_manager.blocks import AuxBlocks as AuxBlocks
from cache_manager.errors import BlockBusyError as BlockBusyError
from cache_manager.errors import BlockStateError as BlockStateError
from cache_manager.errors import ConfigError as ConfigError
from cache_manager.errors import FeedGapError as FeedGapError
from cache_manager.errors import InvalidInputError as InvalidInputError
from cache_manager.errors import KVRouteError as KVRouteError
from cache_manager.errors import NoSpaceError as NoSpaceError
from cache_manager.errors import RecordError as RecordError
from cache_manager.errors import RegionError as RegionError
from cache_manager.errors import RegionMismatchError as RegionMismatchError
from cache_manager.errors import RegionMissingError as RegionMissingError
from cache_manager.errors import RowError as RowError
from cache_manager.errors import SlotError as SlotError
from cache_manager.errors import SpecError as SpecError
from cache_manager.errors import StorageError as StorageError
from cache_manager.errors import StoreClosedError as StoreClosedError
from cache_manager.errors import StoreFormatError as StoreFormatError
from cache_manager.errors import StoreLockedError as StoreLockedError
from cache_manager.errors import StoreMissingError as StoreMissingError
from cache_manager.errors import StoreReadOnlyError as StoreReadOnlyError
from cache_manager.errors import StoreUnavailableError as StoreUnavailableError
from cache_manager.feed import BlockFeed as BlockFeed
from cache_manager.jobs import JobLimits as JobLimits
from cache_manager.keys import BlockKey as BlockKey
from cache_manager.keys import KeyChain as KeyChain
from cache_manager.keys import Namespace as Namespace
from cache_manager.manager import BlockManager as BlockManager
from cache_manager.publish import Rows as Rows
from cache_manager.regions.view import RegionView as RegionView
from cache_manager.spec import AuxBlockDataSpec as AuxBlockDataSpec
from cache_manager.spec import RecordLayout as RecordLayout
from cache_manager.storage import open_store as open_store
from kvroute.checks import valid_rows as valid_rows
from kvroute.journal import RequestJournal as RequestJournal
from kvroute.rollout import RolloutHandle as RolloutHandle
from kvroute.rollout import fetch_shard as fetch_shard
from kvroute.rollout import open_rollouts as open_rollouts
from kvroute.routes import Routes as Routes
from kvroute.routes import RoutingWeights as RoutingWeights
from kvroute.routes import SamplingSupport as SamplingSupport
from kvroute.routes import Split as Split
from kvroute.routing import logprob_spec as logprob_spec
from kvroute.routing import routing_spec as routing_spec
from kvroute.routing import routing_spec_from_hf as routing_spec_from_hf
from kvroute.routing import routing_weights_spec as routing_weights_spec
from kvroute.routing import weights_version_spec as weights_version_spec

__version__: str

def preload() -> None: ...
