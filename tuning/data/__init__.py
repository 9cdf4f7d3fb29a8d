"""Files to tokens to batches. Knows no model and no plugin."""
