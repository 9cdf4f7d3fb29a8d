import torch
from torch import nn

from tuning.models.stand_ins import Backbone, call, shallow_copy, small_linear


def test_a_copy_is_of_the_same_class_trains_and_has_no_hooks():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
    module.register_forward_hook(lambda *args: 1 / 0)
    module.forward = lambda x: x
    copy = shallow_copy(module)
    assert type(copy) is nn.Sequential
    assert copy.training
    assert not module.training
    assert copy[0] is module[0]
    assert copy(torch.ones(1, 2)).shape == (1, 2)
    del copy._modules["1"]
    assert len(module) == 2


def test_a_fault_on_stand_ins_is_no_answer():
    assert call(lambda: torch.ones(2) @ torch.ones(3)) is None
    assert call(lambda x: x + 1, torch.ones(1)).tolist() == [2.0]


def test_nothing_is_drawn_from_the_global_numbers():
    state = torch.random.get_rng_state()
    layer = small_linear(3, 5, torch.Generator().manual_seed(0), dtype=torch.float64)
    call(nn.functional.dropout, torch.ones(100))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert layer.weight.dtype == torch.float64
    assert layer(torch.ones(2, 3, dtype=torch.float64)).shape == (2, 5)
    assert not layer.weight.requires_grad


def test_a_backbone_answers_whatever_is_asked():
    hidden = torch.ones(1, 2, 3)
    output = Backbone(hidden)(1, attention_mask=None)
    assert output.last_hidden_state is hidden
    assert output[0] is hidden
    assert output[1] is None
    assert output.router_logits is None
