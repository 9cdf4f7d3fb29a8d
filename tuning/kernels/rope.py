"""Rotary position embedding of queries and keys in one launch, forward and backward.

Forward, for each head of the token at position ``p``, ``x1`` and ``x2`` the two halves of its first ``R`` dimensions,
``c`` and ``s`` the cosine and sine of that token::

    y1 = x1 * c1 - x2 * s1        y2 = x2 * c2 + x1 * s2        the other D - R dimensions are copied

Backward is the transposed matrix, which for equal halves of the tables is the rotation by the negative angle::

    dx1 = dy1 * c1 + dy2 * s2        dx2 = dy2 * c2 - dy1 * s1

One program turns all heads of one token, so its cosines and sines are read once. Every token has its own angles: the
tables are indexed by batch row and token, or by position, never by the row length alone. Products and sums are fp32
with one rounding at the end (eager bf16 rounds three times).

The result is a new tensor. Rotating in place would move the same bytes and overwrite a tensor that the caller, a hook
or autograd may still hold; the projection that made ``q`` does not save it, so nothing is kept twice either way.

Reference: Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

import torch
import triton
import triton.language as tl

from tuning.kernels import reference
from tuning.kernels._launch import can_launch, device_guard, num_warps

__all__ = ["rope"]


@triton.jit
def _rotate(
    x_ptr,
    y_ptr,
    x_head_stride,
    y_head_stride,
    cos_1,
    cos_2,
    sin_1,
    sin_2,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    heads = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < NUM_HEADS) & (dims < HALF)
    x_ptrs = x_ptr + heads * x_head_stride + dims
    y_ptrs = y_ptr + heads * y_head_stride + dims
    x_1 = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    x_2 = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        y_1 = x_1 * cos_1 + x_2 * sin_2
        y_2 = x_2 * cos_2 - x_1 * sin_1
    else:
        y_1 = x_1 * cos_1 - x_2 * sin_1
        y_2 = x_2 * cos_2 + x_1 * sin_2
    tl.store(y_ptrs, y_1.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptrs + HALF, y_2.to(y_ptr.dtype.element_ty), mask=mask)
    if REST > 0:
        rest = tl.arange(0, BLOCK_REST)[None, :]
        rest_mask = (heads < NUM_HEADS) & (rest < REST)
        kept = tl.load(x_ptr + heads * x_head_stride + 2 * HALF + rest, mask=rest_mask)
        tl.store(y_ptr + heads * y_head_stride + 2 * HALF + rest, kept, mask=rest_mask)


@triton.jit(do_not_specialize=["position_batch_stride", "row_length"])
def _rope_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    q_out_batch_stride,
    q_out_head_stride,
    q_out_token_stride,
    k_out_batch_stride,
    k_out_head_stride,
    k_out_token_stride,
    cos_batch_stride,
    cos_token_stride,
    sin_batch_stride,
    sin_token_stride,
    position_batch_stride,
    position_token_stride,
    row_length,
    NUM_Q: tl.constexpr,
    NUM_K: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_TABLES: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    pid_token = tl.program_id(0).to(tl.int64)
    batch = pid_token // row_length
    token = pid_token % row_length
    if HAS_POSITIONS:
        position = tl.load(position_ptr + batch * position_batch_stride + token * position_token_stride).to(tl.int64)
        cos_ptr += position * cos_token_stride
        sin_ptr += position * sin_token_stride
    else:
        cos_ptr += batch * cos_batch_stride + token * cos_token_stride
        sin_ptr += batch * sin_batch_stride + token * sin_token_stride
    dims = tl.arange(0, BLOCK_HALF)
    mask = dims < HALF
    cos_1 = tl.load(cos_ptr + dims, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin_ptr + dims, mask=mask, other=0.0).to(tl.float32)[None, :]
    if HALF_TABLES:
        cos_2 = cos_1
        sin_2 = sin_1
    else:
        cos_2 = tl.load(cos_ptr + HALF + dims, mask=mask, other=0.0).to(tl.float32)[None, :]
        sin_2 = tl.load(sin_ptr + HALF + dims, mask=mask, other=0.0).to(tl.float32)[None, :]
    _rotate(
        q_ptr + batch * q_batch_stride + token * q_token_stride,
        q_out_ptr + batch * q_out_batch_stride + token * q_out_token_stride,
        q_head_stride,
        q_out_head_stride,
        cos_1,
        cos_2,
        sin_1,
        sin_2,
        NUM_Q,
        HALF,
        REST,
        BACKWARD,
        BLOCK_Q,
        BLOCK_HALF,
        BLOCK_REST,
    )
    _rotate(
        k_ptr + batch * k_batch_stride + token * k_token_stride,
        k_out_ptr + batch * k_out_batch_stride + token * k_out_token_stride,
        k_head_stride,
        k_out_head_stride,
        cos_1,
        cos_2,
        sin_1,
        sin_2,
        NUM_K,
        HALF,
        REST,
        BACKWARD,
        BLOCK_K,
        BLOCK_HALF,
        BLOCK_REST,
    )


def _empty_like_layout(x_BHSD: torch.Tensor) -> torch.Tensor:
    """Return an empty dense tensor; token-major where ``x`` is, as attention and projections want it."""
    batch, heads, length, width = x_BHSD.shape
    if x_BHSD.stride(1) <= x_BHSD.stride(2):
        return x_BHSD.new_empty((batch, length, heads, width)).transpose(1, 2)
    return x_BHSD.new_empty((batch, heads, length, width))


def _unit_last(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _table_strides(table: torch.Tensor, *, has_positions: bool) -> tuple[int, int]:
    if has_positions:
        return 0, table.stride(0)
    return (0 if table.shape[0] == 1 else table.stride(0)), table.stride(1)


def _turn(
    q_BHSD: torch.Tensor,
    k_BHSD: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    *,
    half_tables: bool,
    backward: bool,
    warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both rotated (forward) or both gradients turned back (backward)."""
    q_out, k_out = _empty_like_layout(q_BHSD), _empty_like_layout(k_BHSD)
    batch, num_q, length, width = q_BHSD.shape
    num_k = k_BHSD.shape[1]
    if not batch * length:
        return q_out, k_out
    q_BHSD, k_BHSD, cos, sin = _unit_last(q_BHSD), _unit_last(k_BHSD), _unit_last(cos), _unit_last(sin)
    half = cos.shape[-1] if half_tables else cos.shape[-1] // 2
    has_positions = position_ids is not None
    positions = cos if position_ids is None else position_ids.expand(batch, length)
    block_half = triton.next_power_of_2(half)
    block_q, block_k = triton.next_power_of_2(num_q), triton.next_power_of_2(num_k)
    with device_guard(q_BHSD):
        _rope_kernel[(batch * length,)](
            q_BHSD,
            k_BHSD,
            q_out,
            k_out,
            cos,
            sin,
            positions,
            *q_BHSD.stride()[:3],
            *k_BHSD.stride()[:3],
            *q_out.stride()[:3],
            *k_out.stride()[:3],
            *_table_strides(cos, has_positions=has_positions),
            *_table_strides(sin, has_positions=has_positions),
            *(positions.stride() if has_positions else (0, 0)),
            length,
            NUM_Q=num_q,
            NUM_K=num_k,
            HALF=half,
            REST=width - 2 * half,
            HALF_TABLES=half_tables,
            HAS_POSITIONS=has_positions,
            BACKWARD=backward,
            BLOCK_Q=block_q,
            BLOCK_K=block_k,
            BLOCK_HALF=block_half,
            BLOCK_REST=triton.next_power_of_2(max(1, width - 2 * half)),
            num_warps=warps or min(8, num_warps(2 * block_q * block_half, 32)),
        )
    return q_out, k_out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids, half_tables):
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.half_tables = half_tables
        return _turn(q, k, cos, sin, position_ids, half_tables=half_tables, backward=False)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin, position_ids = ctx.saved_tensors
        dq, dk = _turn(dq, dk, cos, sin, position_ids, half_tables=ctx.half_tables, backward=True)
        return dq, dk, None, None, None, None


@torch.library.custom_op("packtune::rope", mutates_args=())
def _rope_op(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    half_tables: bool,  # noqa: FBT001 - the schema of an operator
    backward: bool,  # noqa: FBT001
) -> tuple[torch.Tensor, torch.Tensor]:
    return _turn(q, k, cos, sin, position_ids, half_tables=half_tables, backward=backward)


@_rope_op.register_fake
def _(q, k, cos, sin, position_ids, half_tables, backward):
    return _empty_like_layout(q), _empty_like_layout(k)


def _setup_context(ctx, inputs, output):
    _, _, cos, sin, position_ids, half_tables, backward = inputs
    ctx.save_for_backward(cos, sin, position_ids)
    ctx.options = half_tables, backward


def _op_backward(ctx, dq, dk):
    cos, sin, position_ids = ctx.saved_tensors
    half_tables, backward = ctx.options
    dq, dk = torch.ops.packtune.rope(dq, dk, cos, sin, position_ids, half_tables, not backward)
    return dq, dk, None, None, None, None, None


_rope_op.register_autograd(_op_backward, setup_context=_setup_context)


def _check(q, k, cos, sin, position_ids, half_tables) -> None:
    batch, _, length, width = q.shape
    rot = cos.shape[-1] * 2 if half_tables else cos.shape[-1]
    if k.shape[0] != batch or k.shape[2] != length or k.shape[3] != width:
        raise ValueError(f"rope needs q and k of one batch, length and head width; got {q.shape} and {k.shape}")
    if rot > width or rot % 2 or sin.shape != cos.shape:
        raise ValueError(f"rope needs equal tables of an even width up to {width}; got {cos.shape} and {sin.shape}")
    expected = (cos.dim() == 2) if position_ids is not None else (cos.shape[:-1] in ((1, length), (batch, length)))
    if not expected:
        raise ValueError(
            f"rope needs tables [1 or {batch}, {length}, R], or [positions, R] with position_ids; got {cos.shape}"
        )
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rope gives no gradient to its tables, but cos or sin requires one; detach them")


def rope(
    q_BHSD: torch.Tensor,
    k_BHSD: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    *,
    half_tables: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by the angles of their tokens.

    Args:
        q_BHSD: ``[B, H, S, D]``, any strides; a transposed view of ``[B, S, H, D]`` stays token-major.
        k_BHSD: ``[B, H_k, S, D]``.
        cos: ``[1 or B, S, R]`` gathered by position, ``R <= D`` even; or ``[positions, R]`` with ``position_ids``.
        sin: As ``cos``.
        position_ids: ``[1 or B, S]`` integers that index the tables, which are not checked against their length.
        half_tables: The tables hold ``R / 2`` angles, for both halves.

    Returns:
        Rotated queries and keys, new tensors.

    Raises:
        ValueError: If the shapes do not fit, or a table requires a gradient.
    """
    _check(q_BHSD, k_BHSD, cos, sin, position_ids, half_tables)
    if not can_launch(q_BHSD):
        if half_tables:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        return reference.rope(q_BHSD, k_BHSD, cos, sin, position_ids)
    if torch.compiler.is_compiling():
        return torch.ops.packtune.rope(q_BHSD, k_BHSD, cos, sin, position_ids, half_tables, False)
    return _Rope.apply(q_BHSD, k_BHSD, cos, sin, position_ids, half_tables)
