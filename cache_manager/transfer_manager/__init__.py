"""The cache-transfer process: KV and rows of blocks are swapped, persisted and restored together, beside the engine."""

from cache_manager.transfer_manager.manager import CacheTransferManager, SharedPart, TransferSettings

__all__ = ["CacheTransferManager", "SharedPart", "TransferSettings"]
