"""Block rows and where they live. ``import kvroute`` is the front door; import this package to extend it."""

__distribution__ = "kvroute"  # an index has another package of this name: `import kvroute` looks for this line
