"""The built-in plugins, in the order in which they are asked. No discovery: third parties come by entry point.

Each entry is ``"module:Class"`` and is imported when its flag is on, so that a plugin that fails to import takes
nothing else down.
"""

__all__ = ["BUILTIN"]

# flag name -> where its plugin is; the order is the order of hooks
BUILTIN: dict[str, str] = {
    "padding_free": "tuning.acceleration.plugins.padding_free:PaddingFreePlugin",
    "multipack": "tuning.acceleration.plugins.multipack:MultiPackPlugin",
    "bnb_qlora": "tuning.acceleration.plugins.quantized_peft:BNBQLoraPlugin",
    "auto_gptq": "tuning.acceleration.plugins.quantized_peft:AutoGPTQPlugin",
    "fast_kernels": "tuning.acceleration.plugins.fast_kernels:FastKernelsPlugin",
    # after fast_kernels: its MLP block goes over that plugin's, and holds the same activation kernel
    "fused_lora": "tuning.acceleration.plugins.fused_lora:FusedLoraPlugin",
}
