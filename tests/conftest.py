"""What must be settled before any test module is imported."""

import os

import torch

if not torch.cuda.is_available():
    # Triton decides when it is first imported, which trl does; without a GPU its kernels run on the CPU in the tests
    os.environ.setdefault("TRITON_INTERPRET", "1")
