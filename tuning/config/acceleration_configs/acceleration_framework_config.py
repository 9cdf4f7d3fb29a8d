"""The bundle that the framework picks its plugins from: flag name to config object."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from tuning.config.acceleration_configs.attention_and_distributed_packing import (
    AttentionAndDistributedPackingConfig,
)
from tuning.config.acceleration_configs.fused_ops_and_kernels import FusedOpsAndKernelsConfig
from tuning.config.acceleration_configs.quantized_lora_config import QuantizedLoraConfig

__all__ = ["AccelerationFrameworkConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AccelerationFrameworkConfig:
    """Every acceleration flag of a run. Third-party flags are in ``extra``, by name."""

    attention: AttentionAndDistributedPackingConfig = field(default_factory=AttentionAndDistributedPackingConfig)
    kernels: FusedOpsAndKernelsConfig = field(default_factory=FusedOpsAndKernelsConfig)
    quantized: QuantizedLoraConfig = field(default_factory=QuantizedLoraConfig)
    extra: tuple[tuple[str, Any], ...] = ()

    def active(self) -> dict[str, Any]:
        """Return flag name to config object of every flag that is on; a flag that is off is not in it."""
        flags: dict[str, Any] = {}
        for group in (self.attention, self.kernels, self.quantized):
            for item in dataclasses.fields(group):
                flags[item.name] = getattr(group, item.name)
        flags.update(self.extra)
        return {name: value for name, value in flags.items() if value is not None}
