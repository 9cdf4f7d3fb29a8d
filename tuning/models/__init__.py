"""Name or path to model and tokenizer, and finding parts of a model by what they are."""
