"""The rule inside flex_attention equals the formula, and the lists of blocks leave out nothing that is seen."""

import dataclasses

import pytest
import torch

from tests.attention.dense import allowed_pairs, attend_dense, boundaries, random_qkv
from tuning.attention.flex import FlexKernel, list_blocks, load_flex
from tuning.attention.variant import PLAIN, Variant

BLOCK = 128
VARIANTS = {
    "plain": PLAIN,
    "window": Variant(window=3),
    "softcap": Variant(softcap=1.5, scale=0.7),
    "sinks": Variant(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all": Variant(window=3, softcap=1.5, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shape", [{}, {"width": 20}, {"value_width": 5}, {"kv_heads": 4}])
def test_equals_the_formula(variant, shape):
    lengths = [150, 1, 40, 9]
    q, k, v = (x.detach() for x in random_qkv(lengths, **shape))  # torch has no backward of it on the CPU
    kernel = FlexKernel(compiled=False)
    cu_seqlens = boundaries(lengths)
    out = kernel(q, k, v, cu_seqlens, 150, variant)
    dense = attend_dense(q, k, v, lengths, variant)
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_compiled_forward_and_backward(variant, dtype):
    lengths = [150, 1, 140, 9, 300]
    limit = 1e-3 if dtype == torch.float32 else 2e-2
    results = []
    for attend in (
        lambda q, k, v, rules: load_flex()(q, k, v, boundaries(lengths).cuda(), 300, rules),
        lambda q, k, v, rules: attend_dense(q, k, v, lengths, rules),
    ):
        tensors = [x.detach().to("cuda", dtype).requires_grad_() for x in random_qkv(lengths, width=64)]
        rules = variant
        if variant.sinks is not None:
            tensors.append(variant.sinks.cuda().requires_grad_())
            rules = dataclasses.replace(variant, sinks=tensors[-1])
        out = attend(*tensors[:3], rules)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
        results.append((out, *torch.autograd.grad((out * weight).sum(), tensors)))
    for ours, dense in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense, rtol=limit, atol=limit)


@pytest.mark.parametrize("window", [None, 1, 5, 100, 128, 129, 300, 1000])
@pytest.mark.parametrize(
    "lengths",
    [[128, 128], [1, 127, 129, 300, 40], [700], [300, 0, 85], [5, 3], [127, 1, 128, 1], [400, 400, 31]],
    ids=str,
)
def test_blocks_are_those_of_the_rule(lengths, window):
    """Seen in whole, in part, or not at all: as the T x T rule says, block by block."""
    tokens = sum(lengths)
    blocks = list_blocks(boundaries(lengths), tokens, window)
    num = -(-tokens // BLOCK)
    allowed = torch.zeros(num * BLOCK, num * BLOCK, dtype=torch.bool)
    allowed[:tokens, :tokens] = allowed_pairs(lengths, window)
    exists = torch.zeros_like(allowed)
    exists[:tokens, :tokens] = True
    tiles = allowed.view(num, BLOCK, num, BLOCK).permute(0, 2, 1, 3).flatten(2)
    real = exists.view(num, BLOCK, num, BLOCK).permute(0, 2, 1, 3).flatten(2)

    def listed(counts, indices):
        return [set(indices[0, 0, row, : counts[0, 0, row]].tolist()) for row in range(num)]

    partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
    whole = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    for row in range(num):
        seen = {column for column in range(num) if tiles[row, column].any()}
        full = {column for column in range(num) if (tiles[row, column] | ~real[row, column]).all()} & seen
        assert not partial[row] & whole[row]
        assert partial[row] | whole[row] == seen
        assert whole[row] <= full
        # the last row may be cut short; there a block seen whole may be listed as seen in part
        assert full - whole[row] <= ({row} if row < num - 1 else full)


def test_blocks_are_listed_once_a_batch_and_window():
    kernel = FlexKernel(compiled=False)
    cu_seqlens = boundaries([3, 4])
    first = kernel._blocks_of(cu_seqlens, 7, None)
    assert kernel._blocks_of(cu_seqlens, 7, None) is first
    windowed = kernel._blocks_of(cu_seqlens, 7, 2)
    assert windowed is not first
    assert kernel._blocks_of(cu_seqlens, 7, None) is first
    assert kernel._blocks_of(boundaries([3, 4]), 7, None) is not first


def test_nothing_of_the_size_of_the_squared_batch():
    """4,096 tokens: a T x T mask would be 16 MiB at one byte each."""
    with torch.profiler.profile(profile_memory=True) as profile:
        list_blocks(boundaries([1000, 2000, 1096]), 4096, 300)
    largest = max(abs(event.self_cpu_memory_usage) / max(event.count, 1) for event in profile.key_averages())
    assert largest < 2**20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_compilation_for_all_batches():
    """Other lengths, other numbers of samples: nothing is compiled after the second batch, and nothing runs unfused."""
    from torch._dynamo.utils import counters

    kernel, graphs = load_flex(), []
    for step in range(6):
        lengths = [100 + 37 * step, 50, *[11] * step]
        q, k, v = (x.detach().cuda().requires_grad_() for x in random_qkv(lengths, width=64))
        kernel(q, k, v, boundaries(lengths).cuda(), max(lengths), Variant(softcap=1.5)).sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_wait_for_the_device():
    kernel, lengths = load_flex(), [100, 50, 7]
    variant = Variant(window=30, softcap=1.5, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]).cuda())
    q, k, v = (x.detach().cuda().requires_grad_() for x in random_qkv(lengths, width=64))
    first, second = boundaries(lengths).cuda(), boundaries(lengths).cuda()
    kernel(q, k, v, first, max(lengths), variant).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel(q, k, v, second, max(lengths), variant).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
