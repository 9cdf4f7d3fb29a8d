"""The acceleration flags as dataclasses, under the import names of fms-hf-tuning."""

from tuning.config.acceleration_configs.acceleration_framework_config import AccelerationFrameworkConfig
from tuning.config.acceleration_configs.attention_and_distributed_packing import (
    AttentionAndDistributedPackingConfig,
    MultiPack,
    PaddingFree,
)
from tuning.config.acceleration_configs.fused_ops_and_kernels import (
    FastKernelsConfig,
    FusedLoraConfig,
    FusedOpsAndKernelsConfig,
)
from tuning.config.acceleration_configs.quantized_lora_config import (
    AutoGPTQLoraConfig,
    BNBQLoraConfig,
    QuantizedLoraConfig,
)

__all__ = [
    "AccelerationFrameworkConfig",
    "AttentionAndDistributedPackingConfig",
    "AutoGPTQLoraConfig",
    "BNBQLoraConfig",
    "FastKernelsConfig",
    "FusedLoraConfig",
    "FusedOpsAndKernelsConfig",
    "MultiPack",
    "PaddingFree",
    "QuantizedLoraConfig",
]
