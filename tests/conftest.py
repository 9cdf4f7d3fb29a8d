"""What must be settled before any test module is imported."""

import os

# no test asks a hub, and a process of the tests does not take the cores of the others; both may be overruled
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides when it is first imported, which trl does; without a GPU its kernels run on the CPU in the tests
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    """Skip what this machine cannot run, with the reason."""
    num_gpus = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and num_gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), and here are {num_gpus}"))
