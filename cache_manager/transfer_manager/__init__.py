"""The cache-transfer process: a store apart, and copies of blocks between shared regions, beside the engine."""

from cache_manager.storage.apart import ApartSettings
from cache_manager.transfer_manager.manager import CacheTransferManager

__all__ = ["ApartSettings", "CacheTransferManager"]
