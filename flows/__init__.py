"""Order: what happens, in which order."""
