import pytest
import torch

from tuning.kernels import gptq as module
from tuning.kernels import reference
from tuning.kernels.gptq import gptq_weight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def by_hand(q, zeros, scales, g_idx):
    """Return the weight of unpacked integers, one element after the other."""
    rows = [[float(scales[g, n]) * (int(q[k, n]) - int(zeros[g, n])) for n in range(q.shape[1])]
            for k, g in enumerate(g_idx.tolist())]  # fmt: skip
    return torch.tensor(rows)


def pack(values, bits, dim):
    """Pack integers along a dimension, low bits first, as GPTQ does; by Python's own integers."""
    values = values if dim == 0 else values.t()
    per_word = 32 // bits
    words = []
    for start in range(0, values.shape[0], per_word):
        group = values[start : start + per_word].tolist()
        row = [sum(group[j][n] << (bits * j) for j in range(per_word)) for n in range(values.shape[1])]
        words.append([word - 2**32 if word >= 2**31 else word for word in row])
    out = torch.tensor(words, dtype=torch.int32)
    return out if dim == 0 else out.t().contiguous()


def layer(bits, device, *, rows=96, cols=48, groups=3, zero_offset=1, act_order=False):
    q = torch.randint(0, 2**bits, (rows, cols))
    zeros = torch.randint(0, 2**bits, (groups, cols))
    scales = torch.rand(groups, cols).half()
    g_idx = torch.arange(rows, dtype=torch.int32) // (rows // groups)
    if act_order:
        g_idx = g_idx[torch.randperm(rows)]
    stored = (zeros - zero_offset) % 2**bits
    packed = pack(q, bits, 0), pack(stored, bits, 1), scales, g_idx
    return [part.to(device) for part in packed], by_hand(q, zeros, scales, g_idx).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero_offset", [0, 1])
@pytest.mark.parametrize("act_order", [False, True])
def test_the_weight_of_packed_integers(device, dtype, bits, zero_offset, act_order):
    parts, expected = layer(bits, device, zero_offset=zero_offset, act_order=act_order)
    options = {"bits": bits, "zero_offset": zero_offset, "dtype": dtype}
    out = gptq_weight(*parts, **options)
    assert out.dtype == dtype
    unit = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    assert torch.allclose(out.float(), expected, rtol=unit, atol=1e-6)
    assert torch.allclose(reference.gptq_weight(*parts, **options).float(), expected, rtol=unit, atol=1e-6)


@pytest.mark.parametrize(("rows", "cols", "groups"), [(8, 8, 1), (64, 264, 2), (256, 520, 2)])
def test_odd_sizes(device, rows, cols, groups):
    parts, expected = layer(4, device, rows=rows, cols=cols, groups=groups)
    out = gptq_weight(*parts, bits=4, zero_offset=1, dtype=torch.float32)
    assert torch.allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_a_zero_that_was_stored_less_one_wraps(device):
    # a zero of 0 is stored as 15
    parts, expected = layer(4, device)
    parts[1].fill_(-1)
    q_times_scale = gptq_weight(*parts, bits=4, zero_offset=1, dtype=torch.float32)
    assert float(q_times_scale.min()) >= 0.0
    assert float(expected.min()) < 0.0


def test_three_bits_are_refused(device):
    parts, _ = layer(4, device)
    with pytest.raises(ValueError, match=r"^weights of 3 bits do not fill words of 32; 2, 4 and 8 do$"):
        gptq_weight(*parts, bits=3, zero_offset=1, dtype=torch.float32)


def test_shapes_that_do_not_belong_together_are_refused(device):
    parts, _ = layer(4, device)
    with pytest.raises(ValueError, match="are no 4-bit layer"):
        gptq_weight(parts[0][:-1], *parts[1:], bits=4, zero_offset=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="are no 8-bit layer"):
        gptq_weight(*parts, bits=8, zero_offset=1, dtype=torch.float32)


def test_without_triton_the_reference_answers(device, monkeypatch):
    parts, expected = layer(4, device)
    monkeypatch.setattr(module, "can_launch", lambda x: False)
    out = gptq_weight(*parts, bits=4, zero_offset=1, dtype=torch.float32)
    assert torch.allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_the_other_convention_of_zeros_would_be_seen(device):
    parts, expected = layer(4, device, zero_offset=1)
    out = gptq_weight(*parts, bits=4, zero_offset=0, dtype=torch.float32)
    assert not torch.allclose(out, expected, rtol=1e-2, atol=1e-2)
