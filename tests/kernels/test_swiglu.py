import pytest
import torch

from tests.kernels.parity import check
from tuning.kernels import reference
from tuning.kernels import swiglu as module
from tuning.kernels.swiglu import geglu, geglu_packed, swiglu, swiglu_packed

DTYPES = [torch.float32, torch.bfloat16]
SPLIT = {
    "silu": swiglu,
    "gelu_tanh": geglu,
    "gelu": lambda gate, up: geglu(gate, up, approximate="none"),
}
PACKED = {
    "silu": swiglu_packed,
    "gelu_tanh": geglu_packed,
    "gelu": lambda gate_up: geglu_packed(gate_up, approximate="none"),
}


def inputs(shape, dtype, device):
    return [(2 * torch.randn(shape, device=device)).to(dtype).requires_grad_() for _ in range(2)]


def compare(gate, up, activation="silu", grads=None):
    check(
        lambda g, u: [SPLIT[activation](g, u)],
        lambda g, u: [reference.glu(g, u, activation)],
        [gate, up],
        grads=grads,
    )


def compare_packed(gate_up, activation="silu", grads=None):
    check(
        lambda x: [PACKED[activation](x)],
        lambda x: [reference.glu(*x.chunk(2, dim=-1), activation)],
        [gate_up],
        grads=grads,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", SPLIT)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 33), (1, 3000), (5, 2048)])
def test_result_and_gradients_equal_the_reference(device, dtype, activation, shape):
    compare(*inputs(shape, dtype, device), activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", PACKED)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 5, 66), (2, 4100)])
def test_packed_halves(device, dtype, activation, shape):
    compare_packed(inputs(shape, dtype, device)[0], activation)


def test_far_from_zero_nothing_overflows(device):
    gate = torch.tensor([[-1e4, -88.0, -30.0, -1e-8, 1e-8, 30.0, 88.0, 1e4]], device=device)
    for activation in SPLIT:
        compare(gate.clone().requires_grad_(), torch.ones_like(gate).requires_grad_(), activation)


def test_no_rows(device):
    gate, up = inputs((0, 8), torch.float32, device)
    swiglu(gate, up).sum().backward()
    assert gate.grad.shape == (0, 8)
    (packed, _) = inputs((0, 8), torch.float32, device)
    swiglu_packed(packed).sum().backward()
    assert packed.grad.shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_a_fused_projection_and_other_strides(device, dtype):
    fused = torch.randn(4, 3, 40, device=device).to(dtype)
    compare(*(x.detach().requires_grad_() for x in fused.chunk(2, dim=-1)))
    compare(*(x.detach().requires_grad_() for x in (fused[..., ::2], fused[..., 1::2])))
    transposed = torch.randn(2, 6, 5, device=device).to(dtype)
    compare(*(x.t().detach().requires_grad_() for x in transposed))
    compare(fused[:, 0].detach().requires_grad_(), fused[:, 1].detach().contiguous().requires_grad_())


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_expanded_incoming_gradients(device, dtype):
    gate, up = inputs((5, 12), dtype, device)
    for grad in (
        torch.randn(5, 24, device=device).to(dtype)[:, ::2],
        torch.randn(12, 5, device=device).to(dtype).t(),
        torch.ones((), device=device, dtype=dtype).expand(5, 12),
    ):
        compare(gate, up, grads=[grad])
        compare_packed(torch.randn(5, 24, device=device).to(dtype).requires_grad_(), grads=[grad])


def test_inputs_are_left_alone_and_a_second_backward_works(device):
    gate, up = inputs((3, 8), torch.float32, device)
    before = gate.detach().clone()
    y = swiglu(gate, up)
    first = torch.autograd.grad(y.sum(), [gate, up], retain_graph=True)
    second = torch.autograd.grad(y.sum(), [gate, up])
    assert torch.equal(gate.detach(), before)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_packed_gradient_is_one_tensor(device):
    gate_up, _ = inputs((3, 8), torch.float32, device)
    (grad,) = torch.autograd.grad(swiglu_packed(gate_up).sum(), gate_up)
    assert grad.is_contiguous()


@pytest.mark.parametrize("activation", SPLIT)
def test_compiled_equals_eager(device, compile_fullgraph, activation):
    def loss(gate, up):
        return SPLIT[activation](gate, up).square().sum() + PACKED[activation](gate).sum()

    args = inputs((3, 34), torch.float32, device)
    eager = torch.autograd.grad(loss(*args), args)
    compiled = torch.autograd.grad(compile_fullgraph(loss)(*args), args)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)


def test_operator_registration(device):
    torch.library.opcheck(torch.ops.packtune.glu, (*inputs((3, 8), torch.float32, device), "silu"))


def test_without_a_kernel_the_reference_runs(device, monkeypatch):
    monkeypatch.setattr(module, "can_launch", lambda x: False)
    for activation in SPLIT:
        compare(*inputs((3, 8), torch.float32, device), activation)
        compare_packed(inputs((3, 8), torch.float32, device)[0], activation)


def test_wrong_shapes_are_refused(device):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the full text is compared below
        swiglu(torch.ones(2, 4, device=device), torch.ones(2, 3, device=device))
    assert str(error.value) == (
        "a gated unit needs gate and up of one shape and dtype; got (2, 4) torch.float32 and (2, 3) torch.float32"
    )
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the full text is compared below
        swiglu_packed(torch.ones(2, 3, device=device))
    assert str(error.value) == "a packed gated unit needs an even width; got (2, 3)"


@pytest.mark.gpu
@pytest.mark.parametrize("activation", SPLIT)
def test_real_sizes(device, activation):
    compare(*inputs((4099, 14336), torch.bfloat16, device), activation)
    compare_packed(inputs((1031, 2 * 8960), torch.bfloat16, device)[0], activation)


def _ignore_strides(*tensors):
    return [x.as_strided((1, x.numel()), (x.numel(), 1)) for x in tensors]


def _other_activation(dy, gate, up, activation, **kwargs):
    return _BACKWARD(dy, gate, up, "gelu", **kwargs)


def _swapped(*args, **kwargs):
    return _BACKWARD(*args, **kwargs)[::-1]


_BACKWARD = module._backward


@pytest.mark.parametrize(
    ("attribute", "mutant"), [("_rows", _ignore_strides), ("_backward", _other_activation), ("_backward", _swapped)]
)
def test_a_mutant_is_caught(device, monkeypatch, attribute, mutant):
    gate, up = inputs((5, 12), torch.float32, device)
    grad = torch.randn(12, 5, device=device).t()
    compare(gate, up, grads=[grad])
    monkeypatch.setattr(module, attribute, mutant)
    with pytest.raises(AssertionError):
        compare(gate, up, grads=[grad])


def test_tanh_and_exact_gelu_are_told_apart(device):
    with pytest.raises(AssertionError):
        check(
            lambda g, u: [geglu(g, u)],
            lambda g, u: [reference.glu(g, u, "gelu")],
            inputs((5, 12), torch.float32, device),
        )
