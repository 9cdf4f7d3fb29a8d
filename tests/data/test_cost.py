"""Costs by hand, from the numbers of a model."""

from __future__ import annotations

import numpy as np
import pytest

from tuning.data.cost import TOKENS, UNIT, MissingShapeError, from_shape

SMALL = {"layers": 2, "hidden": 8, "heads": 4, "kv_heads": 2, "head_dim": 2, "intermediate": 16, "vocab": 10}
# 2 layers of (q and o 8 x 8 each, k and v 8 x 4 each) and 3 matrices of 8 x 16, and a head of 8 x 10
SMALL_PARAMETERS = 2 * (64 + 64 + 32 + 32 + 3 * 8 * 16) + 80
SMALL_ATTENTION = 7 * 2 * 4 * 2


def test_full_training_is_six_operations_a_parameter():
    assert from_shape(SMALL).ratio == SMALL_ATTENTION / (6 * SMALL_PARAMETERS)


def test_adapters_leave_out_the_gradient_of_the_weights():
    assert from_shape({**SMALL, "trainable": "lora"}).ratio == SMALL_ATTENTION / (4 * SMALL_PARAMETERS)


def test_what_a_config_leaves_out_has_defaults():
    short = {"layers": 2, "hidden": 8, "heads": 4, "vocab": 10}
    long = {**short, "kv_heads": 4, "head_dim": 2, "intermediate": 32}
    assert from_shape(short) == from_shape(long)
    assert from_shape({**short, "kv_heads": None, "head_dim": None, "intermediate": None}) == from_shape(long)


def test_only_the_experts_a_token_visits_count():
    experts = {**SMALL, "intermediate": 999, "experts_per_token": 2, "expert_intermediate": 6, "shared_intermediate": 4}
    assert from_shape(experts) == from_shape(SMALL)
    del experts["shared_intermediate"]
    assert from_shape(experts) == from_shape({**SMALL, "intermediate": 12})


@pytest.mark.parametrize("name", ["layers", "hidden", "heads", "vocab"])
def test_a_number_without_which_no_cost_can_be_told_is_named(name):
    for value in (None, 0):
        with pytest.raises(MissingShapeError) as caught:
            from_shape({**SMALL, name: value})
        assert str(caught.value) == name
    with pytest.raises(MissingShapeError) as caught:
        from_shape({**SMALL, "experts_per_token": 2})
    assert str(caught.value) == "expert_intermediate"


def test_a_seven_billion_model_pays_as_much_for_attention_as_for_weights_at_46_thousand_tokens():
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336, "vocab": 32000}
    assert 1 / from_shape(shape).ratio == pytest.approx(46_498, abs=1)


def test_costs_are_whole_numbers_that_grow_faster_than_length():
    cost = from_shape(SMALL)
    costs = cost.of(np.array([1, 2, 1000, 2000]))
    assert costs.dtype == np.int64
    assert costs[0] == round((1 + cost.ratio) * UNIT)
    assert costs[3] > 2 * costs[2]
    assert TOKENS.of(np.array([0, 1, 7])).tolist() == [0, UNIT, 7 * UNIT]
