"""Jobs of the store of rows that are over: how long they took, and why what they were to bring is missing."""

from __future__ import annotations

import logging
import time
from typing import Final

from cache_manager.job import AnyJob, RestoreJob
from kvroute.connector.meter import Meter

logger = logging.getLogger(__name__)

NOT_RESTORED: Final = {
    "absent_blocks_not_restored": "the store of rows does not have them",
    "corrupt_blocks_not_restored": "the store of rows has damaged ones",
    "failed_blocks_not_restored": "the store of rows has failed",
}
"""Why a restore brought nothing, by the counters of :attr:`RestoreJob.not_restored`."""


class JobCounts:
    """Counts landed jobs in ``meter``, of blocks with ``block_tokens`` tokens; logs the first failure of the store."""

    def __init__(self, meter: Meter, block_tokens: int) -> None:
        self._meter = meter
        self._block_tokens = block_tokens
        self._has_failed = False

    def count(self, job: AnyJob) -> None:
        """Count the time of a landed job, and the tokens whose rows it did not bring."""
        self.count_time(job)
        for cause, blocks in job.not_restored.items() if isinstance(job, RestoreJob) else ():
            self._meter.miss(NOT_RESTORED[cause], blocks * self._block_tokens)

    def count_time(self, job: AnyJob) -> None:
        """Count the time of a landed job, whose tokens will be computed where it brought no rows."""
        self._meter.took(job.name, time.monotonic() - job.begun_s)
        if job.failure is not None and not self._has_failed:
            self._has_failed = True
            logger.warning("the store of rows has failed, %s: %s; further times are counted", job.name, job.failure)


__all__ = ["NOT_RESTORED", "JobCounts"]
