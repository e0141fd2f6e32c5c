"""Whether Grafana's own schema knows every field of a dashboard: ``python .ci/dashboard.py docs/grafana.json``.

The file is read into the classes that are generated from Grafana's schema and written again: a field that they do not
know, or whose value they change, is gone by then. No Grafana is started.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder  # type: ignore[import-not-found]
from grafana_foundation_sdk.cog.plugins import register_default_plugins  # type: ignore[import-not-found]
from grafana_foundation_sdk.models.dashboard import Dashboard  # type: ignore[import-not-found]

NAMED = ("title", "uid", "schemaVersion", "panels")
"""Fields without which Grafana shows nothing that can be found again."""


def unknown(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """The places of ``given`` that ``kept`` has not, or has otherwise."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            place = f"{path}.{name}" if path else name
            if name in kept:
                yield from unknown(value, kept[name], place)
            else:
                yield place
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from unknown(value, other, f"{path}[{number}]")
    elif given != kept:
        yield path


def main() -> None:
    register_default_plugins()
    for name in sys.argv[1:]:
        given = json.loads(Path(name).read_text())
        kept = json.loads(json.dumps(Dashboard.from_json(given), cls=JSONEncoder))
        wrong = [*unknown(given, kept), *(f"{field} is not there" for field in NAMED if not given.get(field))]
        if wrong:
            sys.exit(f"{name}: Grafana's schema does not have it like this: {', '.join(wrong)}")
        print(f"{name}: {len(given['panels'])} panels, each field in Grafana's schema")


if __name__ == "__main__":
    main()
