"""The commands ``kvroute demo`` and ``kvroute demo-pd``: their first line comes before torch is imported.

:mod:`paged_engine.drivers` has what they do.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from cache_manager.progress import Progress
from cache_manager.storage import open_store
from kvroute.findings import console
from paged_engine.options import MOONCAKE, Options, first_line

TITLES: Final = {"Demo": "kvroute demo", "DemoPD": "kvroute demo-pd"}


def main(kind: str = "Demo", **flags: Any) -> int:
    """``kvroute demo``; the exit status."""
    options = Options(**flags)
    with Progress(console(options.json)) as progress:
        progress.print(f"{first_line(TITLES[kind], options)}\n")
        if options.store not in (None, MOONCAKE):
            progress.say(f"opening {options.store}")
            open_store(options.store).close()  # one that cannot be opened costs no minute
        progress.say("importing torch and transformers")
        from paged_engine import drivers

        driver: type[drivers.Demo | drivers.DemoPD] = getattr(drivers, kind)
        return driver(options, progress).run()


main_pd = partial(main, "DemoPD")
