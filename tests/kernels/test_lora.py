import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.kernels.parity import assert_close
from tuning.kernels import lora as module
from tuning.kernels import reference
from tuning.kernels.lora import LoraLayer, lora_gated_mlp, lora_linear
from tuning.kernels.swiglu import glu_backward, glu_forward

DTYPES = [torch.float32, torch.bfloat16]
LEADING = [(5,), (2, 3), (1, 7)]


def build(width, out, device, dtype, *, bias=False, adapter=True, scale=0.7, dropout=0.0, rank=3, adapter_dtype=None):
    """Return a layer, with everything that trains as a leaf, and its base weight."""
    weight = (torch.randn(out, width, device=device) / width**0.5).to(dtype)
    adapter_dtype = adapter_dtype or dtype
    tensors = {}
    if bias:
        tensors["bias"] = torch.randn(out, device=device).to(dtype).requires_grad_()
    if adapter:
        tensors["down"] = torch.randn(rank, width, device=device).div(width**0.5).to(adapter_dtype).requires_grad_()
        tensors["up"] = torch.randn(out, rank, device=device).to(adapter_dtype).requires_grad_()
    return LoraLayer(weight=lambda dtype: weight.to(dtype), scale=scale, dropout=dropout, **tensors), weight


def leaves(layers):
    return [part for layer in layers for part in layer.tensors() if part is not None]


def plain(x, layer, weight):
    """Compute a layer unfused, in the dtype of ``x``."""
    adapter = None if layer.down is None else (layer.down.to(x.dtype), layer.up.to(x.dtype), layer.scale)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return reference.lora(x, weight.to(x.dtype), bias, adapter, layer.dropout)


def plain_mlp(x, layers, weights, activation):
    gate, up, down = layers
    hidden = reference.glu(plain(x, gate, weights[0]), plain(x, up, weights[1]), activation)
    return plain(hidden, down, weights[2])


def fused_mlp(x, layers, activation):
    return lora_gated_mlp(
        x, *layers,
        glu=functools.partial(glu_forward, activation=activation),
        glu_backward=functools.partial(glu_backward, activation=activation),
    )  # fmt: skip


def compare(fused, unfused, x, layers, roundings, *, seeded=False):
    """Compare results and every gradient; in fp64 unless the random numbers must be those of the dtype."""
    inputs = [x, *leaves(layers)]
    torch.manual_seed(3)
    outs = fused(x)
    dys = [torch.randn_like(out) for out in outs]
    grads = torch.autograd.grad(outs, inputs, dys, allow_unused=True)
    torch.manual_seed(3)
    refs = unfused(x if seeded else x.double())
    expected = torch.autograd.grad(refs, inputs, [dy.to(ref.dtype) for dy, ref in zip(dys, refs, strict=True)])
    for i, (out, ref) in enumerate(zip(outs, refs, strict=True)):
        assert_close(f"result {i}", out, ref, roundings)
    for i, (grad, ref) in enumerate(zip(grads, expected, strict=True)):
        assert grad is not None, f"gradient {i} is missing"
        assert grad.dtype == inputs[i].dtype
        # computed in the input's dtype, rounded to the leaf's: the coarser of the two says how close it must be
        coarser = x.dtype if x.dtype.itemsize < grad.dtype.itemsize else grad.dtype
        assert_close(f"gradient {i}", grad.to(coarser), ref, roundings + 1)


def inputs(leading, width, dtype, device):
    return torch.randn(*leading, width, device=device).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("bias", [False, True])
def test_layers_that_share_an_input(device, dtype, leading, bias):
    built = [build(24, out, device, dtype, bias=bias, scale=scale) for out, scale in ((16, 0.5), (8, 2.0), (8, 1.0))]
    layers, _weights = zip(*built, strict=True)
    compare(
        lambda x: lora_linear(x, layers),
        lambda x: [plain(x, *pair) for pair in built],
        inputs(leading, 24, dtype, device),
        layers,
        roundings=3,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_mlp(device, dtype, activation, bias):
    built = [build(w, o, device, dtype, bias=bias) for w, o in ((16, 40), (16, 40), (40, 16))]
    layers, weights = zip(*built, strict=True)
    compare(
        lambda x: [fused_mlp(x, layers, activation)],
        lambda x: [plain_mlp(x, layers, weights, activation)],
        inputs((2, 5), 16, dtype, device),
        layers,
        roundings=6,
    )


@pytest.mark.parametrize("present", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 0, 0)])
def test_an_mlp_with_adapters_missing(device, present):
    shapes = ((16, 40), (16, 40), (40, 16))
    built = [
        build(w, o, device, torch.float32, adapter=bool(on), bias=True)
        for (w, o), on in zip(shapes, present, strict=True)
    ]
    layers, weights = zip(*built, strict=True)
    compare(
        lambda x: [fused_mlp(x, layers, "silu")],
        lambda x: [plain_mlp(x, layers, weights, "silu")],
        inputs((2, 5), 16, torch.float32, device),
        layers,
        roundings=6,
    )


def test_layers_with_an_adapter_missing(device):
    built = [build(16, 8, device, torch.float32, adapter=on) for on in (True, False)]
    layers = [layer for layer, _ in built]
    compare(
        lambda x: lora_linear(x, layers),
        lambda x: [plain(x, *pair) for pair in built],
        inputs((3,), 16, torch.float32, device),
        layers,
        roundings=3,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_draws_the_masks_of_the_unfused_layers(device, dtype):
    built = [build(24, out, device, dtype, dropout=p) for out, p in ((16, 0.3), (8, 0.5))]
    layers = [layer for layer, _ in built]
    compare(
        lambda x: lora_linear(x, layers),
        lambda x: [plain(x, *pair) for pair in built],
        inputs((4, 3), 24, dtype, device),
        layers,
        roundings=4,
        seeded=True,
    )


def test_dropout_in_an_mlp(device):
    built = [build(w, o, device, torch.float32, dropout=0.4) for w, o in ((16, 40), (16, 40), (40, 16))]
    layers, weights = zip(*built, strict=True)
    compare(
        lambda x: [fused_mlp(x, layers, "silu")],
        lambda x: [plain_mlp(x, layers, weights, "silu")],
        inputs((2, 5), 16, torch.float32, device),
        layers,
        roundings=6,
        seeded=True,
    )


@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_another_dtype_than_the_base(device, adapter_dtype):
    base = torch.bfloat16 if adapter_dtype == torch.float32 else torch.float32
    built = [build(24, 16, device, base, adapter_dtype=adapter_dtype)]
    compare(
        lambda x: lora_linear(x, [built[0][0]]),
        lambda x: [plain(x, *built[0])],
        inputs((5,), 24, base, device),
        [built[0][0]],
        roundings=3,
    )


def test_autocast_decides_the_dtype(device):
    layer, weight = build(24, 16, device, torch.float32, bias=True)
    x = inputs((5,), 24, torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        (out,) = lora_linear(x, [layer])
        low = plain(x, layer, weight)
    assert out.dtype == low.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), [x, *leaves([layer])])
    expected = torch.autograd.grad(plain(x, layer, weight).sum(), [x, *leaves([layer])])
    for grad, ref in zip(grads, expected, strict=True):
        assert grad.dtype == torch.float32
        assert float((grad - ref).norm() / ref.norm()) < 2e-2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_recomputes_the_same(device, use_reentrant):
    built = [build(w, o, device, torch.float32, dropout=0.4) for w, o in ((16, 40), (16, 40), (40, 16))]
    layers = [layer for layer, _ in built]
    x = inputs((2, 5), 16, torch.float32, device)

    def gradients(run):
        torch.manual_seed(5)
        return torch.autograd.grad(run(x).square().sum(), [x]) if not use_reentrant else backward(run)

    def backward(run):
        for leaf in (x, *leaves(layers)):
            leaf.grad = None
        run(x).square().sum().backward()
        return [leaf.grad.clone() for leaf in (x, *leaves(layers))]

    block = functools.partial(fused_mlp, layers=layers, activation="silu")
    expected = gradients(block)
    torch.manual_seed(5)
    got = gradients(lambda x: checkpoint(block, x, use_reentrant=use_reentrant))
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_no_gradient_is_computed_that_nobody_wants(device):
    calls = []
    built, weight = build(16, 8, device, torch.float32)
    layer = LoraLayer(weight=lambda dtype: calls.append(1) or weight, down=built.down, up=built.up)
    x = torch.randn(3, 16, device=device)
    (out,) = lora_linear(x, [layer])
    out.sum().backward()
    assert len(calls) == 1  # the base weight is for the gradient of the input alone
    assert built.down.grad is not None
    with torch.no_grad():
        (out,) = lora_linear(x, [layer])
    assert not out.requires_grad


def test_no_tokens(device):
    layers = [build(16, 8, device, torch.float32)[0] for _ in range(2)]
    x = inputs((0,), 16, torch.float32, device)
    outs = lora_linear(x, layers)
    assert [out.shape for out in outs] == [(0, 8), (0, 8)]
    grads = torch.autograd.grad([out.sum() for out in outs], [x, *leaves(layers)])
    assert all(not grad.any() for grad in grads)


def test_strided_inputs_and_gradients(device):
    built = [build(12, 8, device, torch.float32)]
    layers = [built[0][0]]
    x = torch.randn(4, 24, device=device)[:, ::2].detach().requires_grad_()
    (out,) = lora_linear(x, layers)
    dy = torch.randn(4, 16, device=device)[:, ::2]
    got = torch.autograd.grad(out, [x, *leaves(layers)], dy)
    expected = torch.autograd.grad(plain(x, *built[0]), [x, *leaves(layers)], dy)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_second_backward_gives_the_same(device):
    layers = [build(12, 8, device, torch.float32, dropout=0.2)[0]]
    x = inputs((4,), 12, torch.float32, device)
    (out,) = lora_linear(x, layers)
    first, second = (torch.autograd.grad(out.sum(), [x, *leaves(layers)], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_only_what_the_backward_needs_is_kept(device):
    layers = [build(32, 64, device, torch.float32)[0] for _ in range(3)]
    x = inputs((10,), 32, torch.float32, device)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        lora_linear(x, layers)
    sizes = sorted(t.numel() for t in kept.values() if t.data_ptr() not in {p.data_ptr() for p in leaves(layers)})
    assert sizes == [30, 30, 30, 320]  # u of each layer, and the input once


@pytest.mark.parametrize("what", ["scale", "mask", "input"])
def test_a_wrong_backward_would_be_seen(device, monkeypatch, what):
    original = module._backward

    def wrong(dy_TN, x_TD, layer, parts, kept, wanted, dx_TD, *, wants_dx):
        if what == "scale":
            layer = LoraLayer(weight=layer.weight, scale=1.0, dropout=layer.dropout)
        if what == "mask":
            kept = (None, kept[1])
        if what == "input":
            x_TD = x_TD.flip(0)
        return original(dy_TN, x_TD, layer, parts, kept, wanted, dx_TD, wants_dx=wants_dx)

    monkeypatch.setattr(module, "_backward", wrong)
    with pytest.raises(AssertionError):
        test_dropout_draws_the_masks_of_the_unfused_layers(device, torch.float32)
