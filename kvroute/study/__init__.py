"""``kvroute replay-study``: how far a trainer's probabilities are from its engine's, with replay and without."""
