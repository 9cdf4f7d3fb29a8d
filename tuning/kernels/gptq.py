"""Unpack a GPTQ weight: 2, 4 or 8-bit integers with a scale and a zero a group, to a dense matrix.

A layer of ``K`` inputs and ``N`` outputs is stored as::

    qweight  int32 [K * bits / 32, N]        32 / bits rows of a column to a word, low bits first
    qzeros   int32 [G, N * bits / 32]        32 / bits columns of a group to a word, low bits first
    scales   float [G, N]
    g_idx    int32 [K]                       group of each input row; any order (act-order)

    W[k, n] = scales[g, n] * (q[k, n] - ((z[g, n] + zero_offset) mod 2^bits)),   g = g_idx[k]

``zero_offset`` is 1 for the format ``gptq``, whose writers store the zero less one, and 0 for ``gptq_v2``.

The weight is unpacked whole, used by one matrix product and dropped. It costs one write and one read of the dense
weight more than a product that unpacks in its tiles; with thousands of tokens a step that is a few percent of the
product, which then runs at full speed in any dtype. Frantar et al. 2022, https://arxiv.org/abs/2210.17323.

Legend: ``K`` inputs, ``N`` outputs, ``G`` groups.
"""

import torch
import triton
import triton.language as tl

from tuning.kernels import reference
from tuning.kernels._launch import can_launch, device_guard

__all__ = ["gptq_weight"]

# columns a program, and one word of each: 8 rows of 4 bits, 4 bytes a thread and row in bf16 with 4 warps
_BLOCK_N = 256
_WARPS = 4
_BITS = (2, 4, 8)


@triton.jit
def _gptq_weight_kernel(
    qweight_ptr,
    qzeros_ptr,
    scales_ptr,
    g_idx_ptr,
    out_ptr,
    num_cols,
    zero_words,
    zero_offset,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    word_row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < num_cols
    PER_WORD: tl.constexpr = 32 // BITS
    MASK: tl.constexpr = (1 << BITS) - 1
    zero_shift = ((cols % PER_WORD) * BITS).to(tl.int32)
    words = tl.load(qweight_ptr + word_row * num_cols + cols, mask=mask, other=0)
    for j in tl.static_range(PER_WORD):
        row = word_row * PER_WORD + j
        group = tl.load(g_idx_ptr + row).to(tl.int64)
        scale = tl.load(scales_ptr + group * num_cols + cols, mask=mask, other=0.0).to(tl.float32)
        zeros = tl.load(qzeros_ptr + group * zero_words + cols // PER_WORD, mask=mask, other=0)
        zero = (((zeros >> zero_shift) & MASK) + zero_offset) & MASK
        q = (words >> (j * BITS)) & MASK
        value = scale * (q - zero).to(tl.float32)
        tl.store(out_ptr + row * num_cols + cols, value.to(out_ptr.dtype.element_ty), mask=mask)


def gptq_weight(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor,
    *,
    bits: int,
    zero_offset: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the dense weight ``[K, N]`` in ``dtype``: new memory, no gradient.

    Args:
        qweight: ``[K * bits / 32, N]`` int32, contiguous.
        qzeros: ``[G, N * bits / 32]`` int32, contiguous.
        scales: ``[G, N]``, contiguous.
        g_idx: ``[K]`` int32.
        bits: 2, 4 or 8.
        zero_offset: Added to the stored zeros: 1 for ``gptq``, 0 for ``gptq_v2``.
        dtype: Of the result; the product of scale and integer is rounded to it once.

    Raises:
        ValueError: If ``bits`` is another number, or the shapes do not belong together.
    """
    if bits not in _BITS:
        raise ValueError(f"weights of {bits} bits do not fill words of 32; 2, 4 and 8 do")
    per_word = 32 // bits
    num_words, num_cols = qweight.shape
    groups = scales.shape[0]
    fits = scales.shape[1] == num_cols and qzeros.shape == (groups, num_cols // per_word)
    if not fits or num_cols % per_word or g_idx.shape != (num_words * per_word,):
        raise ValueError(
            f"qweight {tuple(qweight.shape)}, qzeros {tuple(qzeros.shape)}, scales {tuple(scales.shape)} and g_idx "
            f"{tuple(g_idx.shape)} are no {bits}-bit layer"
        )
    if not can_launch(scales):
        return reference.gptq_weight(qweight, qzeros, scales, g_idx, bits=bits, zero_offset=zero_offset, dtype=dtype)
    out = torch.empty((num_words * per_word, num_cols), dtype=dtype, device=qweight.device)
    grid = (num_words, triton.cdiv(num_cols, _BLOCK_N))
    with device_guard(qweight):
        _gptq_weight_kernel[grid](
            qweight.contiguous(),
            qzeros.contiguous(),
            scales.contiguous(),
            g_idx,
            out,
            num_cols,
            num_cols // per_word,
            zero_offset,
            BITS=bits,
            BLOCK_N=_BLOCK_N,
            num_warps=_WARPS,
        )
    return out
