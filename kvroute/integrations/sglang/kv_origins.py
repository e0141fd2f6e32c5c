"""The origins of pages whose KV others keep: a fold of that KV names the computation that filled a page."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvroute.connector.witness import KvFolder
from kvroute.integrations.sglang.passes import Ids
from kvroute.witness import ROOT, chained

PageOrigins = NDArray[np.uint64]
"""By page its origin; 0 is none."""


class KvOrigins:
    """``folder`` folds the KV of the pages from ``first_page`` on: of the host's, which are numbered after those of the
    device, or of the device's with 0."""

    def __init__(self, folder: KvFolder, first_page: int) -> None:
        self._folder = folder
        self._first_page = first_page
        self.of_host = first_page > 0

    def now(self, pages: Ids) -> PageOrigins | None:
        """Those of ``pages [n]`` of the host, whose KV is there; the device's is there when the passes are over."""
        return self.of(pages) if self.of_host else None

    def of(self, pages: Ids) -> PageOrigins:
        """Those of ``pages [n]``, by their present KV. Waits for the device."""
        folds = self._folder.folds((pages - self._first_page).tolist())
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        words = folds.numpy().view(np.uint64).tolist()
        return np.array([chained(ROOT, fold) for fold in words], np.uint64)


__all__ = ["KvOrigins", "PageOrigins"]
