import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from tuning.kernels import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LlamaRMSNorm, {}),
        (Gemma2RMSNorm, {"offset": 1.0, "cast_before_weight": False}),
        (Olmo2RMSNorm, {"cast_before_weight": False}),
    ],
)
def test_norms_are_the_models_bit_for_bit(dtype, kind, options):
    norm = kind(32, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 32).to(dtype)
    ours = reference.rms_norm(x, norm.weight, 1e-5, **options)
    if dtype == torch.float32:
        assert torch.allclose(ours, norm(x), rtol=1e-6, atol=1e-7)
    else:
        assert torch.equal(ours, norm(x))


def test_rotation_is_the_models():
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    cos, sin = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    for ours, theirs in zip(reference.rope(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert torch.equal(ours, theirs)
    cache = torch.randn(9, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1], [4, 5, 6, 7, 8]])
    gathered = reference.rope(q, k, cache[positions], cache[positions])
    assert torch.equal(reference.rope(q, k, cache, cache, positions)[0], gathered[0])


@pytest.mark.parametrize(("activation", "value"), [("silu", 1.4621172), ("gelu_tanh", 1.6823840), ("gelu", 1.6826895)])
def test_gated_units_by_hand(activation, value):
    ones = torch.ones(1, dtype=torch.float64)
    assert reference.glu(ones, 2 * ones, activation).item() == pytest.approx(value, abs=1e-6)


def test_cross_entropy_by_hand():
    logits = torch.tensor([[2.0, 0, 0], [0, 0, 0], [5, 5, 5]])
    labels = torch.tensor([0, 2, -100])
    loss, count, entropy, correct = reference.cross_entropy(logits, labels, label_smoothing=0.1)
    assert loss.item() / 2 == pytest.approx(0.735745, abs=1e-6)
    assert (count.item(), correct.item()) == (2, 1)
    # log 3 for the even row; the other one by its probabilities 0.786986, 0.106507, 0.106507
    assert entropy.item() == pytest.approx(1.098612 + 0.665573, abs=1e-5)
    assert reference.cross_entropy(logits, torch.full((3,), -100))[0].item() == 0.0


def test_factor_softcap_and_padding_of_the_vocabulary():
    logits = torch.randn(3, 7)
    labels = torch.tensor([0, 4, 2])
    changed = 2.0 * torch.tanh(0.5 * logits[:, :5] / 2.0)
    expected = torch.nn.functional.cross_entropy(changed, labels, reduction="sum")
    loss = reference.cross_entropy(logits, labels, logit_scale=0.5, softcap=2.0, vocab_size=5)[0]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_head_is_a_linear_layer_and_a_low_rank_term():
    hidden, weight, bias = torch.randn(3, 4), torch.randn(7, 4), torch.randn(7)
    a, b = torch.randn(3, 2), torch.randn(7, 2)
    labels = torch.tensor([0, 4, 2])
    logits = hidden @ weight.t() + bias + a @ b.t()
    loss = reference.linear_cross_entropy(hidden, weight, labels, bias, (a, b))[0]
    assert loss.item() == pytest.approx(reference.cross_entropy(logits, labels)[0].item(), rel=1e-6)


def test_half_precision_is_computed_in_fp32_and_fp64_stays():
    x = torch.randn(4, 8, dtype=torch.float64)
    assert reference.rms_norm(x, x[0], 1e-6).dtype == torch.float64
    logits = x.bfloat16()
    assert reference.cross_entropy(logits, torch.zeros(4, dtype=torch.long))[0].dtype == torch.float32
