"""Seats: values that plugins and trainer share; frozen, and empty unless a plugin fills them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tuning.seats import LossTerms, Seats


def test_loss_terms_ask_for_a_sum_and_a_count_alone():
    terms = LossTerms(nll_sum=torch.tensor(2.0), num_tokens=torch.tensor(3))
    assert (terms.entropy_sum, terms.num_correct, terms.aux_loss) == (None, None, None)
    with pytest.raises(TypeError, match="num_tokens"):
        LossTerms(nll_sum=torch.tensor(2.0))


def test_seats_are_frozen_and_replaced_not_changed():
    seats = Seats(collator=lambda samples: {"n": len(samples)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        seats.loss = object()
    more = dataclasses.replace(seats, callbacks=("a", "b"))
    assert (seats.callbacks, more.callbacks) == ((), ("a", "b"))
    assert more.collator([1, 2]) == {"n": 2}
