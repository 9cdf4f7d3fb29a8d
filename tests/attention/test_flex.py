"""The rule inside flex_attention equals the formula, and the lists of blocks leave out nothing that is seen."""

import dataclasses

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from tests.attention.dense import allowed_pairs, attend_dense, boundaries, random_qkv
from tuning.attention import flex
from tuning.attention.flex import FlexKernel, list_blocks, load_flex
from tuning.attention.variant import PLAIN, Variant
from tuning.errors import UnsupportedError

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
    kernel = FlexKernel(backend=None)
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
    kernel = FlexKernel(backend=None)
    cu_seqlens = boundaries([3, 4])
    first = kernel._blocks_of(cu_seqlens, 7, None)
    assert kernel._blocks_of(cu_seqlens, 7, None) is first
    windowed = kernel._blocks_of(cu_seqlens, 7, 2)
    assert windowed is not first
    assert kernel._blocks_of(cu_seqlens, 7, None) is first
    assert kernel._blocks_of(boundaries([3, 4]), 7, None) is not first


def test_blocks_are_listed_anew_when_boundaries_are_written_over():
    """A loop with fixed buffers keeps the tensor and changes what is in it."""
    kernel = FlexKernel(backend=None)
    cu_seqlens = boundaries([3, 4])
    first = kernel._blocks_of(cu_seqlens, 7, None)
    cu_seqlens.copy_(boundaries([5, 2]))
    assert kernel._blocks_of(cu_seqlens, 7, None) is not first
    with torch.inference_mode():
        fixed = boundaries([3, 4])
        assert kernel._blocks_of(fixed, 7, None) is not kernel._blocks_of(fixed, 7, None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_full_widths_are_not_copied(monkeypatch):
    given = []
    attend = flex._attend_of.__wrapped__
    monkeypatch.setattr(
        flex, "_attend_of", lambda kind, backend: lambda *args: given.extend(args[:3]) or attend(kind, backend)(*args)
    )
    q, k, v = (x.detach() for x in random_qkv([3, 4], width=32))
    FlexKernel(backend=None)(q, k, v, boundaries([3, 4]), 4, PLAIN)
    assert [x.data_ptr() for x in given] == [x.data_ptr() for x in (q, k, v)]


def test_nothing_of_the_size_of_the_squared_batch():
    """4,096 tokens: a T x T mask would be 16 MiB at one byte each."""
    with torch.profiler.profile(profile_memory=True) as profile:
        list_blocks(boundaries([1000, 2000, 1096]), 4096, 300)
    largest = max(abs(event.self_cpu_memory_usage) / max(event.count, 1) for event in profile.key_averages())
    assert largest < 2**20


@pytest.fixture
def graphs(monkeypatch):
    """Compile on the CPU without a code generator, backward pass included; gives the inputs of each graph."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *args: None)
    torch._dynamo.reset()
    flex._attend_of.cache_clear()
    seen = []

    def backend(graph, inputs):
        seen.append([node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"])
        return aot_eager(graph, inputs)

    yield seen, backend
    torch._dynamo.reset()
    flex._attend_of.cache_clear()


# first 256 tokens: as many as four heads of width 64 have numbers, in as many blocks as there are key/value heads
BATCHES = [[200, 56], [100, 60], [137, 50, 11], [500, 12], [300, 5, 2, 2, 600], [129]]


def _compare(kernel, variant, lengths, width=20):
    results = []
    for attend in (
        lambda q, k, v: kernel(q, k, v, boundaries(lengths), max(lengths), variant),
        lambda q, k, v: attend_dense(q, k, v, lengths, variant),
    ):
        tensors = random_qkv(lengths, width=width)
        # views of a matrix of tokens and features, as projections make them
        out = attend(*(x.flatten(1).clone().view(x.shape) for x in tensors))
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    for ours, dense in zip(*results, strict=True):
        assert (ours - dense).norm() / dense.norm() < 1e-5


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("width", [20, 64])
def test_compiled_once_for_all_lengths(variant, width, graphs):
    seen, backend = graphs
    kernel = FlexKernel(backend=backend)
    for lengths in BATCHES:
        _compare(kernel, variant, lengths, width)
        assert len(seen) == 1
    _compare(kernel, variant, [30, 20], width)
    _compare(kernel, variant, [3, 110], width)
    assert len(seen) == 2, "one for a block of tokens or less"


def test_no_number_of_a_rule_is_a_symbol(graphs, monkeypatch):
    """A rule that captures a number makes the compiler fail, since lengths are dynamic; text is constant to it."""
    kernel = FlexKernel(backend=graphs[1])
    _compare(kernel, VARIANTS["softcap"], [100, 50])

    def naive(softcap):
        cap = float(softcap)
        return lambda score, batch, head, q, k: cap * torch.tanh(score / cap)

    monkeypatch.setattr(flex, "_softcap_rule", naive)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="Pending unbacked symbols"):
        _compare(kernel, Variant(softcap=1.25), [100, 50])


def _attend_with_many_caps(backend):
    kernel, lengths = FlexKernel(backend=backend), [100, 50]
    q, k, v = (x.detach() for x in random_qkv(lengths))
    for cap in (1, 2, 3, 4):
        kernel(q, k, v, boundaries(lengths), 100, Variant(softcap=float(cap)))


@torch._dynamo.config.patch(recompile_limit=2)
def test_many_kinds_of_layers_in_one_process(graphs, monkeypatch):
    seen, backend = graphs
    _attend_with_many_caps(backend)
    assert len(seen) == 4
    flex._attend_of.cache_clear()
    monkeypatch.setattr(flex, "_with_own_code", lambda function, name: function)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        _attend_with_many_caps(backend)


def test_never_uncompiled(graphs):
    """The compiler may be switched off; then the squared batch would be made in silence."""
    kernel, (q, k, v) = FlexKernel(backend=graphs[1]), random_qkv([3, 4])
    with torch.compiler.set_stance("force_eager"), pytest.raises(UnsupportedError) as error:
        kernel(q, k, v, boundaries([3, 4]), 4, PLAIN)
    assert str(error.value) == (
        "flex_attention was to run compiled, but torch.compile is switched off or gave up, and uncompiled it would "
        "make a matrix of the squared batch. Let torch.compile work (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE "
        "unset), or train without --padding_free."
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("variant", [Variant(softcap=1.5), Variant(window=30)], ids=["softcap", "window"])
def test_one_compilation_for_all_batches(variant):
    """Other lengths, other numbers of samples: nothing is compiled after the first batch."""
    from torch._dynamo.utils import counters

    kernel, compiled = load_flex(), []
    for step in range(6):
        lengths = [100 + 37 * step, 50, *[11] * step]
        q, k, v = (x.detach().cuda().requires_grad_() for x in random_qkv(lengths, width=64))
        kernel(q, k, v, boundaries(lengths).cuda(), max(lengths), variant).sum().backward()
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[0] == compiled[-1]


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
