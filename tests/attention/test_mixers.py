"""Layers that mix tokens without attention run sample by sample where their kernels cannot keep samples apart."""

import sys
import types

import pytest
import torch
from torch import nn

from tests.equivalence.families import VOCAB_SIZE, build_model
from tuning.attention import mixers
from tuning.attention.mixers import find_mixers, has_kernels, run_apart, takes_boundaries
from tuning.attention.switch import find_configs, switched
from tuning.data.collators import FlattenedCollator
from tuning.errors import UnsupportedError


class Mixer(nn.Module):
    """A causal convolution over three tokens."""

    def __init__(self, returns_tuple=False):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=2, groups=4)
        self.returns_tuple = returns_tuple

    def forward(self, hidden_states, scale=1.0, **kwargs):
        self.seen = kwargs
        out = self.conv(hidden_states.transpose(1, 2))[..., : hidden_states.shape[1]].transpose(1, 2) * scale
        return (out, torch.ones(1)) if self.returns_tuple else out


def _boundaries(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("returns_tuple", [False, True])
def test_each_sample_as_alone(returns_tuple):
    mixer, hidden = Mixer(returns_tuple), torch.randn(1, 9, 4)
    lengths = [4, 0, 3, 2]
    first = (lambda out: out[0]) if returns_tuple else (lambda out: out)
    alone = torch.cat([first(mixer(part, 2.0)) for part in hidden.split([4, 3, 2], 1)], 1)
    with run_apart(mixer, []):
        out = mixer(hidden, 2.0, cu_seq_lens_q=_boundaries(*lengths), seq_idx=torch.zeros(1, 9), other=1)
        assert mixer.seen == {"other": 1}
        assert torch.equal(first(out), alone)
        if returns_tuple:
            assert out[1] is None
        # without boundaries: the whole row, as before
        assert torch.equal(first(mixer(hidden, 2.0)), first(Mixer.forward(mixer, hidden, 2.0)))
    assert not torch.equal(first(mixer(hidden, 2.0, cu_seq_lens_q=_boundaries(*lengths))), alone)


def test_put_back():
    mixer = Mixer()
    with pytest.raises(ZeroDivisionError), run_apart(mixer, []):
        raise ZeroDivisionError
    assert "forward" not in mixer.__dict__
    own = mixer.forward = lambda hidden_states: hidden_states
    with run_apart(mixer, []):
        pass
    assert mixer.forward is own


def test_found_by_their_convolution():
    model = build_model("granitemoehybrid")
    assert list(find_mixers(model)) == ["model.layers.0.mamba", "model.layers.2.mamba"]
    assert find_mixers(build_model("llama")) == {}


def test_takes_boundaries():
    class Deaf(Mixer):
        def forward(self, hidden_states):
            return hidden_states

    class Told(Mixer):
        def forward(self, hidden_states, seq_idx=None):
            return hidden_states

    assert [takes_boundaries(mixer) for mixer in (Mixer(), Told(), Deaf())] == [True, True, False]


def test_kernels_need_both_packages_and_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    assert not has_kernels("cuda")
    for package in mixers.KERNEL_PACKAGES:
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    assert has_kernels("cuda")
    assert not has_kernels("cpu")


def _hybrid_batch():
    rows = [[5, 9, 11, 12], [7, 8, 30], [3, 4, 5, 6, 7, 8]]
    batch = FlattenedCollator()([{"input_ids": ids, "labels": ids} for ids in rows])
    assert max(map(max, rows)) < VOCAB_SIZE
    return {name: value for name, value in batch.items() if name != "labels"}


def test_generate_writes_the_same():
    model = build_model("granitemoehybrid")
    prompts = torch.tensor([[0, 0, 5, 9, 11, 12], [7, 8, 30, 31, 32, 33]])
    options = {"attention_mask": (prompts != 0).long(), "max_new_tokens": 9, "do_sample": False, "use_cache": True}
    before = model.generate(prompts, **options)
    with switched(model), run_apart(model.model.layers[0].mamba, find_configs(model)):
        during = model.generate(prompts, **options)
    assert torch.equal(before, during)


def test_a_layer_that_is_not_told_is_refused():
    model = build_model("granitemoehybrid")
    layer = model.model.layers[0]
    with switched(model), run_apart(layer.mamba, find_configs(model)):
        told = layer.mamba.forward
        layer.mamba.forward = lambda hidden_states, **kwargs: told(hidden_states)
        with pytest.raises(UnsupportedError) as error:
            model(**_hybrid_batch())
        layer.mamba.forward = told
    assert str(error.value) == (
        "--padding_free was asked for, but GraniteMoeHybridMambaLayer is not told where samples begin: a layer above "
        "it drops these keyword arguments. Train this model without --padding_free."
    )
