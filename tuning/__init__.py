"""packtune: exact, padding-free supervised fine-tuning on top of Hugging Face's SFT trainer.

Importing this package does no work: no environment variable is set or read, no GPU context is made and neither
torch nor transformers is imported. ``python -m tuning.sft_trainer`` is the entry point, :func:`tuning.run.train` the
same thing as a function.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
