import pytest
import torch

from tests.kernels.parity import assert_close, double, relative_error
from tuning.kernels import linear_cross_entropy as module
from tuning.kernels import reference
from tuning.kernels.linear_cross_entropy import Tiling, linear_cross_entropy

DTYPES = [torch.float32, torch.bfloat16]
TILINGS = {"one tile": None, "tiles": Tiling(8), "fp32 sum": Tiling(8, half_sum=False)}
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.25},
    "padded": {"vocab_size": 97},
    "all": {"label_smoothing": 0.2, "softcap": 2.0, "logit_scale": 1.5, "vocab_size": 97},
}


def inputs(dtype, device, *, tokens=37, width=16, vocab=101, ignored=0.4, bias=False, rank=0):
    hidden = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(vocab, width, device=device)).to(dtype).requires_grad_()
    labels = torch.randint(0, min(vocab, 97), (tokens,), device=device)
    labels[torch.rand(tokens, device=device) < ignored] = -100
    extra = {}
    if bias:
        extra["bias_V"] = torch.randn(vocab, device=device).to(dtype).requires_grad_()
    if rank:
        extra["low_rank"] = tuple(
            (0.3 * torch.randn(n, rank, device=device)).to(dtype).requires_grad_() for n in (tokens, vocab)
        )
    return hidden, weight, labels, extra


def supervised(labels):
    return (labels != -100).nonzero()[:, 0]


def roundings(dtype, tiling, factor_known):
    """logits and their gradient, the product, and what the backward multiplies; a running sum in halves: one more."""
    return 2 + (not factor_known) + (tiling is not None and tiling.half_sum and dtype == torch.bfloat16)


def compare(hidden, weight, labels, extra, *, tiling=None, index=None, grad_scale=None, factor=1 / 37, **options):
    out = linear_cross_entropy(
        hidden, weight, labels, supervised_index=index, grad_scale=grad_scale, tiling=tiling, statistics=True,
        **extra, **options,
    )  # fmt: skip
    leaves = [hidden, weight, *([extra["bias_V"]] if "bias_V" in extra else []), *extra.get("low_rank", ())]
    copies = [double(x) for x in leaves]
    rest = iter(copies[2:])
    bias = next(rest) if "bias_V" in extra else None
    low_rank = (next(rest), next(rest)) if "low_rank" in extra else None
    ref = reference.linear_cross_entropy(copies[0], copies[1], labels, bias, low_rank, **options)
    half = hidden.dtype != torch.float32
    # the loss is an fp32 sum over logits of the model's dtype
    for name, value, expected in (("loss", out.loss_sum, ref[0]), ("entropy", out.entropy_sum, ref[2])):
        assert_close(name, value.to(hidden.dtype) if half else value, expected, roundings=1 if half else 4)
    assert int(out.num_tokens) == int(ref[1])
    if not half:
        assert int(out.num_correct) == int(ref[3])
    wanted = [i for i, x in enumerate(leaves) if x.requires_grad]
    grads = torch.autograd.grad(out.loss_sum * factor, [leaves[i] for i in wanted])
    expected = torch.autograd.grad(ref[0] * factor, [copies[i] for i in wanted])
    count = roundings(hidden.dtype, tiling, grad_scale is not None)
    for i, grad, want in zip(wanted, grads, expected, strict=True):
        assert grad.dtype == leaves[i].dtype
        assert_close(f"gradient of input {i}", grad, want, roundings=count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("name", OPTIONS)
def test_result_and_gradients_equal_the_reference(device, dtype, tiling, name):
    compare(*inputs(dtype, device), tiling=TILINGS[tiling], **OPTIONS[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("rank", [0, 3])
def test_bias_and_low_rank(device, dtype, tiling, rank):
    compare(*inputs(dtype, device, bias=True, rank=rank), tiling=TILINGS[tiling], **OPTIONS["all"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiling", TILINGS)
def test_supervised_rows_only(device, dtype, tiling):
    hidden, weight, labels, extra = inputs(dtype, device, bias=True, rank=3)
    compare(hidden, weight, labels, extra, tiling=TILINGS[tiling], index=supervised(labels), **OPTIONS["all"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiling", TILINGS)
def test_gradient_factor_known_beforehand(device, dtype, tiling):
    scale = torch.tensor(1 / 37, device=device)
    compare(*inputs(dtype, device, bias=True), tiling=TILINGS[tiling], grad_scale=scale)
    # and when another one comes, it is still right
    compare(*inputs(dtype, device), tiling=TILINGS[tiling], grad_scale=scale / 2)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("tiling", TILINGS)
def test_frozen_inputs(device, frozen, tiling):
    hidden, weight, labels, extra = inputs(torch.float32, device, bias=True, rank=2)
    {"hidden": hidden, "weight": weight, "bias": extra["bias_V"]}[frozen].requires_grad_(False)
    compare(hidden, weight, labels, extra, tiling=TILINGS[tiling])


def test_a_frozen_weight_costs_no_gradient_product(device, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the weight gradient was computed")

    monkeypatch.setattr(module, "_WeightGradient", refuse)
    hidden, weight, labels, extra = inputs(torch.float32, device)
    compare(hidden, weight.detach(), labels, extra)
    with pytest.raises(AssertionError, match="the weight gradient was computed"):
        compare(hidden, weight, labels, extra)


def test_without_grad_mode_no_gradient_is_computed(device, monkeypatch):
    hidden, weight, labels, _ = inputs(torch.float32, device)
    expected = linear_cross_entropy(hidden, weight, labels).loss_sum
    monkeypatch.setattr(module._Gradients, "__init__", lambda self, inputs, wanted: self._check(wanted), raising=True)
    monkeypatch.setattr(module._Gradients, "_check", lambda self, wanted: _none(self, wanted), raising=False)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels).loss_sum
    assert torch.equal(loss, expected.detach())
    assert not loss.requires_grad


def _none(gradients, wanted):
    assert not any(wanted)
    gradients.hidden = gradients.bias = gradients.low_rank_in = gradients.low_rank_out = None


@pytest.mark.parametrize("tiling", TILINGS)
def test_tied_embedding_adds_both_gradients(device, tiling):
    _, weight, labels, _ = inputs(torch.float32, device)
    ids = torch.randint(0, 101, (37,), device=device)

    def loss(weight, head):
        return head(torch.nn.functional.embedding(ids, weight), weight)

    out = loss(weight, lambda h, w: linear_cross_entropy(h, w, labels, tiling=TILINGS[tiling]).loss_sum)
    ref_weight = double(weight)
    ref = loss(ref_weight, lambda h, w: reference.linear_cross_entropy(h, w, labels)[0])
    (grad,), (expected,) = torch.autograd.grad(out, weight), torch.autograd.grad(ref, ref_weight)
    assert_close("tied weight", grad, expected, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("compact", [False, True])
def test_all_labels_ignored_is_zero_not_nan(device, dtype, tiling, compact):
    hidden, weight, labels, extra = inputs(dtype, device, ignored=2.0, bias=True, rank=2)
    index = supervised(labels) if compact else None
    out = linear_cross_entropy(
        hidden, weight, labels, supervised_index=index, statistics=True, tiling=TILINGS[tiling], **extra
    )
    out.loss_sum.backward()
    assert float(out.loss_sum.detach()) == float(out.entropy_sum) == int(out.num_tokens) == int(out.num_correct) == 0
    for x in (hidden, weight, extra["bias_V"], *extra["low_rank"]):
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_no_tokens_and_one_token(device):
    hidden, weight, labels, _ = inputs(torch.bfloat16, device, tokens=0)
    out = linear_cross_entropy(hidden, weight, labels, statistics=True)
    out.loss_sum.backward()
    assert float(out.loss_sum.detach()) == 0
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    compare(*inputs(torch.float32, device, tokens=1, ignored=0))


@pytest.mark.parametrize("vocab", [32000, 49155, 151936, 262144])
def test_real_vocabularies(device, vocab):
    compare(*inputs(torch.float32, device, tokens=3, width=4, vocab=vocab, ignored=0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_hidden_states_and_weight(device, dtype):
    hidden, weight, labels, extra = inputs(dtype, device, width=32)
    hidden, weight = hidden.detach(), weight.detach()
    compare(hidden[:, :16].requires_grad_(), weight[:, 16:].requires_grad_(), labels, extra)
    compare(hidden[:, ::2].requires_grad_(), weight[:, ::2].requires_grad_(), labels, extra, tiling=Tiling(8))
    compare(hidden.t().contiguous().t().requires_grad_(), weight.requires_grad_(), labels, extra)
    compare(hidden[:1].expand(37, 32).requires_grad_(), weight.requires_grad_(), labels, extra)


def test_fp32_weight_under_autocast_is_summed_in_fp32(device):
    hidden, weight, labels, extra = inputs(torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = linear_cross_entropy(hidden, weight, labels, tiling=Tiling(8), **extra)
    grads = torch.autograd.grad(out.loss_sum, [hidden, weight])
    copies = [double(hidden.to(torch.bfloat16)), double(weight.to(torch.bfloat16))]
    copies = [x.requires_grad_() for x in copies]
    expected = torch.autograd.grad(reference.linear_cross_entropy(*copies, labels)[0], copies)
    for grad, want in zip(grads, expected, strict=True):
        assert grad.dtype == torch.float32
        assert relative_error(grad, want) < 2 * 2.0**-7


def test_a_sum_of_halves_beats_bf16_and_survives_outliers(device, monkeypatch):
    # one column 1,000 times the others, as final norms have it, and a label that all rows share
    torch.manual_seed(1)
    hidden, weight, labels, _ = inputs(torch.bfloat16, device, tokens=256, width=16, ignored=0)
    hidden = (hidden.detach() * torch.tensor([1000.0] + [1.0] * 15, device=device)).to(torch.bfloat16)
    weight = (weight.detach() * torch.tensor([1e-3] + [1.0] * 15, device=device)).to(torch.bfloat16).requires_grad_()
    labels[:] = 3
    ref_weight = double(weight)
    ref = reference.linear_cross_entropy(hidden.double(), ref_weight, labels)[0]
    (expected,) = torch.autograd.grad(ref, ref_weight)

    def error(tiling):
        out = linear_cross_entropy(hidden, weight, labels, tiling=tiling)
        (grad,) = torch.autograd.grad(out.loss_sum, weight)
        assert torch.isfinite(grad).all()
        return max(relative_error(grad[:, i], expected[:, i]) for i in range(16))

    halves, one_tile = error(Tiling(8)), error(None)
    monkeypatch.setattr(module, "_WeightGradient", _SumInBf16)
    # the interpreter truncates once more where it converts the sum
    assert halves - one_tile < 0.3 * (error(Tiling(8)) - one_tile)


class _SumInBf16(module._WeightGradient):
    def __init__(self, inputs, options, grad_scale, tiling, *, num_tiles):
        super().__init__(inputs, options, grad_scale, tiling, num_tiles=1)


def test_a_tile_fits_its_budget():
    # 8,192 rows of a 32,000-word vocabulary in bf16 are one tile
    assert module._tile_rows(8192, 32000 * 2, Tiling()) == 8192
    rows = module._tile_rows(8192, 151936 * 2, Tiling())
    assert rows % 128 == 0
    assert rows * 151936 * 2 <= module.TILE_BYTES < 2**29
    assert module._tile_rows(0, 64, Tiling()) == 1
    assert module._tile_rows(37, 64, Tiling(8)) == 8


def test_a_second_backward_is_refused(device):
    hidden, weight, labels, _ = inputs(torch.float32, device)
    loss = linear_cross_entropy(hidden, weight, labels).loss_sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    assert str(error.value) == (
        "linear_cross_entropy gave its gradients away in the first backward; its graph has no second one"
    )


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("compact", [False, True])
def test_compiled_equals_eager(device, compile_fullgraph, name, compact):
    hidden, weight, labels, extra = inputs(torch.float32, device, bias=True, rank=2)
    index = supervised(labels) if compact else None
    leaves = [hidden, weight, extra["bias_V"], *extra["low_rank"]]

    def loss(hidden, weight):
        out = linear_cross_entropy(hidden, weight, labels, supervised_index=index, **extra, **OPTIONS[name])
        return out.loss_sum / out.num_tokens

    eager = torch.autograd.grad(loss(hidden, weight), leaves)
    compiled = compile_fullgraph(loss)(hidden, weight)
    for a, b in zip(eager, torch.autograd.grad(compiled, leaves), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_operator_registration(device):
    hidden, weight, labels, extra = inputs(torch.float32, device, bias=True)
    args = (hidden, weight, labels, extra["bias_V"], None, None, None, torch.ones((), device=device))
    tail = ([0.1, 1.0, 0.0], [-100, 101], [True, True, True, False, False], True)
    torch.library.opcheck(torch.ops.packtune.linear_cross_entropy, (*args, *tail))


def test_without_a_kernel_the_reference_runs(device, monkeypatch):
    monkeypatch.setattr(module, "can_launch", lambda x: False)
    for options in OPTIONS.values():
        compare(*inputs(torch.float32, device, bias=True, rank=2), **options)


def test_wrong_shapes_are_refused(device):
    hidden, weight, labels, _ = inputs(torch.float32, device)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the full text is compared below
        linear_cross_entropy(hidden, weight[:, :3], labels)
    assert str(error.value) == ("linear_cross_entropy needs hidden [T, D] and weight [V, D]; got (37, 16) and (101, 3)")
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the full text is compared below
        linear_cross_entropy(hidden, weight, labels[:5])
    assert str(error.value) == "linear_cross_entropy needs one label a row; got (5,) for (37, 16)"
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the full text is compared below
        linear_cross_entropy(hidden, weight, labels, vocab_size=102)
    assert str(error.value) == "vocab_size must be 1 to 101, the rows of the weight; got 102"


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("tiling", [None, Tiling(256), Tiling(256, half_sum=False)])
def test_real_sizes(device, name, compact, tiling):
    options = {**OPTIONS[name], **({"vocab_size": 31990} if "vocab_size" in OPTIONS[name] else {})}
    hidden = torch.randn(1031, 1024, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (0.02 * torch.randn(32000, 1024, device=device)).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 31990, (1031,), device=device)
    labels[torch.rand(1031, device=device) < 0.4] = -100
    index = supervised(labels) if compact else None
    scale = torch.tensor(1 / 37, device=device)
    compare(hidden, weight, labels, {}, tiling=tiling, index=index, grad_scale=scale, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("tiling", "allowed"), [(None, 1.01), (Tiling(1024), 1.05)])
def test_error_is_that_of_the_plain_head(device, tiling, allowed):
    # one tile makes the same roundings as the plain head, up to chance; four sums of halves add an error of
    # sqrt((1/4 + 2/4 + 3/4 + 1) / 8**2) = 0.2 of the last rounding, in the root of squares 2 % to 4 %
    hidden = torch.randn(4096, 1024, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (0.03 * torch.randn(50000, 1024, device=device)).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 50000, (4096,), device=device)
    scale = torch.tensor(1 / 4096, device=device)
    ours = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, labels, grad_scale=scale, tiling=tiling).loss_sum * scale,
        [hidden, weight],
    )
    plain_loss = torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels)
    plain = torch.autograd.grad(plain_loss, [hidden, weight])
    copies = [double(hidden), double(weight)]
    exact = torch.autograd.grad(torch.nn.functional.cross_entropy(copies[0] @ copies[1].t(), labels), copies)
    for a, b, c in zip(ours, plain, exact, strict=True):
        assert relative_error(a, c) <= allowed * relative_error(b, c)


def _last_tile_lost(original):
    def add_(self, tile, dx, h):
        if dx.shape[0] == 8:
            original(self, tile, dx, h)

    return add_


def _without(field, value):
    def mutate(original):
        def mutant(logits, labels, options, **kwargs):
            return original(logits, labels, options._replace(**{field: value}), **kwargs)

        return mutant

    return mutate


def _factor_dropped(original):
    def rescale_(dst, src, factor):
        return dst if factor.dim() == 0 and dst.dtype == src.dtype else original(dst, src, factor)

    return rescale_


def _rows_misplaced(original):
    def put_(out, index, start, stop, a, b):
        original(out, None if index is None else index.flip(0), start, stop, a, b)

    return put_


@pytest.mark.parametrize(
    ("owner", "attribute", "mutate"),
    [
        (module._WeightGradient, "add_", _last_tile_lost),
        (module, "softmax_rows_", _without("label_smoothing", 0.0)),
        (module, "softmax_rows_", _without("softcap", 0.0)),
        (module, "softmax_rows_", _without("logit_scale", 1.0)),
        (module, "softmax_rows_", _without("vocab_size", 101)),
        (module, "_rescale_", _factor_dropped),
        (module, "_put_", _rows_misplaced),
    ],
)
def test_a_mutant_is_caught(device, monkeypatch, owner, attribute, mutate):
    hidden, weight, labels, extra = inputs(torch.float32, device)
    args = {"tiling": Tiling(8), "index": supervised(labels), **OPTIONS["all"]}
    compare(hidden, weight, labels, extra, **args)
    monkeypatch.setattr(owner, attribute, mutate(getattr(owner, attribute)))
    with pytest.raises(AssertionError):
        compare(hidden, weight, labels, extra, **args)
