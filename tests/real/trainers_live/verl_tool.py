"""A tool, in a file that verl's configuration names."""

from __future__ import annotations

from verl.tools.function_tool import function_tool


@function_tool
def look() -> str:
    """Says what there is to see."""
    return "t7 t11 t13 t17 t19"
