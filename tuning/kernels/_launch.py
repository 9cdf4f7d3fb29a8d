"""Launching: where a kernel can run, how many programs to start, and how to see any tensor as rows.

The Triton kernels run on a GPU, and on the CPU when Triton was imported under its interpreter (``TRITON_INTERPRET=1``).
Everywhere else the public functions use ``reference``.

Triton compiles a kernel anew when an integer argument becomes 1 or divisible by 16, which takes a second in the middle
of a run. Arguments that change with the tokens of a batch are therefore declared ``do_not_specialize``; strides, which
loads are widened by, are not.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
import triton.language as tl

__all__ = [
    "INTERPRETED",
    "as_rows",
    "can_launch",
    "device_guard",
    "like_rows",
    "num_programs",
    "num_warps",
    "row_order",
]

# Triton's own limit of elements in one block is 2**20; a row must also fit the registers of one program
MAX_ROW = 65536
# an odd number above 1, so that the interpreter also walks the loops of the persistent kernels
_INTERPRETER_PROGRAMS = 3


@triton.jit
def _probe_kernel(x_ptr):
    tl.store(x_ptr, 0)


# Triton decides at decoration time whether a kernel is compiled or interpreted
INTERPRETED: bool = not isinstance(_probe_kernel, triton.runtime.JITFunction)


def can_launch(x: torch.Tensor) -> bool:
    """Say whether a Triton kernel can run on ``x``: by its device, and because fp64 would lose what it is for."""
    return (x.is_cuda or INTERPRETED) and x.dtype != torch.float64


def device_guard(x: torch.Tensor) -> AbstractContextManager[object]:
    """Make the device of ``x`` the current one, since Triton launches on the current device."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


@cache
def _num_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_programs(x: torch.Tensor, per_multiprocessor: int) -> int:
    """Return the size of a persistent grid: programs that are all resident at once."""
    if not x.is_cuda:
        return _INTERPRETER_PROGRAMS
    return _num_multiprocessors(x.device.index) * per_multiprocessor


def num_warps(num_elements: int, per_thread: int) -> int:
    """Return the warps (a power of two, 1 to 32) that give each thread about ``per_thread`` elements."""
    return max(1, min(32, triton.next_power_of_2(num_elements) // (32 * per_thread)))


def row_order(x: torch.Tensor) -> tuple[int, ...]:
    """Return the permutation that puts the leading dimensions of ``x`` in memory order; the last stays last."""
    leading = sorted(range(x.dim() - 1), key=lambda i: (-x.stride()[i], i))
    return (*leading, x.dim() - 1)


def as_rows(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """View ``x`` as ``[rows, width]`` with rows in ``order``, last stride 1; copies only where no such view exists.

    An operation that works row by row may take rows in any order, so a transposed view needs no copy.

    Args:
        x: Any strides, expanded dimensions included.
        order: From :func:`row_order` of the tensor that decides the order.
    """
    if x.is_contiguous() and order == tuple(range(x.dim())):
        return x.view(-1, x.shape[-1])
    rows = x.permute(order).flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def like_rows(rows: torch.Tensor, shape: torch.Size, order: tuple[int, ...]) -> torch.Tensor:
    """Undo :func:`as_rows` on a contiguous result: a view of ``rows`` with ``shape``."""
    if order == tuple(range(len(order))):
        return rows.view(shape)
    permuted = rows.view([shape[i] for i in order])
    inverse = [0] * len(order)
    for position, dim in enumerate(order):
        inverse[dim] = position
    return permuted.permute(inverse)
