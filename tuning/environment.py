"""What this machine and launch are: the only place that asks.

:func:`detect_launch` reads ranks and paths from environment variables and imports nothing heavy, so that argument
errors come at once. :func:`detect` adds what only torch knows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from tuning.errors import ConfigError

__all__ = ["Environment", "Launch", "detect", "detect_launch", "installed_version", "triton_interpreted"]

# names as torchrun and accelerate export them
_RANK, _WORLD_SIZE, _LOCAL_RANK = "RANK", "WORLD_SIZE", "LOCAL_RANK"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How the process was launched.

    Attributes:
        rank: Rank over all machines, from 0.
        local_rank: Rank on this machine, from 0.
        world_size: Processes of the run.
        termination_log: File that gets the last error, or None; ``TERMINATION_LOG_FILE``.
        config_path: JSON or YAML configuration named by ``SFT_TRAINER_CONFIG_JSON_PATH``, or None.
    """

    rank: int
    local_rank: int
    world_size: int
    termination_log: str | None
    config_path: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What the device can do.

    Attributes:
        launch: How the process was launched.
        device_type: ``"cuda"`` or ``"cpu"``.
        num_gpus: GPUs this process sees.
        compute_capability: (major, minor) of the current GPU; None without one.
        device_name: The vendor's name of the GPU, ``"cpu"`` without one.
        device_bytes: Memory of the GPU in bytes; 0 without one.
        cuda_version: CUDA version torch was built with, or None.
    """

    launch: Launch
    device_type: str
    num_gpus: int
    compute_capability: tuple[int, int] | None
    device_name: str
    device_bytes: int
    cuda_version: str | None


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Read the launch from environment variables.

    Args:
        environ: Variables to read; default: those of the process.

    Raises:
        ConfigError: If a rank or the number of processes is no whole number.
    """
    values = os.environ if environ is None else environ
    return Launch(
        rank=_read_count(values, _RANK, 0),
        local_rank=_read_count(values, _LOCAL_RANK, 0),
        world_size=_read_count(values, _WORLD_SIZE, 1),
        termination_log=values.get("TERMINATION_LOG_FILE") or None,
        config_path=values.get("SFT_TRAINER_CONFIG_JSON_PATH") or None,
    )


def _read_count(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name) or str(default)
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"The environment variable {name} is {text!r}, but it must be a whole number, as torchrun and accelerate "
            "set it; correct or unset it"
        ) from error


def detect(launch: Launch | None = None, *, use_cpu: bool = False) -> Environment:
    """Ask torch what the device can do.

    Args:
        launch: From :func:`detect_launch`; default: read now.
        use_cpu: Report a machine without a GPU, as ``--use_cpu`` asks.
    """
    import torch  # noqa: PLC0415 - seconds; argument errors must come before it

    launch = launch or detect_launch()
    if use_cpu or not torch.cuda.is_available():
        return Environment(
            launch=launch, device_type="cpu", num_gpus=0, compute_capability=None, device_name="cpu",
            device_bytes=0, cuda_version=torch.version.cuda,
        )  # fmt: skip
    index = min(launch.local_rank, torch.cuda.device_count() - 1)
    properties = torch.cuda.get_device_properties(index)
    return Environment(
        launch=launch,
        device_type="cuda",
        num_gpus=torch.cuda.device_count(),
        compute_capability=(properties.major, properties.minor),
        device_name=properties.name,
        device_bytes=properties.total_memory,
        cuda_version=torch.version.cuda,
    )


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a Python distribution, or None; imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def triton_interpreted(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether Triton interprets its kernels on the CPU, as ``TRITON_INTERPRET=1`` asks; slow, for tests.

    Args:
        environ: Variables to read; default: those of the process.
    """
    values = os.environ if environ is None else environ
    # the spellings that Triton itself takes
    return values.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
