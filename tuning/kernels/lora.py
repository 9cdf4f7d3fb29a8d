"""LoRA layers that share an input, and a gated MLP of LoRA layers, each as one autograd Function.

A layer of base weight ``W``, bias ``b``, adapter ``A``, ``B``, scale ``s`` and dropout mask ``m`` (0 or ``1/(1-p)``)::

    u  = (m * x) A^T                 y  = x W^T + b + s u B^T
    du = s dy B                      dx = dy W + m * (du A)
    dB = s dy^T u                    dA = du^T (m * x)

The unfused layer makes five tensors of the input's or output's size and keeps three of them (the input in the
adapter's dtype, what dropout left of it, its mask). Here the base product is written once and the adapter's is added
into it; ``x`` is kept once for all layers that read it, besides ``u`` (``R`` wide) and the mask as booleans. ``dx`` of
all layers is summed in one matrix. A gated MLP ``down(a(gate(x)) * up(x))`` keeps ``x``, gate and up, and computes the
activation anew in the backward.

Base weights are asked for when they are needed, in the forward and again in the backward, so a quantised base is
unpacked for one product at a time and never kept. They get no gradient; biases and adapters do. Everything is computed
in one dtype: that of autocast where it is on, else that of the input. Tensors for the backward go through
``save_for_backward``, so that both kinds of gradient checkpointing work.

The dropout mask is drawn by torch, one a layer in the order of the layers, as unfused layers draw it.

Hu et al. 2021, https://arxiv.org/abs/2106.09685. Written from the formulas above.

Legend: ``T`` tokens, ``D`` inputs, ``N`` outputs, ``R`` LoRA rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

__all__ = ["LoraLayer", "linear_of", "lora_gated_mlp", "lora_linear"]

Weight = Callable[[torch.dtype], torch.Tensor]
# tensors, or None for what a layer does not have
Tensors = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """One linear layer, with or without an adapter.

    Attributes:
        weight: Returns the base weight ``[N, D]`` in a dtype, any strides; called in forward and backward.
        bias: ``[N]`` or None.
        down: ``A``, ``[R, D]``, or None without an adapter.
        up: ``B``, ``[N, R]``, or None without an adapter.
        scale: Factor on the adapter's product.
        dropout: Probability that an input of the adapter is dropped; 0 in evaluation.
    """

    weight: Weight
    bias: torch.Tensor | None = None
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    scale: float = 1.0
    dropout: float = 0.0

    def tensors(self) -> Tensors:
        """Return what gets a gradient."""
        return self.bias, self.down, self.up


def _to(x: Any, dtype: torch.dtype) -> Any:
    return None if x is None else x.to(dtype)


def _forward(x_TD: torch.Tensor, layer: LoraLayer, parts: Tensors) -> tuple[torch.Tensor, Tensors]:
    """Return the output, and ``(mask, u)`` for the backward."""
    bias, down, up = (_to(part, x_TD.dtype) for part in parts)
    y_TN = linear(x_TD, layer.weight(x_TD.dtype), bias)
    if down is None:
        return y_TN, (None, None)
    mask = None
    if layer.dropout > 0.0:
        x_TD, mask = torch.native_dropout(x_TD, layer.dropout, True)
    u_TR = x_TD @ down.t()
    y_TN.addmm_(u_TR, up.t(), alpha=layer.scale)
    return y_TN, (mask, u_TR)


def _backward(
    dy_TN: torch.Tensor,
    x_TD: Any,
    layer: LoraLayer,
    parts: Tensors,
    kept: Tensors,
    wanted: Sequence[bool],
    dx_TD: Any,
    *,
    wants_dx: bool,
) -> tuple[Any, Tensors]:
    """Return ``dx_TD`` with this layer's part added (a new matrix where it is None), and the gradients of ``parts``."""
    bias, down, up = parts
    mask, u_TR = kept
    grads: list[torch.Tensor | None] = [None, None, None]
    if bias is not None and wanted[0]:
        grads[0] = dy_TN.sum(0, dtype=torch.promote_types(dy_TN.dtype, torch.float32)).to(bias.dtype)
    if wants_dx:
        weight = layer.weight(dy_TN.dtype)
        dx_TD = dy_TN @ weight if dx_TD is None else dx_TD.addmm_(dy_TN, weight)
        del weight
    if down is None or up is None:
        return dx_TD, tuple(grads)
    keep = 1.0 / (1.0 - layer.dropout) if mask is not None else 1.0
    du_TR = (dy_TN @ up.to(dy_TN.dtype)).mul_(layer.scale)
    if wanted[2]:
        grads[2] = (dy_TN.t() @ u_TR).mul_(layer.scale).to(up.dtype)
    if wanted[1]:
        dropped = x_TD if mask is None else torch.ops.aten.native_dropout_backward(x_TD, mask, keep)
        grads[1] = (du_TR.t() @ dropped).to(down.dtype)
        del dropped
    if wants_dx:
        down = down.to(dy_TN.dtype)
        if mask is None:
            dx_TD.addmm_(du_TR, down)
        else:
            dx_TD.add_(torch.ops.aten.native_dropout_backward(du_TR @ down, mask, keep))
    return dx_TD, tuple(grads)


class _Linears(torch.autograd.Function):
    """All outputs of layers that share an input. Inputs: x, layers, then bias, A and B of each."""

    @staticmethod
    def forward(ctx, x, layers, *parts):
        x_TD = x.reshape(-1, x.shape[-1])
        outs, saved = [], []
        for i, layer in enumerate(layers):
            y_TN, kept = _forward(x_TD, layer, parts[3 * i : 3 * i + 3])
            outs.append(y_TN.view(*x.shape[:-1], y_TN.shape[-1]))
            saved += kept
        ctx.layers, ctx.shape = layers, x.shape
        # x is for dA alone
        ctx.save_for_backward(x_TD if any(layer.down is not None for layer in layers) else None, *parts, *saved)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *dys):
        layers, n = ctx.layers, 3 * len(ctx.layers)
        x_TD, *rest = ctx.saved_tensors
        parts, saved = rest[:n], rest[n:]
        dx_TD, grads = None, []
        for i, layer in enumerate(layers):
            dy_TN = dys[i].reshape(-1, dys[i].shape[-1])
            dx_TD, more = _backward(
                dy_TN,
                x_TD,
                layer,
                tuple(parts[3 * i : 3 * i + 3]),
                tuple(saved[2 * i : 2 * i + 2]),
                ctx.needs_input_grad[2 + 3 * i : 5 + 3 * i],
                dx_TD,
                wants_dx=ctx.needs_input_grad[0],
            )
            grads += more
        dx = None if dx_TD is None else dx_TD.view(ctx.shape)
        return dx, None, *grads


class _GatedMLP(torch.autograd.Function):
    """A gated MLP. Inputs: x, (gate, up, down), (glu, its backward), then bias, A and B of each layer."""

    @staticmethod
    def forward(ctx, x, layers, glu, *parts):
        x_TD = x.reshape(-1, x.shape[-1])
        gate_TN, kept_gate = _forward(x_TD, layers[0], parts[0:3])
        up_TN, kept_up = _forward(x_TD, layers[1], parts[3:6])
        y_TD, kept_down = _forward(glu[0](gate_TN, up_TN), layers[2], parts[6:9])
        ctx.layers, ctx.glu, ctx.shape = layers, glu, x.shape
        keeps_x = layers[0].down is not None or layers[1].down is not None
        ctx.save_for_backward(
            x_TD if keeps_x else None, gate_TN, up_TN, *parts, *kept_gate, *kept_up, *kept_down
        )  # fmt: skip
        return y_TD.view(*x.shape[:-1], y_TD.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        x_TD, gate_TN, up_TN, *rest = ctx.saved_tensors
        parts, kept = [tuple(rest[i : i + 3]) for i in (0, 3, 6)], [tuple(rest[i : i + 2]) for i in (9, 11, 13)]
        wanted = [ctx.needs_input_grad[i : i + 3] for i in (3, 6, 9)]
        h_TN = ctx.glu[0](gate_TN, up_TN) if ctx.layers[2].down is not None else None
        dy_TD = dy.reshape(-1, dy.shape[-1])
        dh_TN, grads_down = _backward(
            dy_TD, h_TN, ctx.layers[2], parts[2], kept[2], wanted[2], None, wants_dx=True
        )  # fmt: skip
        del h_TN
        dgate_TN, dup_TN = ctx.glu[1](dh_TN, gate_TN, up_TN)
        del dh_TN
        wants_dx = ctx.needs_input_grad[0]
        dx_TD, grads_gate = _backward(
            dgate_TN, x_TD, ctx.layers[0], parts[0], kept[0], wanted[0], None, wants_dx=wants_dx
        )
        dx_TD, grads_up = _backward(dup_TN, x_TD, ctx.layers[1], parts[1], kept[1], wanted[1], dx_TD, wants_dx=wants_dx)
        dx = None if dx_TD is None else dx_TD.view(ctx.shape)
        return dx, None, None, *grads_gate, *grads_up, *grads_down


def _in_compute_dtype(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in the dtype that everything is computed in, by a cast that autograd sees."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


@torch.compiler.disable
def lora_linear(x: torch.Tensor, layers: Sequence[LoraLayer]) -> tuple[torch.Tensor, ...]:
    """Return the output ``[..., N]`` of every layer for one input, in the compute dtype.

    Args:
        x: ``[..., D]``, any strides.
        layers: In the order in which unfused layers would draw their dropout masks.

    Returns:
        New contiguous tensors.
    """
    parts = [part for layer in layers for part in layer.tensors()]
    return _Linears.apply(_in_compute_dtype(x), tuple(layers), *parts)


@torch.compiler.disable
def lora_gated_mlp(
    x: torch.Tensor,
    gate: LoraLayer,
    up: LoraLayer,
    down: LoraLayer,
    *,
    glu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    glu_backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Return ``down(glu(gate(x), up(x)))``, in the compute dtype.

    Args:
        x: ``[..., D]``, any strides.
        gate: ``D`` to the inner width.
        up: As ``gate``.
        down: Inner width to ``D``.
        glu: ``(gate, up)`` to the inner activation, outside autograd.
        glu_backward: ``(gradient of it, gate, up)`` to the gradients of gate and up.

    Returns:
        A new contiguous tensor ``[..., D]``.
    """
    layers = (gate, up, down)
    parts = [part for layer in layers for part in layer.tensors()]
    return _GatedMLP.apply(_in_compute_dtype(x), layers, (glu, glu_backward), *parts)


def linear_of(
    x: torch.Tensor, weight: Callable[[torch.dtype], torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """Return ``x W^T + b`` for a frozen weight that is asked for anew in the backward, not kept.

    Args:
        x: ``[..., D]``, any strides.
        weight: As :attr:`LoraLayer.weight`.
        bias: ``[N]`` or None.
    """
    return lora_linear(x, [LoraLayer(weight=weight, bias=bias)])[0]
