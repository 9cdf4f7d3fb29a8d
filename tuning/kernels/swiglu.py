"""Gated linear units: ``activation(gate) * up``, forward and backward, for SiLU (SwiGLU) and GELU (GeGLU).

Forward and backward, ``a`` the activation::

    y = a(g) * u        dg = dy * u * a'(g)        du = dy * a(g)

    silu       a = g * s(g)                                      a' = s * (1 + g * (1 - s)),  s the logistic function
    gelu_tanh  a = g * s(2 z),  z = k (g + 0.044715 g^3)         a' = s + g * s * (1 - s) * 2 z'
    gelu       a = g * P(g),  P the normal distribution          a' = P + g * p(g)

with ``k = sqrt(2 / pi)``; ``1/2 (1 + tanh z) = s(2 z)`` spares the hyperbolic tangent. Computed in fp32, one rounding
at the end (eager bf16 rounds the activation first). Nothing is saved but the inputs: the activation is recomputed in
the backward, three reads and two writes, which is all the memory traffic there is.

Gate and up are two tensors, or the halves of one (``*_packed``), whose gradient is then written as one tensor too.
Gradients go to new memory: writing them over the saved inputs would save two tensors of ``[T, D]`` for a moment and
would forbid a second backward.

Reference: Shazeer 2020, https://arxiv.org/abs/2002.05202.
"""

import torch
import triton
import triton.language as tl

from tuning.kernels import reference
from tuning.kernels._launch import as_rows, can_launch, device_guard

__all__ = ["geglu", "geglu_packed", "glu_backward", "glu_forward", "swiglu", "swiglu_packed"]

# elements a program: two 16-byte accesses a thread and tensor in bf16, 4 warps
_BLOCK = 2048
_WARPS = 4


@triton.jit
def _activate(g, ACTIVATION: tl.constexpr):
    """Return ``a(g)`` and ``a'(g)``; the compiler drops the one that is not used."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(g)
        value = g * s
        slope = s * (1.0 + g * (1.0 - s))
    elif ACTIVATION == "gelu_tanh":
        z = 0.7978845608028654 * g * (1.0 + 0.044715 * g * g)
        s = tl.sigmoid(2.0 * z)
        value = g * s
        slope = s + g * s * (1.0 - s) * 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * g * g)
    else:
        p = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        value = g * p
        slope = p + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    return value, slope


@triton.jit
def _glu_fwd_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_row_stride,
    up_row_stride,
    num_cols,
    num_col_blocks,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row = pid // num_col_blocks
    cols = (pid % num_col_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    g = tl.load(gate_ptr + row * gate_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    value, _ = _activate(g, ACTIVATION)
    tl.store(y_ptr + row * num_cols + cols, (value * u).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _glu_bwd_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    dy_row_stride,
    gate_row_stride,
    up_row_stride,
    grad_row_stride,
    num_cols,
    num_col_blocks,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row = pid // num_col_blocks
    cols = (pid % num_col_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate_ptr + row * gate_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activate(g, ACTIVATION)
    tl.store(dgate_ptr + row * grad_row_stride + cols, (dy * u * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + row * grad_row_stride + cols, (dy * value).to(dup_ptr.dtype.element_ty), mask=mask)


def _rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """View all as ``[rows, cols]`` with last stride 1; contiguous ones of one shape become a single row."""
    if all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors]
    return [as_rows(x, tuple(range(x.dim()))) for x in tensors]


def _grid(rows: torch.Tensor, block: int) -> tuple[int, int]:
    col_blocks = triton.cdiv(rows.shape[1], block)
    return rows.shape[0] * col_blocks, col_blocks


def _forward(
    gate: torch.Tensor, up: torch.Tensor, activation: str, *, block: int = _BLOCK, warps: int = _WARPS
) -> torch.Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not y.numel():
        return y
    gate_rows, up_rows = _rows(gate, up)
    programs, col_blocks = _grid(gate_rows, block)
    with device_guard(gate):
        _glu_fwd_kernel[(programs,)](
            gate_rows,
            up_rows,
            y,
            gate_rows.stride(0),
            up_rows.stride(0),
            gate_rows.shape[1],
            col_blocks,
            ACTIVATION=activation,
            BLOCK=block,
            num_warps=warps,
        )
    return y


def _backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    *,
    packed: bool,
    block: int = _BLOCK,
    warps: int = _WARPS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both gradients, as the halves of one tensor if ``packed``."""
    width = gate.shape[-1]
    if packed:
        both = torch.empty((*gate.shape[:-1], 2 * width), dtype=gate.dtype, device=gate.device)
        dgate, dup = both[..., :width], both[..., width:]
    else:
        dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if not gate.numel():
        return dgate, dup
    dy_rows, gate_rows, up_rows, dgate_rows, dup_rows = _rows(dy, gate, up, dgate, dup)
    programs, col_blocks = _grid(gate_rows, block)
    with device_guard(gate):
        _glu_bwd_kernel[(programs,)](
            dy_rows,
            gate_rows,
            up_rows,
            dgate_rows,
            dup_rows,
            dy_rows.stride(0),
            gate_rows.stride(0),
            up_rows.stride(0),
            dgate_rows.stride(0),
            gate_rows.shape[1],
            col_blocks,
            ACTIVATION=activation,
            BLOCK=block,
            num_warps=warps,
        )
    return dgate, dup


def _halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = gate_up.shape[-1] // 2
    return gate_up[..., :width], gate_up[..., width:]


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _forward(gate, up, activation)

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        return *_backward(dy, gate, up, ctx.activation, packed=False), None


class _PackedGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, activation):
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return _forward(*_halves(gate_up), activation)

    @staticmethod
    def backward(ctx, dy):
        return _packed_backward(dy, ctx.saved_tensors[0], ctx.activation), None


def _packed_backward(dy: torch.Tensor, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    dgate, _ = _backward(dy, *_halves(gate_up), activation, packed=True)
    # the halves lie side by side in one tensor, of which dgate is the left half
    return dgate.as_strided(gate_up.shape, dgate.stride(), dgate.storage_offset())


@torch.library.custom_op("packtune::glu", mutates_args=())
def _glu_op(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return _forward(gate, up, activation)


@_glu_op.register_fake
def _(gate, up, activation):
    return gate.new_empty(gate.shape)


@torch.library.custom_op("packtune::glu_backward", mutates_args=())
def _glu_backward_op(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(dy, gate, up, activation, packed=False)


@_glu_backward_op.register_fake
def _(dy, gate, up, activation):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _setup_context(ctx, inputs, output):
    gate, up, activation = inputs
    ctx.save_for_backward(gate, up)
    ctx.activation = activation


def _op_backward(ctx, dy):
    gate, up = ctx.saved_tensors
    return *torch.ops.packtune.glu_backward(dy, gate, up, ctx.activation), None


_glu_op.register_autograd(_op_backward, setup_context=_setup_context)


def glu_forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up`` outside autograd, for a block that has a backward of its own.

    Args:
        gate: ``[..., D]``, any strides.
        up: As ``gate``, of the same dtype.
        activation: ``silu``, ``gelu_tanh`` or ``gelu``.
    """
    return _forward(gate, up, activation) if can_launch(gate) else reference.glu(gate, up, activation)


def glu_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``gate`` and ``up``; see :func:`glu_forward`."""
    if can_launch(gate):
        return _backward(dy, gate, up, activation, packed=False)
    with torch.enable_grad():
        inputs = gate.detach().requires_grad_(), up.detach().requires_grad_()
        dgate, dup = torch.autograd.grad(reference.glu(*inputs, activation), inputs, dy)
    return dgate, dup


def _glu(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"a gated unit needs gate and up of one shape and dtype; got {tuple(gate.shape)} {gate.dtype} "
            f"and {tuple(up.shape)} {up.dtype}"
        )
    if not can_launch(gate):
        return reference.glu(gate, up, activation)
    if torch.compiler.is_compiling():
        return torch.ops.packtune.glu(gate, up, activation)
    return _GLU.apply(gate, up, activation)


def _glu_packed(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"a packed gated unit needs an even width; got {tuple(gate_up.shape)}")
    if torch.compiler.is_compiling() or not can_launch(gate_up):
        return _glu(*_halves(gate_up), activation)
    return _PackedGLU.apply(gate_up, activation)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``.

    Args:
        gate: ``[..., D]``, any strides.
        up: As ``gate``.

    Returns:
        A new contiguous tensor.

    Raises:
        ValueError: If shapes or dtypes differ.
    """
    return _glu(gate, up, "silu")


def swiglu_packed(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` of ``gate_up = [..., gate | up]``.

    Args:
        gate_up: ``[..., 2 D]``, gate first.

    Returns:
        A new contiguous tensor ``[..., D]``.

    Raises:
        ValueError: If the width is odd.
    """
    return _glu_packed(gate_up, "silu")


def geglu(gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "tanh") -> torch.Tensor:
    """Return ``gelu(gate) * up``.

    Args:
        gate: ``[..., D]``, any strides.
        up: As ``gate``.
        approximate: ``"tanh"`` or ``"none"`` (the normal distribution itself), as in torch.

    Returns:
        A new contiguous tensor.

    Raises:
        ValueError: If shapes or dtypes differ.
    """
    return _glu(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


def geglu_packed(gate_up: torch.Tensor, *, approximate: str = "tanh") -> torch.Tensor:
    """Return ``gelu(gate) * up`` of ``gate_up = [..., gate | up]``; see :func:`geglu`.

    Args:
        gate_up: ``[..., 2 D]``, gate first.
        approximate: ``"tanh"`` or ``"none"``.

    Returns:
        A new contiguous tensor ``[..., D]``.

    Raises:
        ValueError: If the width is odd.
    """
    return _glu_packed(gate_up, "gelu_tanh" if approximate == "tanh" else "gelu")
