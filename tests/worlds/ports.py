"""TCP ports for servers that have to be told one, or have to come back on it."""

from paged_engine.processes import hold_port as hold_port
