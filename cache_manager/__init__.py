"""Block rows and where they live. ``import kvroute`` is the front door; import this package to extend it."""
