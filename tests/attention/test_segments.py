"""Sample-by-sample attention equals the formula, forward and backward, and no sample sees another."""

import dataclasses

import pytest
import torch

from tests.attention.dense import attend_dense, boundaries, random_qkv
from tuning.attention import segments
from tuning.attention.segments import attend_segments
from tuning.attention.variant import PLAIN, Variant

VARIANTS = {
    "plain": PLAIN,
    "window of one": Variant(window=1),
    "window": Variant(window=3),
    "window over all": Variant(window=100),
    "scale": Variant(scale=0.7),
    "softcap": Variant(softcap=1.5),
    "sinks": Variant(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all together": Variant(window=3, scale=0.7, softcap=1.5, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}
LENGTHS = {
    "unequal": [5, 1, 9, 2],
    "equal": [4, 4, 4],
    "one sample": [7],
    "one token": [1],
    "empty samples": [3, 0, 5, 0, 0],
}


def _both(lengths, variant, **shape):
    """Return outputs and gradients of the kernel and of the formula."""
    cu_seqlens, longest = boundaries(lengths), max(lengths)
    return (
        _run(lambda q, k, v, rules: attend_segments(q, k, v, cu_seqlens, longest, rules), lengths, variant, shape),
        _run(lambda q, k, v, rules: attend_dense(q, k, v, lengths, rules), lengths, variant, shape),
    )


def _run(attend, lengths, variant, shape):
    tensors = random_qkv(lengths, **shape)
    if variant.sinks is not None:
        variant = dataclasses.replace(variant, sinks=variant.sinks.detach().clone().requires_grad_())
        tensors = (*tensors, variant.sinks)
    out = attend(*tensors[:3], variant)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return (out, *torch.autograd.grad((out * weight).sum(), tensors))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_equals_the_formula(lengths, variant):
    for ours, dense in zip(*_both(lengths, variant), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [{"kv_heads": 4}, {"kv_heads": 1}, {"width": 7}, {"width": 80}, {"value_width": 5}],
    ids=["every head its own", "one for all heads", "odd width", "wide", "values of another width"],
)
@pytest.mark.parametrize(
    "variant", [PLAIN, Variant(window=3), Variant(softcap=1.5)], ids=["plain", "window", "softcap"]
)
def test_head_shapes(shape, variant):
    for ours, dense in zip(*_both([5, 1, 9], variant, **shape), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", [Variant(window=3), Variant(softcap=1.5, window=3)], ids=["fused", "written out"])
def test_blocks_of_queries(variant, monkeypatch):
    monkeypatch.setattr(segments, "_MIN_BLOCK", 4)
    for ours, dense in zip(*_both([11, 4, 5], variant), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-5, atol=1e-5)


def test_no_sample_sees_another():
    lengths = [5, 6, 4]
    q, k, v = random_qkv(lengths)
    before = attend_segments(q, k, v, boundaries(lengths), 6, PLAIN)
    changed = [x.detach().clone() for x in (q, k, v)]
    for x in changed:
        x[5:11] += 3
    after = attend_segments(*changed, boundaries(lengths), 6, PLAIN)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[11:], after[11:])
    assert not torch.equal(before[5:11], after[5:11])
    # the same check sees a leak: without boundaries the last sample moves
    merged = boundaries([sum(lengths)])
    assert not torch.equal(
        attend_segments(q, k, v, merged, 15, PLAIN)[11:], attend_segments(*changed, merged, 15, PLAIN)[11:]
    )


def test_dropout_drops():
    lengths = [6, 6]
    q, k, v = random_qkv(lengths)
    for variant in (Variant(dropout=0.5), Variant(dropout=0.5, softcap=5.0)):
        torch.manual_seed(0)
        dropped = attend_segments(q, k, v, boundaries(lengths), 6, variant)
        kept = attend_segments(q, k, v, boundaries(lengths), 6, dataclasses.replace(variant, dropout=0.0))
        assert not torch.allclose(dropped, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", [PLAIN, Variant(softcap=1.5)], ids=["fused", "written out"])
def test_half_precision(dtype, variant):
    lengths = [5, 9]
    q, k, v = (x.detach().to(dtype) for x in random_qkv(lengths))
    out = attend_segments(q, k, v, boundaries(lengths), 9, variant)
    assert out.dtype == dtype
    torch.testing.assert_close(out, attend_dense(q, k, v, lengths, variant), rtol=2e-2, atol=2e-2)


def test_a_window_needs_no_square_of_the_length():
    """4,096 tokens with a window of 16: a mask of length x length would be 16 MiB alone."""
    length = 4096
    q, k, v = (x.detach() for x in random_qkv([length], heads=1, kv_heads=1))
    with torch.profiler.profile(profile_memory=True) as profile:
        attend_segments(q, k, v, boundaries([length]), length, Variant(window=16))
    largest = max(abs(event.self_cpu_memory_usage) / max(event.count, 1) for event in profile.key_averages())
    assert largest < 2**22
