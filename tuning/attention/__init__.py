"""Variable-length attention: one function, several providers, and the proof that samples stay apart."""
