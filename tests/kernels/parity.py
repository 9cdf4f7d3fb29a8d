"""Compare a kernel with the fp64 reference: the result and every gradient."""

from collections.abc import Callable, Sequence

import torch

from tests.kernels.tolerances import tolerance


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of ``ref``; NaN anywhere gives NaN."""
    difference = (out.detach().double() - ref.detach().double()).norm()
    size = ref.detach().double().norm()
    return float(difference / size) if size > 0 else float(difference)


def assert_close(what: str, out: torch.Tensor, ref: torch.Tensor, roundings: int = 1) -> None:
    """Fail if ``out`` is further from the fp64 ``ref`` than its dtype and roundings allow; NaN always fails."""
    assert out.shape == ref.shape, f"{what}: shape {tuple(out.shape)}, expected {tuple(ref.shape)}"
    error = relative_error(out, ref)
    allowed = tolerance(out.dtype, roundings, interpreted=not out.is_cuda)
    assert error <= allowed, f"{what}: relative error {error:.2e} of {out.dtype}, allowed {allowed:.2e}"


def double(x: torch.Tensor) -> torch.Tensor:
    """Return an fp64 leaf with the values of ``x``."""
    return x.detach().double().requires_grad_(x.requires_grad)


def check(
    kernel: Callable[..., Sequence[torch.Tensor]],
    reference: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    *,
    grads: Sequence[torch.Tensor] | None = None,
    roundings: int = 1,
) -> None:
    """Run both on the same values and compare results and gradients of all inputs that require one.

    Args:
        kernel: Takes ``inputs``, returns tensors.
        reference: Takes the fp64 values of ``inputs``.
        inputs: Any dtype and strides.
        grads: Incoming gradients; random ones if None.
        roundings: Roundings on the way to each result.
    """
    outs = kernel(*inputs)
    refs_in = [double(x) for x in inputs]
    refs = reference(*refs_in)
    grads = [torch.randn_like(out) for out in outs] if grads is None else grads
    for i, (out, ref) in enumerate(zip(outs, refs, strict=True)):
        assert_close(f"result {i}", out, ref, roundings)
    wanted = [i for i, x in enumerate(inputs) if x.requires_grad]
    got = torch.autograd.grad(outs, [inputs[i] for i in wanted], grads)
    expected = torch.autograd.grad(refs, [refs_in[i] for i in wanted], [g.double() for g in grads])
    for i, out, ref in zip(wanted, got, expected, strict=True):
        assert out.dtype == inputs[i].dtype
        assert_close(f"gradient of input {i}", out, ref, roundings)
