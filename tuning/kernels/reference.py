"""Every operation in plain torch: the specification that the kernels are tested against, and the CPU path.

Half-precision inputs are computed in fp32, as the kernels do; fp32 and fp64 inputs in their own dtype. Give fp64
inputs to get the numbers that all others are measured by.

Legend: ``T`` tokens, ``B`` rows of the batch, ``S`` row length, ``D`` width, ``H`` heads, ``V`` vocabulary.
"""

import torch

__all__ = ["cross_entropy", "glu", "gptq_weight", "linear_cross_entropy", "lora", "rms_norm", "rope"]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0, cast_before_weight: bool = True
) -> torch.Tensor:
    """Normalise the last dimension of ``x`` by its root mean square; see ``tuning.kernels.rms_norm``."""
    wide = _wide(x)
    x_hat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        return (offset + weight) * x_hat.to(x.dtype) if offset else weight * x_hat.to(x.dtype)
    return ((offset + _wide(weight)) * x_hat).to(x.dtype)


def rope(
    q_BHSD: torch.Tensor,
    k_BHSD: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first ``R`` dimensions of each head by the angle of its token; see ``tuning.kernels.rope``."""
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin = _wide(cos).unsqueeze(1), _wide(sin).unsqueeze(1)
    rot = cos.shape[-1]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned, rest = _wide(x[..., :rot]), x[..., rot:]
        first, second = turned.chunk(2, dim=-1)
        out = turned * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((out.to(x.dtype), rest), dim=-1)

    return rotate(q_BHSD), rotate(k_BHSD)


def glu(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up``; ``activation`` is ``silu``, ``gelu_tanh`` or ``gelu``."""
    wide = _wide(gate)
    if activation == "silu":
        active = torch.nn.functional.silu(wide)
    else:
        active = torch.nn.functional.gelu(wide, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (active * _wide(up)).to(gate.dtype)


def cross_entropy(
    logits_TV: torch.Tensor,
    labels_T: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum the cross-entropy over the labels that count; see ``tuning.kernels.cross_entropy``.

    Returns:
        Loss sum (differentiable), number of labels that count, summed entropy, number of labels that are the arg-max.
    """
    keep = labels_T != ignore_index
    z = _wide(logits_TV[..., :vocab_size])[keep] * logit_scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    labels = labels_T[keep]
    loss = torch.nn.functional.cross_entropy(z, labels, reduction="sum", label_smoothing=label_smoothing)
    with torch.no_grad():
        log_p = z.detach().log_softmax(-1)
        p = log_p.exp()
        entropy = -torch.where(p > 0, p * log_p, 0.0).sum()
        num_correct = (z.argmax(-1) == labels).sum() if z.numel() else keep.sum()
    return loss, keep.sum(), entropy, num_correct


def linear_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_T: torch.Tensor,
    bias_V: torch.Tensor | None = None,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply the head and :func:`cross_entropy`; the logits exist. See ``tuning.kernels.linear_cross_entropy``."""
    logits_TV = torch.nn.functional.linear(hidden_TD, weight_VD, bias_V)
    if low_rank is not None:
        logits_TV = logits_TV + torch.nn.functional.linear(*low_rank)
    return cross_entropy(logits_TV, labels_T, **options)  # type: ignore[arg-type]


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
    """Unpack a GPTQ weight to ``[K, N]``; see ``tuning.kernels.gptq``."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=qweight.device)
    mask = 2**bits - 1
    q_KN = (qweight[:, None] >> shifts[:, None]).bitwise_and_(mask).flatten(0, 1)
    zeros_GN = ((qzeros[:, :, None] >> shifts).bitwise_and_(mask).flatten(1) + zero_offset).bitwise_and_(mask)
    group = g_idx.long()
    return (_wide(scales)[group] * (q_KN - zeros_GN[group])).to(dtype)


def lora(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    adapter: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return ``x W^T + b + s (dropout(x) A^T) B^T`` for ``adapter = (A, B, s)``; see ``tuning.kernels.lora``."""
    y = torch.nn.functional.linear(x, weight, bias)
    if adapter is None:
        return y
    down, up, scale = adapter
    low = torch.nn.functional.linear(torch.nn.functional.dropout(x, dropout), down)
    return y + scale * torch.nn.functional.linear(low, up)
