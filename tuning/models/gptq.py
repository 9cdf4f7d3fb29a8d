"""A GPTQ layer as its checkpoint stores it: the format, and a linear layer over packed weights.

The layer knows what is stored, not how it is computed: the two functions it needs (unpack a weight; multiply by a
weight that is asked for again in the backward) are handed in, so that models stay free of kernels.

Its ``weight`` is None on purpose. Code that would add to it (merging an adapter) would change a matrix that is dropped
at once; so it fails instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["GPTQFormat", "GPTQKernels", "GPTQLinear", "pack", "quantize"]

_BITS = (2, 4, 8)
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTQFormat:
    """How the weights of a checkpoint are stored.

    Attributes:
        bits: 2, 4 or 8.
        group_size: Input rows that share a scale and a zero; -1 is all.
        desc_act: Rows were quantised in the order of their activations, so groups are not contiguous.
        sym: Zeros are all the middle of the range.
        zero_offset: Added to the stored zeros: 1 in the format ``gptq``, 0 in ``gptq_v2``.
    """

    bits: int = 4
    group_size: int = 128
    desc_act: bool = False
    sym: bool = True
    zero_offset: int = 1

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> GPTQFormat:
        """Read the ``quantization_config`` of a checkpoint.

        Raises:
            ValueError: If it is none of GPTQ, or of a kind that cannot be unpacked here; the text goes on a sentence
                that begins with the name of the checkpoint.
        """
        method = config.get("quant_method")
        if method != "gptq":
            raise ValueError(f"is quantised by {method}, not by GPTQ")
        bits, group_size = config.get("bits"), config.get("group_size", 128)
        if bits not in _BITS:
            raise ValueError(f"has weights of {bits} bits; {', '.join(map(str, _BITS))} can be unpacked")
        kind = config.get("checkpoint_format") or "gptq"
        if kind not in _ZERO_OFFSETS:
            raise ValueError(f"is packed as {kind}; {' and '.join(_ZERO_OFFSETS)} can be unpacked")
        if config.get("lm_head"):
            raise ValueError("has a quantised head, which cannot be trained on")
        if config.get("dynamic"):
            raise ValueError("has options of its own for single layers (dynamic), which are not supported")
        if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
            raise ValueError(f"has groups of {group_size} rows; a number above 0 or -1 can be unpacked")
        return cls(
            bits=bits,
            group_size=group_size,
            desc_act=bool(config.get("desc_act", False)),
            sym=bool(config.get("sym", True)),
            zero_offset=_ZERO_OFFSETS[kind],
        )

    def write(self) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint in this format."""
        kind = next(name for name, offset in _ZERO_OFFSETS.items() if offset == self.zero_offset)
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "desc_act": self.desc_act,
            "sym": self.sym,
            "checkpoint_format": kind,
            "lm_head": False,
        }

    def num_groups(self, in_features: int) -> int:
        """Return the groups of a layer."""
        return 1 if self.group_size == -1 else -(-in_features // self.group_size)

    def why_not(self, in_features: int, out_features: int) -> str:
        """Return why a layer of these widths cannot be stored, or nothing."""
        per_word = 32 // self.bits
        odd = [width for width in (in_features, out_features) if width % per_word]
        return f"width {odd[0]} is no multiple of {per_word}" if odd else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTQKernels:
    """What computes with packed weights.

    Attributes:
        unpack: ``(qweight, qzeros, scales, g_idx, bits=, zero_offset=, dtype=)`` to the weight ``[in, out]``.
        product: ``(x, weight, bias)`` to the output; ``weight(dtype)`` gives ``[out, in]`` and is asked for again in
            the backward, so that no unpacked weight is kept.
    """

    unpack: Callable[..., torch.Tensor]
    product: Callable[[torch.Tensor, Callable[[torch.dtype], torch.Tensor], torch.Tensor | None], torch.Tensor]


class GPTQLinear(nn.Linear):
    """A frozen linear layer over packed weights.

    A subclass of ``nn.Linear``, so that whoever looks for linear layers finds it; its ``weight`` is None.

    Args:
        in_features: Inputs.
        out_features: Outputs.
        form: How weights are stored.
        bias: Whether there is one.
        dtype: Of scales and bias.
        kernels: What computes.
        device: Where the tensors are made; their content is to be loaded.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        form: GPTQFormat,
        *,
        bias: bool,
        dtype: torch.dtype,
        kernels: GPTQKernels,
        device: torch.device | str = "meta",
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.form, self.kernels = form, kernels
        self.register_parameter("weight", None)
        per_word, groups = 32 // form.bits, form.num_groups(in_features)
        # parameters, not buffers: DDP sends buffers anew before every forward
        for name, shape, of in (
            ("qweight", (in_features // per_word, out_features), torch.int32),
            ("qzeros", (groups, out_features // per_word), torch.int32),
            ("scales", (groups, out_features), dtype),
            ("g_idx", (in_features,), torch.int32),
        ):
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, dtype=of, device=device), requires_grad=False)
            )
        self.register_parameter(
            "bias",
            nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False) if bias else None,
        )

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight ``[out, in]`` in ``dtype``: new memory, of which the rows are not contiguous."""
        return self.kernels.unpack(
            self.qweight, self.qzeros, self.scales, self.g_idx,
            bits=self.form.bits, zero_offset=self.form.zero_offset, dtype=dtype,
        ).t()  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x W^T + b``."""
        return self.kernels.product(x, self.unpacked, self.bias)

    def extra_repr(self) -> str:
        """Return widths and format."""
        form = self.form
        return f"{self.in_features}, {self.out_features}, bits={form.bits}, group_size={form.group_size}"


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers ``[K, N]`` along the first dimension, low bits first, to int32 ``[K * bits / 32, N]``."""
    per_word = 32 // bits
    shifts = torch.arange(per_word, dtype=torch.int64, device=values.device) * bits
    words = (values.long().view(-1, per_word, values.shape[1]) << shifts[:, None]).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantize(
    weight_NK: torch.Tensor, form: GPTQFormat, gram_KK: torch.Tensor | None = None, *, damping: float = 0.01
) -> dict[str, torch.Tensor]:
    """Quantise a weight and pack it.

    Args:
        weight_NK: ``[out, in]``.
        form: Bits, groups, order, symmetry.
        gram_KK: ``X^T X`` of inputs ``X``: each column's error is then made up for by those after it (GPTQ). None
            rounds to nearest.
        damping: Share of the mean diagonal that is added to the diagonal of ``gram_KK``.

    Returns:
        ``qweight``, ``qzeros``, ``scales`` (fp16), ``g_idx``.
    """
    weight_KN = weight_NK.detach().float().t().contiguous()
    num_rows = weight_KN.shape[0]
    size = num_rows if form.group_size == -1 else form.group_size
    order = torch.arange(num_rows, device=weight_KN.device)
    if form.desc_act and gram_KK is not None:
        order = gram_KK.diagonal().argsort(descending=True)
    weight_KN, position = weight_KN[order], torch.arange(num_rows, device=weight_KN.device) // size
    upper_KK = _inverse_factor(gram_KK[order][:, order], damping) if gram_KK is not None else None
    q_KN, scales, zeros = torch.empty_like(weight_KN, dtype=torch.int64), [], []
    for k in range(num_rows):
        if k % size == 0:
            scale_N, zero_N = _scale_and_zero(weight_KN[k : k + size], form)
            scales.append(scale_N)
            zeros.append(zero_N)
        row = weight_KN[k]
        q_KN[k] = (row / scale_N + zero_N).round().clamp_(0, 2**form.bits - 1)
        if upper_KK is not None:
            error = (row - (q_KN[k] - zero_N) * scale_N) / upper_KK[k, k]
            weight_KN[k + 1 :] -= torch.outer(upper_KK[k, k + 1 :], error)
    back = order.argsort()
    stored = (torch.stack(zeros).long() - form.zero_offset) % 2**form.bits
    return {
        "qweight": pack(q_KN[back], form.bits),
        "qzeros": pack(stored.t(), form.bits).t().contiguous(),
        "scales": torch.stack(scales).half(),
        "g_idx": position[back].to(torch.int32),
    }


def _inverse_factor(gram_KK: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Gram matrix, in fp64 on the way."""
    gram = gram_KK.double()
    diagonal = gram.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += damping * diagonal.mean()
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(gram)), upper=True).float()


def _scale_and_zero(rows_KN: torch.Tensor, form: GPTQFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero of each column of one group; the scale is one that fp16 holds."""
    top = 2**form.bits - 1
    if form.sym:
        scale = 2 * rows_KN.abs().amax(0) / top
        zero = torch.full_like(scale, (top + 1) // 2)
    else:
        low, high = rows_KN.amin(0).clamp(max=0), rows_KN.amax(0).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale.clamp(min=1e-8)).round().clamp_(0, top)
    scale = scale.half().float()
    return torch.where(scale == 0, torch.ones_like(scale), scale), zero
