import dataclasses

import pytest

from tuning.config.acceleration_configs import AttentionAndDistributedPackingConfig, MultiPack, PaddingFree
from tuning.errors import ConfigError


def test_constructors_of_the_python_api():
    assert PaddingFree(method="huggingface").method == "huggingface"
    assert MultiPack(num_processes=16).num_processes == 16
    config = AttentionAndDistributedPackingConfig(padding_free=PaddingFree(), multipack=MultiPack(mode="budget"))
    assert config.multipack == MultiPack(mode="budget")
    assert dataclasses.replace(config, padding_free=None).multipack is config.multipack


@pytest.mark.parametrize("value", ["huggingface", ["huggingface"], {"method": "huggingface"}, True, []])
def test_padding_free_in_every_spelling(value):
    assert AttentionAndDistributedPackingConfig(padding_free=value).padding_free == PaddingFree()


@pytest.mark.parametrize("value", [16, "16", [16], ["16"], {"num_processes": "16"}, ["num_processes=16"]])
def test_multipack_in_every_spelling(value):
    assert AttentionAndDistributedPackingConfig(multipack=value).multipack == MultiPack(num_processes=16)


@pytest.mark.parametrize("value", [None, False, "false", "none"])
def test_off(value):
    config = AttentionAndDistributedPackingConfig(padding_free=value, multipack=value)
    assert (config.padding_free, config.multipack) == (None, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PaddingFree(method="hugging"),
            '--padding_free was given method "hugging", but it takes only huggingface; correct the value',
        ),
        (
            lambda: PaddingFree(method="huggingface-injected"),
            '--padding_free was given method "huggingface-injected", which patched old versions of transformers and is '
            "gone; use huggingface",
        ),
        (
            lambda: AttentionAndDistributedPackingConfig(padding_free="huggingface-injected"),
            '--padding_free was given "huggingface-injected", which patched old versions of transformers and is gone; '
            "use huggingface",
        ),
        (
            lambda: MultiPack(mode="fast"),
            '--multipack was given mode "fast", but it takes one of exact, budget; correct the value',
        ),
        (
            lambda: MultiPack(cost="x", over_long="y"),
            '--multipack was given cost "x", but it takes one of model, tokens; correct the value\n'
            '--multipack was given over_long "y", but it takes one of own_step, truncate, drop, error; correct '
            "the value",
        ),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == message
    assert isinstance(error.value, ValueError)
