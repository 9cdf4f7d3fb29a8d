"""Variable-length attention: one function, several providers."""
