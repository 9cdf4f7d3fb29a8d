import pytest
import torch

from tests.kernels.parity import assert_close
from tuning.kernels._softmax import Launch, LossOptions, softmax_rows_

PLAIN = LossOptions(ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, softcap=0.0, vocab_size=37)


def inputs(device):
    logits = 2 * torch.randn(5, 37, device=device)
    return logits, torch.tensor([0, -100, 36, 7, 7], device=device)


@pytest.mark.parametrize("block", [4, 16, 64])
@pytest.mark.parametrize("stages", [1, 2])
def test_results_do_not_depend_on_the_launch(device, block, stages):
    logits, labels = inputs(device)
    grad = torch.empty_like(logits)
    one = torch.ones((), device=device)
    terms = softmax_rows_(
        logits, labels, PLAIN, grad_TV=grad, grad_scale=one, statistics=True, launch=Launch(block, 1, stages)
    )
    keep = labels != -100
    log_p = logits.double().log_softmax(-1)
    nll = torch.where(keep, -log_p.gather(1, labels.clamp_min(0)[:, None])[:, 0], 0.0)
    assert_close("loss", terms.loss, nll)
    assert_close("entropy", terms.entropy, torch.where(keep, -(log_p.exp() * log_p).sum(-1), 0.0))
    expected = log_p.exp() - torch.nn.functional.one_hot(labels.clamp_min(0), 37)
    assert_close("gradient", grad, expected * keep[:, None])


def test_in_place_equals_out_of_place(device):
    logits, labels = inputs(device)
    one, grad = torch.ones((), device=device), torch.empty_like(logits)
    softmax_rows_(logits, labels, PLAIN, grad_TV=grad, grad_scale=one, launch=Launch(16, 1, 2))
    softmax_rows_(logits, labels, PLAIN, grad_TV=logits, grad_scale=one, launch=Launch(16, 1, 2))
    assert torch.equal(logits, grad)


def test_gradient_alone_from_an_earlier_sum(device):
    logits, labels = inputs(device)
    one, both, alone = torch.ones((), device=device), torch.empty_like(logits), torch.empty_like(logits)
    lse = softmax_rows_(logits, labels, PLAIN, grad_TV=both, grad_scale=one).lse
    softmax_rows_(logits, labels, PLAIN, grad_TV=alone, grad_scale=one, lse_T=lse)
    assert torch.equal(alone, both)


def test_columns_beyond_the_vocabulary_get_zero(device):
    logits, labels = inputs(device)
    grad = torch.full((5, 48), float("nan"), device=device)
    softmax_rows_(logits, labels, PLAIN, grad_TV=grad, grad_scale=torch.ones((), device=device))
    assert torch.equal(grad[:, 37:], torch.zeros(5, 11, device=device))
    assert torch.isfinite(grad).all()
