from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tuning.kernels import reference
from tuning.kernels.lora import linear_of
from tuning.models.gptq import GPTQFormat, GPTQKernels, GPTQLinear, pack, quantize

KERNELS = GPTQKernels(unpack=reference.gptq_weight, product=linear_of)
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def layer(form, *, rows=64, cols=32, bias=False, gram=None, seed=0):
    """Return a quantised layer and the weight it was made from."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(cols, rows, generator=generator)
    made = GPTQLinear(rows, cols, form, bias=bias, dtype=torch.float32, kernels=KERNELS)
    for name, tensor in quantize(weight, form, gram).items():
        setattr(made, name, nn.Parameter(tensor, requires_grad=False))
    if bias:
        made.bias = nn.Parameter(torch.randn(cols, generator=generator))
    return made, weight


def unpack(form, packed):
    return reference.gptq_weight(**packed, bits=form.bits, zero_offset=form.zero_offset, dtype=torch.float32).t()


def test_integers_come_back_from_words():
    for bits in (2, 4, 8):
        values = torch.randint(0, 2**bits, (64, 5))
        words = pack(values, bits)
        assert words.dtype == torch.int32
        assert words.shape == (64 * bits // 32, 5)
        back = [(int(words[k * bits // 32, n]) >> (k * bits % 32)) % 2**bits for k in range(64) for n in range(5)]
        assert back == values.flatten().tolist()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [16, 24, -1])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("zero_offset", [0, 1])
def test_rounding_to_nearest_is_off_by_half_a_step_at_most(bits, group_size, sym, zero_offset):
    form = GPTQFormat(bits=bits, group_size=group_size, sym=sym, zero_offset=zero_offset)
    made, weight = layer(form)
    size = 64 if group_size == -1 else group_size
    error = (made.unpacked(torch.float32) - weight).abs()
    for start in range(0, 64, size):
        rows = weight[:, start : start + size]
        span = 2 * rows.abs().amax(1) if sym else rows.amax(1).clamp(min=0) - rows.amin(1).clamp(max=0)
        # a symmetric range has one value less above zero than below; zeros and scales are rounded
        step = span / (2**bits - 1) * (1.01 if sym else 1.05)
        assert (error[:, start : start + size] <= step[:, None] + 1e-6).all()
    assert error.max() > 0


def test_inputs_that_matter_are_kept_better_than_by_rounding():
    generator = torch.Generator().manual_seed(1)
    # inputs that mostly lie in 8 directions, so that other columns can make up for an error
    x = torch.randn(500, 8, generator=generator) @ torch.randn(8, 64, generator=generator)
    x += 0.1 * torch.randn(500, 64, generator=generator)
    errors = {}
    for name, options in {
        "nearest": {},
        "gptq": {"gram_KK": x.t() @ x},
        "act-order": {"gram_KK": x.t() @ x},
    }.items():
        form = GPTQFormat(bits=4, group_size=16, desc_act=name == "act-order", sym=False)
        weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
        packed = quantize(weight, form, **options)
        errors[name] = float((x @ (unpack(form, packed) - weight).t()).norm())
        assert (packed["g_idx"].diff() < 0).any() == (name == "act-order")
    assert errors["gptq"] < 0.5 * errors["nearest"]
    assert errors["act-order"] < 0.5 * errors["nearest"]


def test_dead_inputs_and_zero_weights():
    form = GPTQFormat(bits=4, group_size=16)
    packed = quantize(torch.zeros(8, 32), form, torch.zeros(32, 32))
    assert not unpack(form, packed).any()


def test_the_layer_is_a_linear_layer_and_keeps_no_dense_weight():
    made, _ = layer(GPTQFormat(group_size=16), bias=True)
    x = torch.randn(3, 5, 64, requires_grad=True)
    weight, bias = made.unpacked(torch.float32), made.bias
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        out = made(x)
    assert max(saved, default=0) < weight.numel()
    expected = nn.functional.linear(x, weight, bias)
    assert torch.allclose(out, expected, atol=1e-6)
    dy = torch.randn_like(out)
    got = torch.autograd.grad(out, [x, bias], dy)
    for a, b in zip(got, torch.autograd.grad(expected, [x, bias], dy), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert isinstance(made, nn.Linear)
    assert not any(p.requires_grad for name, p in made.named_parameters() if name != "bias")


def test_nothing_can_be_added_to_its_weight():
    made, _ = layer(GPTQFormat(group_size=16))
    assert made.weight is None
    with pytest.raises(AttributeError):
        made.weight.data += 1


def test_it_is_copied_and_described():
    made, _ = layer(GPTQFormat(group_size=16))
    twin = copy.deepcopy(made)
    with torch.no_grad():
        made.scales.zero_()
    x = torch.randn(2, 64)
    assert not made(x).any()
    assert twin(x).any()
    assert repr(made) == "GPTQLinear(64, 32, bits=4, group_size=16)"


def test_formats_are_read_and_written():
    form = GPTQFormat.read(CONFIG)
    assert form == GPTQFormat(bits=4, group_size=128, desc_act=False, sym=True, zero_offset=1)
    assert GPTQFormat.read({**CONFIG, "checkpoint_format": "gptq_v2"}).zero_offset == 0
    for each in (form, GPTQFormat(bits=8, group_size=-1, desc_act=True, sym=False, zero_offset=0)):
        assert GPTQFormat.read(each.write()) == each


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "is quantised by awq, not by GPTQ"),
        ({"bits": 3}, "has weights of 3 bits; 2, 4, 8 can be unpacked"),
        ({"checkpoint_format": "marlin"}, "is packed as marlin; gptq and gptq_v2 can be unpacked"),
        ({"lm_head": True}, "has a quantised head, which cannot be trained on"),
        ({"dynamic": {"x": 1}}, "has options of its own for single layers (dynamic), which are not supported"),
        ({"group_size": 0}, "has groups of 0 rows; a number above 0 or -1 can be unpacked"),
    ],
)
def test_formats_that_cannot_be_unpacked(change, message):
    with pytest.raises(ValueError, match=r"^(is|has) ") as error:
        GPTQFormat.read({**CONFIG, **change})
    assert str(error.value) == message


def test_widths_that_do_not_fill_words():
    assert GPTQFormat(bits=4).why_not(64, 24) == ""
    assert GPTQFormat(bits=4).why_not(64, 20) == "width 20 is no multiple of 8"
    assert GPTQFormat(bits=2).why_not(24, 32) == "width 24 is no multiple of 16"
