"""Patches: applied in order, counted, undone in reverse, bit for bit, also when training raises."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tuning.acceleration.patching import applied_patches
from tuning.acceleration.plugin import Patch
from tuning.errors import PluginError


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 1))


def scale(factor: float, events: list[str] | None = None, *, name: str = "fake.scale", target: str = "0") -> Patch:
    """Return a patch that multiplies a module's output."""

    @contextmanager
    def apply(module):
        before = module.__dict__.get("forward")
        own = module.forward
        module.forward = lambda x: own(x) * factor
        if events is not None:
            events.append(f"+{target}")
        try:
            yield
        finally:
            if before is None:
                del module.__dict__["forward"]
            else:
                module.forward = before
            if events is not None:
                events.append(f"-{target}")

    return Patch(name=name, target=target, apply=apply)


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(6.0).reshape(2, 3))


def test_patch_undo_patch_again_is_bit_equal():
    model = build_model()
    patches = [scale(2.0, target="0"), scale(-3.0, target="1.0")]
    plain = output(model)
    with applied_patches(model, patches):
        first = output(model)
    between = output(model)
    with applied_patches(model, patches):
        second = output(model)
    assert not torch.equal(plain, first)
    assert torch.equal(plain, between)
    assert torch.equal(first, second)
    assert torch.equal(plain, output(model))
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_two_patches_of_one_module_nest():
    model = build_model()
    plain = model[0](torch.ones(1, 3))
    with applied_patches(model, [scale(2.0), scale(5.0)]) as applied:
        torch.testing.assert_close(model[0](torch.ones(1, 3)), plain * 10)
    assert applied.count("fake.scale") == 2
    assert torch.equal(model[0](torch.ones(1, 3)), plain)


def test_counts_and_targets_are_by_name_in_order():
    patches = [scale(2.0, target="2"), scale(2.0, target="1.0"), scale(2.0, name="fake.other", target="")]
    with applied_patches(build_model(), patches) as applied:
        assert applied.targets == {"fake.scale": ("2", "1.0"), "fake.other": ("",)}
        assert (applied.count("fake.scale"), applied.count("fake.other"), applied.count("never")) == (2, 1, 0)


def test_an_exception_while_training_undoes_all_in_reverse():
    model, events = build_model(), []
    plain = output(model)
    patches = [scale(2.0, events, target=target) for target in ("0", "1.0", "2")]
    with pytest.raises(ZeroDivisionError), applied_patches(model, patches):
        raise ZeroDivisionError
    assert events == ["+0", "+1.0", "+2", "-2", "-1.0", "-0"]
    assert torch.equal(plain, output(model))


def test_a_patch_that_fails_to_apply_undoes_those_before_it():
    model, events = build_model(), []

    @contextmanager
    def broken(module):
        raise RuntimeError("no kernel")
        yield

    patches = [scale(2.0, events, target="0"), Patch(name="fake.broken", target="2", apply=broken)]
    with pytest.raises(RuntimeError, match="no kernel"), applied_patches(model, patches):
        pytest.fail("the body must not run")
    assert events == ["+0", "-0"]


def test_a_patch_that_fails_to_undo_does_not_keep_the_others_from_undoing():
    model, events = build_model(), []

    @contextmanager
    def sticky(module):
        yield
        raise RuntimeError("stuck")

    patches = [scale(2.0, events, target="0"), Patch(name="fake.sticky", target="2", apply=sticky)]
    with pytest.raises(RuntimeError, match="stuck"), applied_patches(model, patches):
        pass
    assert events == ["+0", "-0"]


def test_a_target_that_is_no_module():
    model, events = build_model(), []
    patches = [scale(2.0, events, target="0"), scale(2.0, events, target="layers.7.norm")]
    with pytest.raises(PluginError) as caught, applied_patches(model, patches):
        pytest.fail("the body must not run")
    assert str(caught.value) == (
        "Patch fake.scale wants to change 'layers.7.norm', but Sequential has no such module; this is a fault of the "
        "plugin, report it with the model's config.json"
    )
    assert events == ["+0", "-0"]


def test_another_model_of_the_process_is_not_touched():
    model, other = build_model(), build_model()
    plain = output(other)
    with applied_patches(model, [scale(2.0)]):
        assert torch.equal(plain, output(other))
