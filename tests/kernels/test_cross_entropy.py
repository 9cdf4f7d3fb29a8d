import pytest
import torch

from tests.kernels.parity import assert_close, check, double
from tuning.kernels import _softmax, reference
from tuning.kernels import cross_entropy as module
from tuning.kernels.cross_entropy import cross_entropy, cross_entropy_

DTYPES = [torch.float32, torch.bfloat16]
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.25},
    "padded": {"vocab_size": 30},
    "all": {"label_smoothing": 0.2, "softcap": 2.0, "logit_scale": 1.5, "vocab_size": 30},
}


def inputs(rows, columns, dtype, device, *, ignored=0.3):
    logits = (2 * torch.randn(rows, columns, device=device)).to(dtype)
    labels = torch.randint(0, min(columns, 30), (rows,), device=device)
    labels[torch.rand(rows, device=device) < ignored] = -100
    return logits.requires_grad_(), labels


def compare(logits, labels, factor=0.37, **options):
    def kernel(logits):
        out = cross_entropy(logits, labels, statistics=True, **options)
        return [out.loss_sum * factor, out.entropy_sum], out

    def plain(logits):
        loss, count, entropy, correct = reference.cross_entropy(logits, labels, **options)
        return [loss * factor, entropy], (count, correct)

    # the losses are fp32 sums whatever the dtype of the logits
    outs, sums = kernel(logits)
    ref_logits = double(logits)
    refs, (count, correct) = plain(ref_logits)
    for name, out, ref in zip(("loss", "entropy"), outs, refs, strict=True):
        assert_close(name, out, ref, roundings=4)
    assert int(sums.num_tokens) == int(count)
    assert int(sums.num_correct) == int(correct)
    (grad,) = torch.autograd.grad(outs[0], logits)
    (expected,) = torch.autograd.grad(refs[0], ref_logits)
    assert grad.dtype == logits.dtype
    assert_close("gradient", grad, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("columns", [31, 64, 100])
def test_result_and_gradient_equal_the_reference(device, dtype, name, columns):
    compare(*inputs(9, columns, dtype, device), **OPTIONS[name])


@pytest.mark.parametrize("columns", [32000, 49155, 151936, 262144])
def test_real_vocabularies(device, columns):
    logits = torch.randn(2, columns, device=device).requires_grad_()
    compare(logits, torch.tensor([columns - 1, 3], device=device), label_smoothing=0.1)


def test_hand_computed_smoothing(device):
    # https://github.com/linkedin/Liger-Kernel/issues/243 and https://github.com/pytorch/pytorch/issues/73205
    logits = torch.tensor([[2.0, 0, 0], [0, 0, 0], [5, 5, 5]], device=device)
    out = cross_entropy(logits, torch.tensor([0, 2, -100], device=device), label_smoothing=0.1)
    assert float(out.loss_sum / out.num_tokens) == pytest.approx(0.735745, abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_labels_ignored_is_zero_not_nan(device, dtype):
    # https://github.com/linkedin/Liger-Kernel/issues/177
    logits = torch.randn(4, 7, device=device).to(dtype).requires_grad_()
    out = cross_entropy(logits, torch.full((4,), -100, device=device), statistics=True)
    out.loss_sum.backward()
    assert float(out.loss_sum.detach()) == float(out.entropy_sum) == int(out.num_tokens) == int(out.num_correct) == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_no_rows_and_one_row(device):
    logits = torch.empty(0, 7, device=device, requires_grad=True)
    out = cross_entropy(logits, torch.empty(0, dtype=torch.long, device=device), statistics=True)
    out.loss_sum.backward()
    assert float(out.loss_sum.detach()) == 0
    assert logits.grad.shape == (0, 7)
    compare(*inputs(1, 33, torch.float32, device, ignored=0))


def test_another_ignored_label(device):
    logits, labels = inputs(9, 31, torch.float32, device)
    compare(logits, torch.where(labels == -100, 5, labels), ignore_index=5)


def test_masked_vocabulary_of_minus_infinity(device):
    logits, labels = inputs(5, 40, torch.float32, device)
    logits = torch.cat([torch.full((5, 40), -torch.inf, device=device), logits.detach()], 1).requires_grad_()
    out = cross_entropy(logits, torch.where(labels >= 0, labels + 40, labels), statistics=True)
    (grad,) = torch.autograd.grad(out.loss_sum, logits)
    expected = reference.cross_entropy(logits.detach()[:, 40:].double(), labels)
    assert_close("loss", out.loss_sum, expected[0])
    assert_close("entropy", out.entropy_sum, expected[2], roundings=4)
    assert torch.equal(grad[:, :40], torch.zeros_like(grad[:, :40]))


def test_huge_logits_do_not_overflow(device):
    logits = torch.tensor([[1e4, -1e4, 3.0], [-1e30, 1e30, 0.0]], device=device, requires_grad=True)
    out = cross_entropy(logits, torch.tensor([0, 1], device=device))
    out.loss_sum.backward()
    assert float(out.loss_sum.detach()) == 0
    assert torch.isfinite(logits.grad).all()


def test_ties_count_as_arg_max_does(device):
    logits = torch.zeros(3, 5, device=device)
    out = cross_entropy(logits, torch.tensor([0, 1, 4], device=device), statistics=True)
    assert int(out.num_correct) == 1


def test_a_label_outside_the_vocabulary_is_not_silent(device):
    logits = torch.zeros(2, 5, device=device)
    for label in (5, -1, 7_000_000):
        assert cross_entropy(logits, torch.tensor([0, label], device=device)).loss_sum.isnan()
    assert cross_entropy(logits, torch.tensor([0, 4], device=device), vocab_size=4).loss_sum.isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(device, dtype):
    logits, labels = inputs(9, 64, dtype, device)
    logits = logits.detach()
    compare(logits[:, :40].requires_grad_(), labels)
    compare(logits[:, ::2].requires_grad_(), labels)
    compare(logits[::2].requires_grad_(), labels[::2])
    compare(logits.t().contiguous().t().requires_grad_(), labels)
    compare(logits[:1].expand(9, 64).requires_grad_(), labels)


def test_overwriting_gives_the_same_gradient_and_refuses_a_second_backward(device):
    logits, labels = inputs(9, 33, torch.float32, device)
    (expected,) = torch.autograd.grad(cross_entropy(logits, labels).loss_sum, logits)
    copy = logits.detach().clone().requires_grad_()
    loss = cross_entropy_(copy, labels).loss_sum
    (grad,) = torch.autograd.grad(loss, copy, retain_graph=True)
    assert torch.equal(grad, expected)
    assert grad.data_ptr() == copy.data_ptr()
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    assert str(error.value) == (
        "cross_entropy_ wrote the gradient over the logits, so its graph has no second backward; "
        "use cross_entropy for that"
    )


def test_second_backward_of_the_plain_function(device):
    logits, labels = inputs(9, 33, torch.float32, device)
    loss = cross_entropy(logits, labels).loss_sum
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_statistics_do_not_change_the_loss(device):
    logits, labels = inputs(9, 33, torch.float32, device)
    plain = cross_entropy(logits, labels)
    assert plain.entropy_sum is None
    assert plain.num_correct is None
    assert torch.equal(plain.loss_sum, cross_entropy(logits, labels, statistics=True).loss_sum)


@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_equals_eager(device, compile_fullgraph, name):
    logits, labels = inputs(5, 33, torch.float32, device)

    def loss(logits):
        out = cross_entropy(logits, labels, statistics=True, **OPTIONS[name])
        return out.loss_sum / out.num_tokens

    (eager,) = torch.autograd.grad(loss(logits), logits)
    (compiled,) = torch.autograd.grad(compile_fullgraph(loss)(logits), logits)
    assert torch.equal(eager, compiled)


def test_operator_registration(device):
    logits, labels = inputs(5, 33, torch.float32, device)
    torch.library.opcheck(torch.ops.packtune.cross_entropy, (logits, labels, -100, 0.1, 1.0, 0.0, 33, True))


def test_without_a_kernel_the_reference_runs(device, monkeypatch):
    monkeypatch.setattr(module, "can_launch", lambda x: False)
    for options in OPTIONS.values():
        compare(*inputs(9, 33, torch.float32, device), **options)


def test_wrong_shapes_are_refused(device):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the full text is compared below
        cross_entropy(torch.ones(2, 4, device=device), torch.ones(3, dtype=torch.long, device=device))
    assert str(error.value) == "cross_entropy needs logits [T, V] and labels [T]; got (2, 4) and (3,)"


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("rows", "columns"), [(1031, 32000), (260, 151936), (100, 262144)])
def test_real_sizes(device, name, rows, columns):
    compare(*inputs(rows, columns, torch.bfloat16, device), **OPTIONS[name])


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device):
    # 4 GiB of logits: row offsets pass 2**31 elements; https://github.com/linkedin/Liger-Kernel/issues/1483
    rows, columns = 16400, 131072
    logits = torch.zeros(rows, columns, device=device, dtype=torch.bfloat16)
    logits[-1, 7] = 20.0
    labels = torch.full((rows,), -100, device=device)
    labels[-1] = 7
    out = cross_entropy(logits.requires_grad_(), labels, statistics=True)
    (grad,) = torch.autograd.grad(out.loss_sum, logits)
    # log(1 + 131071 e^-20); a log-sum-exp near 20 is a multiple of 2**-19 in fp32
    assert out.loss_sum.item() == pytest.approx(2.7012097e-4, abs=2**-20)
    assert int(out.num_correct) == 1
    assert float(grad[-1].sum().abs()) < 1e-3
    assert float(grad[:-1].abs().max()) == 0


def _without(field, value):
    def mutant(logits, labels, options, **kwargs):
        return _ROWS(logits, labels, options._replace(**{field: value}), **kwargs)

    return mutant


def _ignored_rows_count(logits, labels, options, **kwargs):
    return _ROWS(logits, labels.clamp_min(0), options, **kwargs)


def _upstream_gradient_dropped(logits, labels, options, *, grad_scale=None, **kwargs):
    grad_scale = None if grad_scale is None else torch.ones_like(grad_scale)
    return _ROWS(logits, labels, options, grad_scale=grad_scale, **kwargs)


def _strides_ignored(x):
    return x.as_strided(x.shape, (x.shape[-1], 1))


_ROWS = _softmax.softmax_rows_


@pytest.mark.parametrize(
    ("attribute", "mutant"),
    [
        ("softmax_rows_", _without("label_smoothing", 0.0)),
        ("softmax_rows_", _without("softcap", 0.0)),
        ("softmax_rows_", _without("logit_scale", 1.0)),
        ("softmax_rows_", _without("vocab_size", 33)),
        ("softmax_rows_", _ignored_rows_count),
        ("softmax_rows_", _upstream_gradient_dropped),
        ("_unit_last", _strides_ignored),
    ],
)
def test_a_mutant_is_caught(device, monkeypatch, attribute, mutant):
    logits, labels = inputs(9, 66, torch.float32, device, ignored=0.5)
    logits = logits.detach()[:, ::2].requires_grad_()
    compare(logits, labels, **OPTIONS["all"])
    monkeypatch.setattr(module, attribute, mutant)
    with pytest.raises(AssertionError):
        compare(logits, labels, **OPTIONS["all"])


def test_the_check_itself_sees_a_wrong_gradient(device):
    logits, labels = inputs(9, 33, torch.float32, device)
    with pytest.raises(AssertionError):
        check(
            lambda x: [cross_entropy(x, labels).loss_sum],
            lambda x: [reference.cross_entropy(x, labels)[0] + 1e-3 * x.sum() - 1e-3 * x.detach().sum()],
            [logits],
        )
