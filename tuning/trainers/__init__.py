"""Training itself; the only room that imports trl."""
