from tuning.config.acceleration_configs import (
    AccelerationFrameworkConfig,
    AttentionAndDistributedPackingConfig,
    BNBQLoraConfig,
    FastKernelsConfig,
    FusedOpsAndKernelsConfig,
    MultiPack,
    PaddingFree,
    QuantizedLoraConfig,
)


def test_nothing_is_active_by_default():
    assert AccelerationFrameworkConfig().active() == {}


def test_active_names_the_flags_that_are_on():
    config = AccelerationFrameworkConfig(
        attention=AttentionAndDistributedPackingConfig(padding_free=PaddingFree(), multipack=MultiPack()),
        kernels=FusedOpsAndKernelsConfig(fast_kernels=FastKernelsConfig()),
        quantized=QuantizedLoraConfig(bnb_qlora=BNBQLoraConfig()),
        extra=(("their_plugin", ["4"]),),
    )
    assert config.active() == {
        "padding_free": PaddingFree(),
        "multipack": MultiPack(),
        "bnb_qlora": BNBQLoraConfig(),
        "their_plugin": ["4"],
    }
