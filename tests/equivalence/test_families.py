"""Padded and padding-free training agree for every family: the loss of each token and every gradient, in fp32.

The padded reference is the untouched model with an attention mask and explicit positions, padded on either side.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional

from tests.equivalence.families import FAMILIES, VOCAB_SIZE, WINDOW, build_model
from tuning.acceleration.framework import AccelerationFramework
from tuning.acceleration.plugin import Facts
from tuning.acceleration.plugins import BUILTIN
from tuning.attention import varlen
from tuning.attention.isolation import check_isolation
from tuning.config.acceleration_configs import PaddingFree
from tuning.data.collators import FlattenedCollator, PaddedCollator
from tuning.errors import UserError

LOSS_LIMIT = 1e-5
GRADIENT_LIMIT = 1e-4

# longer than the window, shorter, one token; the longest is neither first nor last
LENGTHS = (5, 11, 1, 2 * WINDOW, 2)


def build_samples(seed: int = 3) -> list[dict[str, list[int]]]:
    """Return samples whose first third is not trained on."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in LENGTHS:
        ids = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        samples.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    return samples


def build_facts(model, **overrides):
    values = {
        "model_config": model.config, "model_name_or_path": "tiny", "model_kwargs": {}, "train_args": None,
        "peft_config": None, "active": frozenset({"padding_free"}), "world_size": 1, "rank": 0, "seed": 0,
        "device_type": "cpu", "compute_capability": None,
    }  # fmt: skip
    return Facts(**{**values, **overrides})


@contextlib.contextmanager
def padding_free(model):
    """Patch the model as a run does; yields the collator."""
    framework = AccelerationFramework({"padding_free": PaddingFree()}, plugins=BUILTIN)
    facts = build_facts(model)
    framework.check(facts)
    framework.check_model(model, facts)
    with framework.patched(model, facts):
        yield framework.seats([], PaddedCollator(pad_token_id=0), facts).collator


def token_losses(model, batch):
    """Return the loss of each supervised token, sample after sample, and every gradient of their sum."""
    labels = batch["labels"][:, 1:]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits[:, :-1].float()
    losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")[labels != -100]
    model.zero_grad()
    losses.sum().backward()
    return losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def padded_batch(side):
    batch = PaddedCollator(pad_token_id=0, padding_side=side)(build_samples())
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return {**batch, "position_ids": positions}


def largest_difference(ours, theirs):
    losses = (ours[0] - theirs[0]).abs().max().item()
    assert ours[1].keys() == theirs[1].keys()
    gradients = max((ours[1][name] - theirs[1][name]).abs().max().item() for name in theirs[1])
    return losses, gradients


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_equals_padding_free(name, side):
    model = build_model(name)
    theirs = token_losses(model, padded_batch(side))
    with padding_free(model) as collate:
        ours = token_losses(model, collate(build_samples()))
    losses, gradients = largest_difference(ours, theirs)
    assert losses < LOSS_LIMIT
    assert gradients < GRADIENT_LIMIT
    assert all(gradient.abs().max() > GRADIENT_LIMIT for gradient in theirs[1].values()), (
        "a gradient that shows nothing"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_comparison_sees_lost_boundaries(name):
    """The mutation: one sample of all tokens. Positions still restart, so only attention and mixers change."""
    model = build_model(name)
    theirs = token_losses(model, padded_batch("right"))
    with padding_free(model) as collate:
        batch = collate(build_samples())
        merged = batch["cu_seq_lens_q"][[0, -1]]
        total = int(merged[-1])
        batch |= {"cu_seq_lens_q": merged, "cu_seq_lens_k": merged, "max_length_q": total, "max_length_k": total}
        ours = token_losses(model, batch)
    losses, gradients = largest_difference(ours, theirs)
    assert losses > 100 * LOSS_LIMIT
    assert gradients > 100 * GRADIENT_LIMIT


@pytest.mark.parametrize("name", FAMILIES)
def test_isolation_of_the_patched_model(name):
    model = build_model(name)
    with padding_free(model) as collate:
        check_isolation(model, collate(build_samples()))


@pytest.mark.parametrize("name", FAMILIES)
def test_isolation_check_sees_a_kernel_without_boundaries(name, monkeypatch):
    """The mutation: the kernel takes the batch for one sample; every family has an attention layer that then leaks."""
    model = build_model(name)
    honest = varlen._Chooser.__call__

    def leaking(self, q, k, v, cu_seqlens, max_seqlen, variant):
        return honest(self, q, k, v, cu_seqlens[[0, -1]], q.shape[0], variant)

    monkeypatch.setattr(varlen._Chooser, "__call__", leaking)
    with padding_free(model) as collate, pytest.raises(UserError, match="lets samples of one batch see each other"):
        check_isolation(model, collate(build_samples()))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_keeps_boundaries(name, use_reentrant, monkeypatch):
    model = build_model(name)
    calls = []
    honest = varlen._Chooser.__call__
    monkeypatch.setattr(varlen._Chooser, "__call__", lambda *args: calls.append(1) or honest(*args))
    with padding_free(model) as collate:
        theirs = token_losses(model, collate(build_samples()))
        num_calls = len(calls)
        model.train()  # only then is anything recomputed
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        ours = token_losses(model, collate(build_samples()))
    assert len(calls) == 3 * num_calls, "nothing was recomputed"
    losses, gradients = largest_difference(ours, theirs)
    assert losses < LOSS_LIMIT
    assert gradients < GRADIENT_LIMIT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_on_the_gpu(name, dtype):
    """fp32 takes flex_attention, bf16 a flash kernel where heads allow; both keep samples apart."""
    wide = {} if name == "gpt_bigcode" else {"head_dim": 64}
    model = build_model(name, **wide).to("cuda", dtype)
    theirs = token_losses(model, to_gpu(padded_batch("right")))
    facts = build_facts(model, device_type="cuda", compute_capability=torch.cuda.get_device_capability())
    framework = AccelerationFramework({"padding_free": PaddingFree()}, plugins=BUILTIN)
    framework.check(facts)
    with framework.patched(model, facts):
        batch = FlattenedCollator()(build_samples())
        check_isolation(model, batch)
        ours = token_losses(model, to_gpu(batch))
    scale = max(gradient.abs().max().item() for gradient in theirs[1].values())
    losses, gradients = largest_difference(ours, theirs)
    assert losses < (1e-4 if dtype == torch.float32 else 0.2)
    assert gradients < (1e-3 if dtype == torch.float32 else 0.2) * scale


def to_gpu(batch):
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def test_every_family_has_a_word_on_what_it_tests():
    assert all(family.special for family in FAMILIES.values())
    assert FlattenedCollator()(build_samples())["cu_seq_lens_q"].tolist() == [0, 5, 16, 17, 25, 27]
