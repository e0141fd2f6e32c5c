"""How far a trainer's probabilities are from its engine's, with replay and without.

``python -m bench.replay_study --help`` says how it is run; ``bench/results`` has what it found on an H100 and an H200.
"""
