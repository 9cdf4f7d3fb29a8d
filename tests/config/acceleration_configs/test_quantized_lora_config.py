import pytest

from tuning.config.acceleration_configs import AutoGPTQLoraConfig, BNBQLoraConfig, QuantizedLoraConfig
from tuning.errors import ConfigError


@pytest.mark.parametrize("value", ["nf4", ["nf4"], {"quant_type": "nf4"}, True, []])
def test_bitsandbytes_in_every_spelling(value):
    assert QuantizedLoraConfig(bnb_qlora=value).bnb_qlora == BNBQLoraConfig(quant_type="nf4")


def test_both_options_of_bitsandbytes():
    config = QuantizedLoraConfig(bnb_qlora="fp4 no_peft_model=true").bnb_qlora
    assert config == BNBQLoraConfig(quant_type="fp4", no_peft_model=True)


@pytest.mark.parametrize("value", ["triton_v2", ["triton_v2"], {"kernel": "triton_v2"}, ["True"]])
def test_auto_gptq_in_every_spelling(value):
    assert QuantizedLoraConfig(auto_gptq=value).auto_gptq == AutoGPTQLoraConfig(kernel="triton_v2", from_quantized=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: BNBQLoraConfig(quant_type="int8"),
            '--bitsandbytes was given quant_type "int8", but it takes one of nf4, fp4; correct the value',
        ),
        (
            lambda: AutoGPTQLoraConfig(kernel="cuda"),
            '--auto_gptq was given kernel "cuda", but it takes only triton_v2; correct the value',
        ),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == message
