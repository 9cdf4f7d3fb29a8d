"""The table picks the fastest provider that can do the work, says why, and refuses in words."""

import dataclasses

import pytest
import torch

from tuning.attention import providers
from tuning.attention.providers import PROVIDERS, Provider, Request, choose
from tuning.errors import UnsupportedError

HOPPER = Request(device_type="cuda", capability=(9, 0), dtype=torch.bfloat16, width=128, value_width=128)
AMPERE = dataclasses.replace(HOPPER, capability=(8, 0))
BLACKWELL = dataclasses.replace(HOPPER, capability=(10, 0))
CPU = Request(device_type="cpu", capability=None, dtype=torch.float32, width=64, value_width=64)


def _kernel(*_):
    raise NotImplementedError


@pytest.fixture
def everything_installed(monkeypatch):
    """All packages exist, none is imported."""
    table = tuple(dataclasses.replace(p, find=lambda: None, load=lambda: _kernel) for p in PROVIDERS)
    monkeypatch.setattr(providers, "PROVIDERS", table)


def _without(monkeypatch, *names):
    table = tuple(
        dataclasses.replace(p, find=lambda: "not installed") if p.name in names else p for p in providers.PROVIDERS
    )
    monkeypatch.setattr(providers, "PROVIDERS", table)


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (HOPPER, "FlashAttention 3"),
        (dataclasses.replace(HOPPER, window=True), "FlashAttention 3"),
        (dataclasses.replace(HOPPER, softcap=True), "FlashAttention 3"),
        (dataclasses.replace(HOPPER, sinks=True), "flash-attn-4"),
        (dataclasses.replace(HOPPER, dropout=True), "flash-attn 2"),
        (dataclasses.replace(HOPPER, width=256, value_width=256), "FlashAttention 3"),
        (dataclasses.replace(HOPPER, width=36, value_width=36), "flex_attention"),
        (dataclasses.replace(HOPPER, width=512, value_width=512), "flex_attention"),
        (dataclasses.replace(HOPPER, value_width=64), "flex_attention"),
        (dataclasses.replace(HOPPER, dtype=torch.float32), "flex_attention"),
        (BLACKWELL, "flash-attn-4"),
        (dataclasses.replace(BLACKWELL, width=256, value_width=256), "torch varlen"),
        (dataclasses.replace(BLACKWELL, softcap=True), "flash-attn 2"),
        (AMPERE, "torch varlen"),
        (dataclasses.replace(AMPERE, window=True), "torch varlen"),
        (dataclasses.replace(AMPERE, softcap=True), "flash-attn 2"),
        (dataclasses.replace(AMPERE, softcap=True, sinks=True), "flex_attention"),
        (dataclasses.replace(AMPERE, capability=(7, 5)), "flex_attention"),
        (CPU, "torch's CPU flash kernel, sample by sample"),
        (dataclasses.replace(CPU, window=True, dropout=True), "torch's CPU flash kernel, sample by sample"),
        (dataclasses.replace(CPU, softcap=True), "written-out attention, sample by sample"),
        (dataclasses.replace(CPU, sinks=True), "written-out attention, sample by sample"),
    ],
)
@pytest.mark.usefixtures("everything_installed")
def test_the_fastest_that_can(request_, name):
    assert choose(request_).name == name


@pytest.mark.usefixtures("everything_installed")
def test_says_which_and_why(monkeypatch):
    _without(monkeypatch, "FlashAttention 3", "flash-attn-4")
    assert (
        choose(HOPPER).describe()
        == "torch varlen (not FlashAttention 3: not installed; not flash-attn-4: not installed)"
    )
    assert choose(dataclasses.replace(HOPPER, dtype=torch.float32)).describe() == (
        "flex_attention (not FlashAttention 3: no float32; not flash-attn-4: no float32; not torch varlen: no float32; "
        "not flash-attn 2: no float32)"
    )
    assert choose(CPU).describe() == "torch's CPU flash kernel, sample by sample"


@pytest.mark.usefixtures("everything_installed")
def test_a_broken_package_is_passed_over_by_name(monkeypatch):
    def broken():
        raise ImportError("libcudart.so.12: cannot open shared object file")

    table = tuple(
        dataclasses.replace(p, load=broken) if p.name == "FlashAttention 3" else p for p in providers.PROVIDERS
    )
    monkeypatch.setattr(providers, "PROVIDERS", table)
    assert choose(HOPPER).describe() == (
        "flash-attn-4 (not FlashAttention 3: installed, but it fails to import (ImportError: libcudart.so.12: cannot "
        "open shared object file))"
    )


def test_other_errors_of_a_package_are_not_swallowed():
    def wrong():
        raise ZeroDivisionError

    table = [Provider(name="a", device_type="cpu", find=lambda: None, refuse=lambda _: None, load=wrong)]
    with pytest.raises(ZeroDivisionError):
        choose(CPU, table)


@pytest.mark.usefixtures("everything_installed")
def test_none_left(monkeypatch):
    _without(monkeypatch, "flash-attn 2")
    with pytest.raises(UnsupportedError) as error:
        choose(dataclasses.replace(HOPPER, dropout=True))
    assert str(error.value) == (
        "--padding_free needs an attention kernel that keeps samples apart, for bfloat16 on cuda (compute capability "
        "9.0), head width 128, dropout, and this machine has none (FlashAttention 3: no dropout; flash-attn-4: no "
        "dropout; torch varlen: no dropout; flash-attn 2: not installed; flex_attention: no dropout). Use another "
        "--torch_dtype, or train without --padding_free."
    )


def test_unknown_device():
    with pytest.raises(UnsupportedError) as error:
        choose(dataclasses.replace(CPU, device_type="npu", value_width=32, window=True))
    assert str(error.value) == (
        "--padding_free needs an attention kernel that keeps samples apart, for float32 on npu, head width 64 (values "
        "32), window, and this machine has none (none is for this kind of device). Use another --torch_dtype, or train "
        "without --padding_free."
    )


def test_the_table_of_this_machine_finds_without_importing():
    import sys

    for provider in PROVIDERS:
        assert provider.find() in (None, "not installed")
    assert "flash_attn" not in sys.modules


def test_flash_attn_4_alone_is_no_flash_attn_2(monkeypatch):
    """Its files lie in a folder of flash-attn's name, which then exists without flash-attn's functions."""
    monkeypatch.setattr(providers, "installed_version", lambda name: "4.0" if name == "flash-attn-4" else None)
    monkeypatch.setattr(providers.importlib.util, "find_spec", lambda name: object())
    found = {p.name: p.find() for p in PROVIDERS}
    assert found["flash-attn-4"] is None
    assert found["flash-attn 2"] == "not installed"
