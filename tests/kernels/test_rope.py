import math

import pytest
import torch

from tests.kernels.parity import check
from tuning.kernels import reference
from tuning.kernels import rope as module
from tuning.kernels.rope import rope

DTYPES = [torch.float32, torch.bfloat16]


def inputs(dtype, device, *, batch=2, length=5, heads=(3, 2), width=10, rot=None, tables=None):
    """Queries, keys (token-major, as projections give them) and one table a batch row, halves unequal on purpose."""
    q, k = (
        torch.randn(batch, length, h, width, device=device).to(dtype).transpose(1, 2).requires_grad_() for h in heads
    )
    shape = (tables or batch, length, rot or width)
    cos, sin = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    return q, k, cos, sin


def compare(q, k, cos, sin, positions=None, grads=None, *, half_tables=False):
    def expected(q, k, cos, sin):
        if half_tables:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        return reference.rope(q, k, cos, sin, positions)

    check(
        lambda q, k, cos, sin: rope(q, k, cos, sin, positions, half_tables=half_tables),
        expected,
        [q, k, cos, sin],
        grads=grads,
    )


def angles(positions, width):
    """Tables as models build them: ``[..., width]`` cosines and sines of position times inverse frequency."""
    inverse = 1.0 / 10000 ** (torch.arange(0, width, 2, device=positions.device) / width)
    phase = torch.cat([positions[..., None] * inverse] * 2, dim=-1)
    return phase.cos(), phase.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 6, 10, 64, 80])
def test_result_and_gradients_equal_the_reference(device, dtype, width):
    compare(*inputs(dtype, device, width=width))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rot"), [(10, 4), (80, 32), (64, 48)])
def test_partial_rotary_copies_the_rest(device, dtype, width, rot):
    compare(*inputs(dtype, device, width=width, rot=rot))


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (5, 5), (12, 3)])
def test_head_counts(device, heads):
    compare(*inputs(torch.float32, device, heads=heads))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_table_for_all_rows(device, dtype):
    compare(*inputs(dtype, device, tables=1))


def test_tables_of_half_the_width(device):
    q, k, cos, sin = inputs(torch.float32, device, width=12, rot=6)
    compare(q, k, cos, sin, half_tables=True)


@pytest.mark.parametrize("batch", [1, 2])
def test_positions_index_a_cache(device, batch):
    q, k, _, _ = inputs(torch.float32, device)
    cos, sin = (torch.randn(50, 10, device=device) for _ in range(2))
    positions = torch.randint(0, 50, (batch, 5), device=device)
    compare(q, k, cos, sin, positions)


def test_each_row_has_its_own_positions(device):
    # https://github.com/linkedin/Liger-Kernel/pull/477: row 0's angles were used for all rows
    positions = torch.tensor([[0, 1], [5, 6]], device=device)
    q = torch.tensor([1.0, 0.0], device=device).expand(2, 1, 2, 2)
    turned, _ = rope(q, q, *angles(positions, 2))
    assert turned[0, 0, 0].tolist() == [1.0, 0.0]
    assert turned[1, 0, 0].tolist() == pytest.approx([math.cos(5), math.sin(5)], abs=1e-6)
    assert turned[1, 0, 0].tolist() == pytest.approx([0.283662, -0.958924], abs=1e-6)
    cache = angles(torch.arange(8, device=device), 2)
    assert torch.allclose(rope(q, q, *cache, positions)[0], turned)


@pytest.mark.parametrize("width", [6, 10, 80])
def test_positions_reset_inside_a_packed_row(device, width):
    # https://github.com/foundation-model-stack/fms-acceleration/issues/33
    positions = torch.tensor([[0, 1, 0, 1]], device=device)
    q = torch.randn(1, 3, 2, width, device=device).repeat(1, 1, 2, 1)
    turned, _ = rope(q, q, *angles(positions, width))
    assert torch.equal(turned[:, :, 2:], turned[:, :, :2])
    assert not torch.equal(turned[:, :, 1], turned[:, :, 0])


def test_equals_the_models_own_function(device):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    positions = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 0, 1, 2]], device=device)
    q, k, _, _ = inputs(torch.float32, device, width=8)
    cos, sin = angles(positions, 8)
    ours, theirs = rope(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin)
    grads = [torch.randn_like(x) for x in ours]
    for a, b in zip(
        (*ours, *torch.autograd.grad(ours, (q, k), grads)),
        (*theirs, *torch.autograd.grad(theirs, (q, k), grads)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(device, dtype):
    q, k, cos, sin = inputs(dtype, device)
    head_major = [x.detach().contiguous().requires_grad_() for x in (q, k)]
    compare(*head_major, cos, sin)
    # slices of one fused projection
    fused = torch.randn(2, 5, 7, 10, device=device).to(dtype).transpose(1, 2)
    compare(fused[:, :3].requires_grad_(), fused[:, 3:5].requires_grad_(), cos, sin)
    # the last dimension strided, in inputs, tables and incoming gradients
    spread = torch.randn(2, 3, 5, 20, device=device).to(dtype)[..., ::2]
    tables = torch.randn(2, 2, 5, 20, device=device).to(dtype)[..., ::2]
    compare(spread.requires_grad_(), k, *tables, grads=[spread.detach() + 1, torch.ones_like(k)])
    compare(q, k, cos, sin, grads=[spread.detach(), torch.randn(2, 2, 10, 5, device=device).to(dtype).mT])


def test_expanded_incoming_gradients_and_inputs(device):
    q, k, cos, sin = inputs(torch.float32, device)
    compare(q, k, cos, sin, grads=[torch.ones((), device=device).expand(q.shape), torch.ones_like(k)])
    compare(q, k, torch.randn(1, 1, 10, device=device).expand(2, 5, 10), sin)


def test_a_key_without_a_gradient(device):
    q, k, cos, sin = inputs(torch.float32, device)
    turned, _ = rope(q, k, cos, sin)
    turned.sum().backward()
    assert torch.equal(k.grad, torch.zeros_like(k))
    assert q.grad.abs().sum() > 0


def test_result_is_token_major_where_the_input_is_and_new_memory(device):
    q, k, cos, sin = inputs(torch.float32, device)
    before = q.detach().clone()
    turned, _ = rope(q, k, cos, sin)
    assert turned.stride() == q.stride()
    assert torch.equal(q.detach(), before)


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (1, 1)])
def test_no_tokens_and_one_token(device, batch, length):
    q, k, cos, sin = inputs(torch.float32, device, batch=batch, length=length)
    cos, sin = cos[:batch], sin[:batch]
    if batch * length:
        compare(q, k, cos, sin)
    else:
        sum(x.sum() for x in rope(q, k, cos, sin)).backward()
        assert q.grad.shape == q.shape


def test_compiled_equals_eager(device, compile_fullgraph):
    def loss(q, k, cos, sin):
        turned = rope(q, k, cos, sin)
        return turned[0].square().sum() + turned[1].sum()

    args = inputs(torch.float32, device)
    eager = torch.autograd.grad(loss(*args), args[:2])
    compiled = torch.autograd.grad(compile_fullgraph(loss)(*args), args[:2])
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b)


def test_operator_registration(device):
    q, k, cos, sin = inputs(torch.float32, device)
    torch.library.opcheck(torch.ops.packtune.rope, (q, k, cos, sin, None, False, False))


def test_without_a_kernel_the_reference_runs(device, monkeypatch):
    monkeypatch.setattr(module, "can_launch", lambda x: False)
    compare(*inputs(torch.float32, device))
    q, k, cos, sin = inputs(torch.float32, device, width=12, rot=6)
    compare(q, k, cos, sin, half_tables=True)


def test_wrong_shapes_are_refused(device):
    q, k, cos, sin = inputs(torch.float32, device)
    with pytest.raises(ValueError, match="rope needs q and k of one batch, length and head width"):
        rope(q, k[..., :4], cos, sin)
    with pytest.raises(ValueError, match="rope needs equal tables of an even width up to 10"):
        rope(q, k, cos[..., :3], sin[..., :3])
    with pytest.raises(ValueError, match=r"rope needs tables \[1 or 2, 5, R\], or \[positions, R\] with position_ids"):
        rope(q, k, cos[:, :1], sin[:, :1])
    with pytest.raises(ValueError, match="rope gives no gradient to its tables"):
        rope(q, k, cos.requires_grad_(), sin)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width", "rot"), [((32, 8), 128, 128), ((32, 32), 80, 32), ((28, 4), 128, 128)])
@pytest.mark.parametrize("batch", [1, 2])
def test_real_sizes(device, batch, heads, width, rot):
    compare(*inputs(torch.bfloat16, device, batch=batch, length=4099, heads=heads, width=width, rot=rot))


def _one_table(table, *, has_positions):
    return 0, table.stride(1)


def _wrong_way(*args, **kwargs):
    return _TURN(*args, **{**kwargs, "backward": False})


def _equal_halves(q, k, cos, sin, position_ids, **kwargs):
    half = cos.shape[-1] // 2
    return _TURN(q, k, cos[..., :half], sin[..., :half], position_ids, **{**kwargs, "half_tables": True})


def _ignore_stride(x):
    return x.as_strided(x.shape, (*x.stride()[:-1], 1))


_TURN = module._turn


@pytest.mark.parametrize(
    ("attribute", "mutant"),
    [
        ("_table_strides", _one_table),
        ("_turn", _wrong_way),
        ("_turn", _equal_halves),
        ("_unit_last", _ignore_stride),
    ],
)
def test_a_mutant_is_caught(device, monkeypatch, attribute, mutant):
    q, k, cos, sin = inputs(torch.float32, device)
    grads = [torch.randn(2, 3, 5, 20, device=device)[..., ::2], torch.ones_like(k)]
    compare(q, k, cos, sin, grads=grads)
    monkeypatch.setattr(module, attribute, mutant)
    with pytest.raises(AssertionError):
        compare(q, k, cos, sin, grads=grads)
