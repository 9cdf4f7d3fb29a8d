import copy
import functools

import pytest
import torch
from torch import nn

from tuning.models.forwards import own_forward, rebind

FACTOR = 2.0


def scaled(x, *, plus=0.0):
    """Multiply."""
    return x * FACTOR + plus


def outer(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + 100.0

    return wrapper


def test_a_forward_of_ones_own_and_back():
    module, other = nn.ReLU(), nn.ReLU()
    x = torch.tensor([-1.0])
    with own_forward(module, lambda self, x: x * 3):
        assert module(x).item() == -3.0
        assert other(x).item() == 0.0
    assert module(x).item() == 0.0
    assert "forward" not in module.__dict__


def test_nested_forwards_are_undone_in_order_and_after_an_exception():
    module = nn.ReLU()
    with own_forward(module, lambda self, x: x * 3):
        with pytest.raises(KeyError), own_forward(module, lambda self, x: x * 5):
            raise KeyError
        assert module(torch.tensor([-1.0])).item() == -3.0


def test_what_others_wrapped_around_it_stays_theirs():
    module = nn.ReLU()
    with own_forward(module, lambda self, x: x * 3):
        theirs = functools.partial(module.forward)
        module.forward = theirs
    assert module.forward is theirs


def test_a_deep_copy_is_bound_to_itself():
    module = nn.Linear(1, 1)
    with own_forward(module, lambda self, x: x * self.weight.sum()):
        twin = copy.deepcopy(module)
        with torch.no_grad():
            module.weight.fill_(2.0)
            twin.weight.fill_(7.0)
        assert twin(torch.ones(1)).item() == 7.0


def test_one_name_is_bound_anew_and_the_file_keeps_its_own():
    new = rebind(scaled, "FACTOR", 5.0)
    assert new(1.0) == 5.0
    assert new(1.0, plus=1.0) == 6.0
    assert scaled(1.0) == 2.0
    assert new.__name__ == "scaled"


def test_wrappers_around_the_function_are_kept():
    new = rebind(outer(outer(scaled)), "FACTOR", 5.0)
    assert new(1.0) == 205.0
    assert outer(outer(scaled))(1.0) == 202.0


def test_a_name_that_is_not_read_is_an_error():
    with pytest.raises(ValueError, match="reads no global MISSING"):
        rebind(scaled, "MISSING", 1.0)


def test_torch_compile_sees_the_new_name():
    torch.compiler.reset()
    new = rebind(scaled, "FACTOR", 5.0)
    compiled = torch.compile(lambda x: new(x), backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == 5.0
    torch.compiler.reset()
