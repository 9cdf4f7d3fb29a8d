import dataclasses

import pytest

from tuning.config.acceleration_configs import FastKernelsConfig, FusedLoraConfig, FusedOpsAndKernelsConfig
from tuning.config.acceleration_configs.fused_ops_and_kernels import KERNELS
from tuning.errors import ConfigError


def kernels(value):
    config = FusedOpsAndKernelsConfig(fast_kernels=value).fast_kernels
    return None if config is None else ("auto" if config.auto else config.kernels)


THREE = ("cross_entropy", "rms_norm", "rope")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["True", "True", "True"], THREE),
        ("True True True", THREE),
        ([True, True, True], THREE),
        (["true", "false", "true"], ("cross_entropy", "rope")),
        (["fused_ce_liger", "True", "False"], ("linear_cross_entropy", "rms_norm")),
        (["FastCrossEntropyLoss", "FastRoPE", "FastRMSLayerNorm"], THREE),
        (["fast_loss", "fast_rms_layernorm", "fast_rope_embeddings"], THREE),
        (["fast_rope_embeddings=True", "fast_loss=fused_ce_liger"], ("linear_cross_entropy", "rope")),
        (["rope", "rms_norm"], ("rms_norm", "rope")),
        ("rope,rms_norm", ("rms_norm", "rope")),
        (["rope=True", "rms_norm"], ("rms_norm", "rope")),
        (["rope", "rms_norm=False"], ("rope",)),
        ({"rope": True, "swiglu": "true", "rms_norm": None}, ("rope", "swiglu")),
        ({"kernels": ["rope"]}, ("rope",)),
        ({"kernels": "rope"}, ("rope",)),
        (["rope", "rms_norm", "swiglu", "cross_entropy", "linear_cross_entropy"],
         ("linear_cross_entropy", "rms_norm", "rope", "swiglu")),
        (["all"], ("linear_cross_entropy", "rms_norm", "rope", "swiglu")),
        (["fused_ce_liger"], ("linear_cross_entropy",)),
        (["auto"], "auto"),
        ({"auto": True}, "auto"),
        (["none"], None),
        ("False False False", None),
        ([False], None),
        (None, None),
    ],
)  # fmt: skip
def test_every_spelling(value, expected):
    assert kernels(value) == expected


def test_old_names_in_the_constructor():
    config = FastKernelsConfig(fast_loss=True, fast_rms_layernorm=True, fast_rope_embeddings=True)
    assert config == FastKernelsConfig(kernels=("rope", "rms_norm", "cross_entropy"))
    assert config.kernels == THREE
    assert FastKernelsConfig(fast_loss="fused_ce_liger").kernels == ("linear_cross_entropy",)
    assert FastKernelsConfig(fast_loss=False).is_off
    assert dataclasses.replace(config, auto=False) == config
    assert [item.name for item in dataclasses.fields(config)] == ["kernels", "auto"]


def test_each_kernel_has_its_name():
    for name in KERNELS:
        assert kernels([name]) == (name,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "--fast_kernels was given nothing; name any of cross_entropy, linear_cross_entropy, rms_norm, rope, "
             "swiglu, or all, auto or none"),
        (["True"], "--fast_kernels was given True, but booleans come in threes (fast_loss, fast_rms_layernorm, "
                   "fast_rope_embeddings); give three of them, or names of kernels, all, auto or none"),
        (["ropes"], '--fast_kernels was given "ropes", which is no kernel; did you mean rope?'),
        (["x"], '--fast_kernels was given "x", which is no kernel; name any of cross_entropy, linear_cross_entropy, '
                "rms_norm, rope, swiglu, or all, auto or none"),
        (["auto", "rope"], "--fast_kernels was given auto together with other options; keep auto or the others"),
        (["none", "rope"], "--fast_kernels was given none together with other options; keep none or the others"),
        (["all", "rope=False"], "--fast_kernels was given all together with other options; keep all or the others"),
        (["rope", "rope"], "--fast_kernels was given rope twice; keep one"),
        (["rope", "FastRoPE"], "--fast_kernels was given rope twice; keep one"),
        (["rope", "rope=False"], "--fast_kernels was given rope twice; keep one"),
        (["fast_loss=True", "cross_entropy=False"], "--fast_kernels was given cross_entropy twice; keep one"),
        (["rope=3"], '--fast_kernels was given rope "3", but it takes true or false; correct the value'),
        (["fast_loss=x"], '--fast_kernels was given fast_loss "x", but it takes true, false or fused_ce_liger; correct '
                          "the value"),
    ],
)  # fmt: skip
def test_refuses(value, message):
    with pytest.raises(ConfigError) as error:
        kernels(value)
    assert str(error.value) == message


def test_constructor_refuses_auto_with_names():
    with pytest.raises(ConfigError) as error:
        FastKernelsConfig(auto=True, kernels=("rope", "swiglu"))
    assert str(error.value) == "--fast_kernels was given auto together with rope, swiglu; keep auto or the names"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["auto_gptq", "True"], FusedLoraConfig(base_layer="auto_gptq", fused_lora=True)),
        (["bitsandbytes", "True"], FusedLoraConfig(base_layer="bitsandbytes")),
        (["True", "bitsandbytes"], FusedLoraConfig(base_layer="bitsandbytes")),
        (["auto"], FusedLoraConfig(base_layer="auto")),
        ("auto", FusedLoraConfig()),
        (True, FusedLoraConfig()),
        ({"base_layer": "auto_gptq", "fused_lora": "true"}, FusedLoraConfig(base_layer="auto_gptq")),
        (["auto_gptq", "False"], None),
        (FusedLoraConfig(fused_lora=False), None),
    ],
)
def test_fused_lora(value, expected):
    assert FusedOpsAndKernelsConfig(fused_lora=value).fused_lora == expected


def test_fused_lora_refuses_an_unknown_base():
    with pytest.raises(ConfigError) as error:
        FusedLoraConfig(base_layer="awq")
    assert (
        str(error.value)
        == '--fused_lora was given base_layer "awq", but it takes one of auto_gptq, bitsandbytes, auto; correct '
        "the value"
    )
