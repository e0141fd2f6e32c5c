"""How far a trainer's probabilities are from its engine's, with and without replay.

``python -m bench.replay_study --help`` says how to run it; ``bench/results`` has its results on an H100 and an H200.
"""
