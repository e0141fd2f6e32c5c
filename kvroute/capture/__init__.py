"""Capture: from a forward pass's top-k ids to routing rows. Needs torch; import it where it is used."""
