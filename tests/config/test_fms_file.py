import pytest

from tests.config.inputs import problems_of, read
from tuning.config.acceleration_configs import (
    AutoGPTQLoraConfig,
    BNBQLoraConfig,
    FastKernelsConfig,
    FusedLoraConfig,
    MultiPack,
    PaddingFree,
)
from tuning.config.fms_file import read_framework_file
from tuning.errors import ConfigError

THREE = FastKernelsConfig(fast_loss=True, fast_rms_layernorm=True, fast_rope_embeddings=True)


def active(path, *argv):
    return read("--acceleration_framework_config_file", str(path), *argv).acceleration.active()


def test_training_section(tmp_path):
    path = tmp_path / "framework.yaml"
    path.write_text(
        "plugins:\n"
        "  training:\n"
        "    attention:\n      padding_free:\n        method: huggingface\n"
        "    dataloader:\n      multipack:\n        num_processes: 8\n"
        "    fused_ops_and_kernels:\n"
        "      fast_loss: true\n      fast_rms_layernorm: true\n      fast_rope_embeddings: true\n"
    )
    assert active(path) == {
        "padding_free": PaddingFree(),
        "multipack": MultiPack(num_processes=8),
        "fast_kernels": THREE,
    }
    assert active(path, "--multipack", "4", "--fast_kernels", "none")["multipack"].num_processes == 4


@pytest.mark.parametrize(
    ("base", "options", "expected"),
    [
        ("auto_gptq", "kernel: triton_v2, from_quantized: true, use_external_lib: false", AutoGPTQLoraConfig()),
        ("bitsandbytes", "quant_type: nf4, no_peft_model: false", BNBQLoraConfig()),
    ],
)
def test_quantised_section(tmp_path, base, options, expected):
    path = tmp_path / "framework.yaml"
    path.write_text(
        f"plugins: {{peft: {{quantization: {{{base}: {{{options}}}, fused_ops_and_kernels: {{base_layer: {base}, "
        "fused_lora: true, fast_loss: true, fast_rsm_layernorm: true, fast_rope_embeddings: true}}}}\n"
    )
    assert active(path) == {
        {"auto_gptq": "auto_gptq", "bitsandbytes": "bnb_qlora"}[base]: expected,
        "fused_lora": FusedLoraConfig(base_layer=base),
        "fast_kernels": THREE,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "plugins: {training: {moe: {scattermoe: {ep_degree: 1}}}}",
            "{path} has plugins.training.moe, which has no counterpart here; remove it",
        ),
        (
            "plugins: {peft: {quantization: {auto_gptq: {use_external_lib: true}}}}",
            "{path} asks for the package auto_gptq by use_external_lib, which is not used; remove it",
        ),
        (
            "max_steps: 3",
            "{path} is no framework configuration, which has one key, plugins; use --config for flags",
        ),
    ],
)
def test_refuses(tmp_path, text, message):
    path = tmp_path / "framework.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_framework_file(str(path))
    assert str(error.value) == message.replace("{path}", str(path))


def test_a_wrong_option_is_named_by_file(tmp_path):
    path = tmp_path / "framework.yaml"
    path.write_text("plugins: {training: {attention: {padding_free: {method: other}}}}")
    assert problems_of("--acceleration_framework_config_file", str(path)) == [
        f'{path}: padding_free was given method "other", but it takes only huggingface; correct the value'
    ]
