"""Kernel tests run on the GPU where there is one, else on the CPU under Triton's interpreter.

Memory that ``torch.empty`` and its kin give is filled with NaN, so that an element nobody wrote turns a test red.
"""

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def pytest_collection_modifyitems(items):
    here = os.path.dirname(__file__)
    for item in items:
        if not str(item.path).startswith(here):
            continue
        if ON_GPU:
            item.add_marker(pytest.mark.gpu)
        elif item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and TRITON_INTERPRET unset"))


@pytest.fixture
def device():
    from tuning.kernels._launch import INTERPRETED

    if not ON_GPU:
        assert INTERPRETED, "triton was imported before TRITON_INTERPRET=1 was set; run these tests with it set"
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def compile_fullgraph():
    """Compile without Inductor, which needs a compiler; a break of the graph is an error."""
    torch.compiler.reset()
    yield lambda function: torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    def poisoned(original):
        def empty(*args, **kwargs):
            out = original(*args, **kwargs)
            if out.is_floating_point():
                out.detach().fill_(float("nan"))
            return out

        return empty

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
