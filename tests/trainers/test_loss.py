"""The trainer's own loss against the formula, forward and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from trl.trainer.utils import add_fused_lm_head

from tests.tiny import PAD, build_model
from tuning.data.collators import FlattenedCollator, PaddedCollator
from tuning.trainers.loss import IGNORE_INDEX, HeadLoss

SAMPLES = [
    {"input_ids": [5, 20, 21, 90, 4], "labels": [-100, -100, 21, 90, 4]},
    {"input_ids": [7, 8], "labels": [7, 8]},
    {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [-100, 2, -100, 4, -100, 6]},
]
NUM_TARGETS = 3 + 1 + 3


def build():
    model = build_model()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return model


def targets(model):
    """Return logits and targets of every supervised token, sample by sample."""
    logits, labels = [], []
    for sample in SAMPLES:
        ids = torch.tensor([sample["input_ids"]])
        own = torch.tensor(sample["labels"])[1:]
        keep = own != IGNORE_INDEX
        logits.append(model(input_ids=ids).logits[0, :-1][keep])
        labels.append(own[keep])
    return torch.cat(logits), torch.cat(labels)


def plain(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum")


def smoothed(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)


def dynamic(logits, labels):
    log_probs = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    return -(log_probs.exp().detach() * log_probs).sum()


KINDS = {
    "plain": ({}, plain),
    "smoothed": ({"label_smoothing": 0.1}, smoothed),
    "dynamic": ({"dynamic": True}, dynamic),
    "full plain": ({"full_logits": True}, plain),
    "full dynamic": ({"full_logits": True, "dynamic": True}, dynamic),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left", "flattened"])
def test_loss_and_gradient_are_those_of_the_formula(kind, side):
    values, formula = KINDS[kind]
    model, reference = build(), build_model()
    if side == "flattened":
        # eager attention sees where positions restart, if no cache is asked for
        batch = FlattenedCollator()(SAMPLES)
        batch = {key: batch[key] for key in ("input_ids", "labels", "position_ids")}
    else:
        batch = PaddedCollator(PAD, padding_side=side)(SAMPLES)
        if side == "left":
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    terms = HeadLoss(**values)(model, {**batch, "use_cache": False})
    logits, labels = targets(reference)
    expected = formula(logits, labels)
    torch.testing.assert_close(terms.nll_sum, expected, rtol=1e-5, atol=1e-5)
    assert int(terms.num_tokens) == NUM_TARGETS
    assert terms.nll_sum.dtype == torch.float32
    assert terms.aux_loss is None
    terms.nll_sum.backward()
    expected.backward()
    expected_grads = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_grads[name].grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("values", [{}, {"label_smoothing": 0.1}])
def test_entropy_and_hits(values):
    model = build()
    terms = HeadLoss(**values)(model, PaddedCollator(PAD)(SAMPLES))
    logits, labels = targets(build_model())
    probs = logits.softmax(-1)
    torch.testing.assert_close(terms.entropy_sum, -(probs * probs.log()).sum(), rtol=1e-4, atol=1e-4)
    assert int(terms.num_correct) == int((logits.argmax(-1) == labels).sum())
    assert not terms.entropy_sum.requires_grad


def test_hits_are_counted():
    model = build()
    guess = build_model()(input_ids=torch.tensor([[5, 6]])).logits[0, 0].argmax().item()
    batch = PaddedCollator(PAD)([{"input_ids": [5, guess], "labels": [-100, guess]}])
    for values in ({}, {"label_smoothing": 0.1}):
        assert int(HeadLoss(**values)(model, batch).num_correct) == 1


@pytest.mark.parametrize("values", [{}, {"label_smoothing": 0.1}, {"dynamic": True}, {"full_logits": True}])
def test_no_target_is_a_loss_of_0_with_a_gradient_of_0(values):
    model = build()
    terms = HeadLoss(**values)(model, PaddedCollator(PAD)([]))
    assert terms.nll_sum.item() == 0.0
    assert int(terms.num_tokens) == 0
    terms.nll_sum.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert model.model.embed_tokens.weight.grad is not None  # the graph is whole: no rank waits for this one


def test_half_precision_sums_in_float32():
    model = build().to(torch.bfloat16)
    assert HeadLoss()(model, PaddedCollator(PAD)(SAMPLES)).nll_sum.dtype == torch.float32


def test_the_inputs_are_left_as_they_are():
    batch = PaddedCollator(PAD)(SAMPLES)
    keys = list(batch)
    HeadLoss(label_smoothing=0.1)(build(), batch)
    HeadLoss(with_router_loss=False)(build(), batch)
    assert list(batch) == keys
