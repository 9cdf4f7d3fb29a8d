"""The adapters pass on what each package's function wants.

On the CPU the packages are stand-ins, as their kernels need a GPU. On a GPU each that is installed is compared with the
formula, forward and backward.
"""

import dataclasses
import sys
import types

import pytest
import torch

from tests.attention.dense import attend_dense, boundaries, random_qkv
from tuning.attention import packages
from tuning.attention.providers import PROVIDERS, Request
from tuning.attention.variant import PLAIN, Variant

LENGTHS = [3, 5]


class _Recorder:
    """Stands in for a package's function: notes how it was called and returns the values."""

    def __init__(self, returns_tuple=False):
        self.returns_tuple = returns_tuple

    def __call__(self, q, k, v, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        out = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return (out, "lse") if self.returns_tuple else out


def _install(monkeypatch, name, function, attribute="flash_attn_varlen_func"):
    module = types.ModuleType(name)
    setattr(module, attribute, function)
    for end in [i for i, char in enumerate(name) if char == "."]:
        monkeypatch.setitem(sys.modules, name[:end], types.ModuleType(name[:end]))
    monkeypatch.setitem(sys.modules, name, module)
    return function


def _call(kernel, variant):
    q, k, v = random_qkv(LENGTHS)
    cu_seqlens = boundaries(LENGTHS)
    out = kernel(q, k, v, cu_seqlens, 5, variant)
    assert torch.equal(out, v.repeat_interleave(2, 1))
    return cu_seqlens


def _assert_boundaries(first, second, cu_seqlens):
    assert first is cu_seqlens
    assert second is cu_seqlens


@pytest.mark.parametrize(("variant", "window"), [(PLAIN, (-1, 0)), (Variant(window=4), (3, 0))])
def test_torch_varlen_old(monkeypatch, variant, window):
    recorded = {}

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size):
        recorded.update(cu=(cu_seq_q, cu_seq_k), longest=(max_q, max_k), scale=scale, window=window_size)
        return value.repeat_interleave(2, 1)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    cu_seqlens = _call(packages.load_torch_varlen(), variant)
    _assert_boundaries(*recorded["cu"], cu_seqlens)
    assert (recorded["longest"], recorded["scale"], recorded["window"]) == ((5, 5), None, window)


def test_torch_varlen_new_is_told_of_groups(monkeypatch):
    recorded = {}

    def varlen_attn(query, key, value, a, b, c, d, *, scale=None, window_size, enable_gqa=False):
        recorded["enable_gqa"] = enable_gqa
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    _call(packages.load_torch_varlen(), PLAIN)
    assert recorded["enable_gqa"] is True
    q, k, v = random_qkv(LENGTHS, kv_heads=4)
    packages.load_torch_varlen()(q, k, v, boundaries(LENGTHS), 5, PLAIN)
    assert recorded["enable_gqa"] is False


def test_the_real_torch_varlen_has_the_arguments_we_give():
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)
    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size"} <= set(names)


@pytest.mark.parametrize("returns_tuple", [False, True])
def test_flash_attn_2_and_3(monkeypatch, returns_tuple):
    variant = Variant(window=4, scale=0.5, softcap=30.0)
    two = _install(monkeypatch, "flash_attn", _Recorder())
    three = _install(monkeypatch, "flash_attn_interface", _Recorder(returns_tuple))
    for function, kernel in ((two, packages.load_flash_attn_2()), (three, packages.load_flash_attn_3())):
        cu_seqlens = _call(kernel, variant)
        _assert_boundaries(*function.args[:2], cu_seqlens)
        assert function.args[2:] == (5, 5)
        expected = {"softmax_scale": 0.5, "causal": True, "window_size": (3, 0), "softcap": 30.0}
        assert {key: function.kwargs[key] for key in expected} == expected
    assert two.kwargs["dropout_p"] == 0.0
    _call(packages.load_flash_attn_2(), Variant(dropout=0.1))
    assert two.kwargs["dropout_p"] == 0.1
    assert two.kwargs["softcap"] == 0.0
    assert two.kwargs["window_size"] == (-1, 0)


@pytest.mark.parametrize(("window", "expected"), [(None, (None, None)), (4, (3, 0))])
def test_flash_attn_4(monkeypatch, window, expected):
    function = _install(monkeypatch, "flash_attn.cute", _Recorder(returns_tuple=True))
    sinks = torch.zeros(4)
    cu_seqlens = _call(packages.load_flash_attn_4(), Variant(window=window, sinks=sinks))
    _assert_boundaries(function.kwargs["cu_seqlens_q"], function.kwargs["cu_seqlens_k"], cu_seqlens)
    assert function.kwargs["window_size"] == expected
    assert function.kwargs["causal"] is True
    assert function.kwargs["learnable_sink"] is sinks
    # a tensor here would be compiled into the backward pass
    assert type(function.kwargs["max_seqlen_q"]) is int


def test_a_missing_package_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ImportError):
        packages.load_flash_attn_3()


ON_GPU = {
    "plain": PLAIN,
    "window": Variant(window=100),
    "scale": Variant(scale=0.3),
    "softcap": Variant(softcap=2.0),
    "sinks": Variant(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "window and sinks": Variant(window=100, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("provider", [p for p in PROVIDERS if p.device_type == "cuda"], ids=lambda p: p.name)
@pytest.mark.parametrize("variant", ON_GPU.values(), ids=ON_GPU)
@pytest.mark.parametrize("width", [64, 128, 80])
def test_on_the_gpu(provider, variant, width):
    request = Request(
        device_type="cuda", capability=torch.cuda.get_device_capability(), dtype=torch.bfloat16, width=width,
        value_width=width, window=variant.window is not None, softcap=variant.softcap is not None,
        sinks=variant.sinks is not None,
    )  # fmt: skip
    reason = provider.refuse(request) or provider.find()
    if reason is not None:
        pytest.skip(f"{provider.name}: {reason}")
    lengths = [150, 1, 300, 0, 64, 129]
    kernel, cu_seqlens = provider.load(), boundaries(lengths).cuda()
    results = []
    for attend in (
        lambda q, k, v, rules: kernel(q, k, v, cu_seqlens, max(lengths), rules),
        lambda q, k, v, rules: attend_dense(q, k, v, lengths, rules),
    ):
        tensors = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in random_qkv(lengths, width=width)]
        rules = variant
        if variant.sinks is not None:
            tensors.append(variant.sinks.cuda().requires_grad_())
            rules = dataclasses.replace(variant, sinks=tensors[-1])
        out = attend(*tensors[:3], rules)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
        results.append((out, *torch.autograd.grad((out * weight).sum(), tensors)))
    for ours, dense in zip(*results, strict=True):
        error = (ours.float() - dense.float()).abs().max() / dense.float().abs().max()
        assert error < 2e-2
