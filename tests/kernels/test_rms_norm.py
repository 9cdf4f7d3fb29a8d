import pytest
import torch

from tests.kernels.parity import assert_close, check
from tuning.kernels import reference
from tuning.kernels import rms_norm as module
from tuning.kernels.rms_norm import rms_norm

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]
CONVENTIONS = {
    "llama": {"offset": 0.0, "cast_before_weight": True},
    "gemma": {"offset": 1.0, "cast_before_weight": False},
    "olmo": {"offset": 0.0, "cast_before_weight": False},
}


def compare(x, weight, convention="llama", grads=None, eps=EPS):
    options = CONVENTIONS[convention]
    check(
        lambda x, w: [rms_norm(x, w, eps, **options)],
        lambda x, w: [reference.rms_norm(x, w, eps, **options)],
        [x.requires_grad_(), weight.requires_grad_()],
        grads=grads,
        roundings=2 if options["cast_before_weight"] else 1,
    )


def inputs(shape, dtype, device):
    return torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("width", [7, 33, 100, 128])
def test_result_and_gradients_equal_the_reference(device, dtype, convention, width):
    compare(*inputs((2, 9, width), dtype, device), convention)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_element(device, dtype):
    # with a small eps the result is the sign of x and its slope is all cancellation
    compare(*inputs((2, 9, 1), dtype, device), eps=0.5)


@pytest.mark.parametrize("shape", [(1, 4), (1, 1, 64), (4, 64), (3, 5, 2, 16)])
def test_one_token_and_more_leading_dimensions(device, shape):
    compare(*inputs(shape, torch.float32, device))


def test_one_row_without_a_leading_dimension(device):
    compare(*inputs((48,), torch.float32, device))


def test_no_rows(device):
    x, weight = inputs((0, 8), torch.float32, device)
    y = rms_norm(x.requires_grad_(), weight.requires_grad_(), EPS)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_more_rows_than_programs_walk_the_loop(device):
    compare(*inputs((700, 20), torch.float32, device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_input_keeps_its_memory_order_and_is_not_copied(device, dtype):
    x, weight = inputs((2, 5, 3, 16), dtype, device)
    compare(x.transpose(1, 2), weight, "gemma")
    y = rms_norm(x.transpose(1, 2), weight, EPS)
    assert y.stride() == x.transpose(1, 2).stride()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sliced_and_strided_inputs(device, dtype):
    x, weight = inputs((6, 40), dtype, device)
    compare(x[:, 4:20], weight[4:20].clone())
    compare(x[:, ::2], weight[::2].clone())
    compare(x[::2], weight)
    compare(x.t().contiguous().t(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_incoming_gradient(device, dtype):
    # https://github.com/unslothai/unsloth/pull/10617: values 1 0 1 0 at stride 2 were read as if contiguous
    grad = torch.tensor([1.0, 9, 0, 9, 1, 9, 0, 9], device=device, dtype=dtype)[None, ::2]
    x = torch.tensor([[1.0, 2, 3, 4]], device=device, dtype=dtype, requires_grad=True)
    weight = torch.ones(4, device=device, dtype=dtype)
    (dx,) = torch.autograd.grad(rms_norm(x, weight, 1e-12), x, grad)
    expected = torch.tensor([[0.31646, -0.09737, 0.21909, -0.19475]], device=device)
    assert torch.allclose(dx.float(), expected, atol=1e-5 if dtype == torch.float32 else 2e-3)
    x, weight = inputs((5, 12), dtype, device)
    compare(x, weight, grads=[torch.randn(5, 24, device=device).to(dtype)[:, ::2]])
    compare(x, weight, grads=[torch.randn(12, 5, device=device).to(dtype).t()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_expanded_incoming_gradient(device, dtype):
    # what y.sum().backward() sends: one element, all strides 0
    x, weight = inputs((5, 12), dtype, device)
    compare(x, weight, grads=[torch.ones((), device=device, dtype=dtype).expand(5, 12)])
    compare(x, weight, grads=[torch.randn(12, device=device).to(dtype).expand(5, 12)])


def test_frozen_weight_and_frozen_input(device):
    x, weight = inputs((5, 12), torch.float32, device)
    grad = torch.randn_like(x)
    both = torch.autograd.grad(rms_norm(x.requires_grad_(), weight.requires_grad_(), EPS), [x, weight], grad)
    (dx,) = torch.autograd.grad(rms_norm(x, weight.detach(), EPS), x, grad)
    (dw,) = torch.autograd.grad(rms_norm(x.detach(), weight, EPS), weight, grad)
    assert torch.equal(dx, both[0])
    assert torch.equal(dw, both[1])


def test_weight_gradient_is_the_same_in_every_run(device):
    x, weight = inputs((300, 24), torch.float32, device)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    grad = torch.randn_like(x)
    first, second = (torch.autograd.grad(rms_norm(x, weight, EPS), weight, grad)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_fp32_weight_with_bf16_input_gives_the_models_dtype(device):
    x, _ = inputs((5, 12), torch.bfloat16, device)
    _, weight = inputs((5, 12), torch.float32, device)
    assert rms_norm(x, weight, EPS).dtype == torch.float32
    assert rms_norm(x, weight, EPS, offset=1.0, cast_before_weight=False).dtype == torch.bfloat16


def test_large_values_do_not_overflow_fp32_sums(device):
    x = torch.full((2, 64), 3e4, device=device, dtype=torch.bfloat16)
    y = rms_norm(x, torch.ones(64, device=device, dtype=torch.bfloat16), EPS)
    assert_close("constant row", y, torch.ones(2, 64, dtype=torch.float64, device=device), roundings=2)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_compiled_equals_eager(device, compile_fullgraph, convention):
    def loss(x, weight):
        return rms_norm(x, weight, EPS, **CONVENTIONS[convention]).square().sum()

    x, weight = inputs((4, 33), torch.float32, device)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    eager = torch.autograd.grad(loss(x, weight), [x, weight])
    compiled = torch.autograd.grad(compile_fullgraph(loss)(x, weight), [x, weight])
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b)


def test_operator_registration(device):
    x, weight = inputs((3, 2, 8), torch.float32, device)
    args = (x.requires_grad_(), weight.requires_grad_(), EPS, 0.0, True)
    torch.library.opcheck(torch.ops.packtune.rms_norm, args)


def test_without_a_kernel_the_reference_runs(device, monkeypatch):
    monkeypatch.setattr(module, "can_launch", lambda x: False)
    compare(*inputs((4, 12), torch.float32, device), "gemma")


def test_wrong_shapes_are_refused(device):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the full text is compared below
        rms_norm(torch.ones(2, 4, device=device), torch.ones(3, device=device), EPS)
    assert str(error.value) == (
        "rms_norm needs a weight as wide as the rows and rows of 1 to 65536; x is (2, 4), weight (3,)"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(("rows", "width"), [(16384, 4096), (4099, 2880), (1000, 8192), (300, 16384), (200_000, 128)])
def test_real_sizes(device, convention, rows, width):
    compare(*inputs((rows, width), torch.bfloat16, device), convention)


# each mutation is a fault seen in the wild; the parity check must see it
def _ignore_strides(x, order):
    return torch.as_strided(x, (x.numel() // x.shape[-1], x.shape[-1]), (x.shape[-1], 1))


def _no_weight_gradient(*args, **kwargs):
    dx, dw = _BACKWARD(*args, **kwargs)
    return dx, torch.zeros_like(dw)


def _no_mean_term(dy, x, weight, rstd, offset, **kwargs):
    width = x.shape[-1]
    _, dw = _BACKWARD(dy, x, weight, rstd, offset, **kwargs)
    return dy * (offset + weight) * rstd.view(-1, 1).expand(-1, width), dw


_BACKWARD = module._backward


@pytest.mark.parametrize(
    ("attribute", "mutant"),
    [("as_rows", _ignore_strides), ("_backward", _no_weight_gradient), ("_backward", _no_mean_term)],
)
def test_a_mutant_is_caught(device, monkeypatch, attribute, mutant):
    x, weight = inputs((5, 12), torch.float32, device)
    grad = torch.randn(5, 24, device=device)[:, ::2]
    compare(x, weight, grads=[grad])
    monkeypatch.setattr(module, attribute, mutant)
    with pytest.raises(AssertionError):
        compare(x, weight, grads=[grad])


def test_a_wrong_convention_is_caught(device):
    x, weight = inputs((5, 12), torch.float32, device)
    with pytest.raises(AssertionError):
        check(
            lambda x, w: [rms_norm(x, w, EPS, offset=1.0)],
            lambda x, w: [reference.rms_norm(x, w, EPS)],
            [x.requires_grad_(), weight.requires_grad_()],
            roundings=2,
        )
