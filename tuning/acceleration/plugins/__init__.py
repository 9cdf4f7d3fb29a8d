"""The built-in plugins, in the order in which they are asked. No discovery: third parties come by entry point.

Each entry is ``"module:Class"`` and is imported when its flag is on, so that a plugin that fails to import takes
nothing else down.
"""

__all__ = ["BUILTIN"]

# flag name -> where its plugin is; the order is the order of hooks
BUILTIN: dict[str, str] = {
    "padding_free": "tuning.acceleration.plugins.padding_free:PaddingFreePlugin",
    "multipack": "tuning.acceleration.plugins.multipack:MultiPackPlugin",
    "fast_kernels": "tuning.acceleration.plugins.fast_kernels:FastKernelsPlugin",
}
