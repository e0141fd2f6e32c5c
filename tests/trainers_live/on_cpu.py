"""A plugin of vLLM, for machines without a GPU."""


def register() -> None:
    """Up to 0.28 experts are chosen by the layer's router, as on a GPU (``cpu_choices``); the scheduler waits for what
    a store has longer than it would for users, because a loaded machine may need more than a second."""
    import vllm

    from kvroute.connector import reader

    reader.ASKED_S = 60
    if [int(part) for part in vllm.__version__.split(".")[:2]] < [0, 30]:
        import cpu_choices  # noqa: F401
