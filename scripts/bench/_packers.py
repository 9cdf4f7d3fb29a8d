"""Packers of other projects, behind one signature: their own functions, called as their trainers call them.

Each takes lengths, capacity and ranks and returns the batches ``[micro_step][rank]`` of samples, and the seconds it
took to plan them. What a trainer would lose at the end of an epoch, because ranks must come out even, is left out.
A project that is not installed is skipped; ``pip install --no-deps`` of axolotl or fms-acceleration-aadp and numba is
enough, in a folder on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

__all__ = ["PACKERS", "Batches", "available"]

Batches = list[list[list[int]]]
Packer = Callable[[np.ndarray, int, int, int], tuple[Batches, float]]


def fixed_batch(lengths: np.ndarray, capacity: int, num_ranks: int, batch_size: int) -> tuple[Batches, float]:
    """Deal out a shuffle, ``batch_size`` samples a seat: padding-free alone."""
    del capacity
    started = time.perf_counter()
    order = np.random.default_rng(0).permutation(len(lengths))
    whole = len(order) // (num_ranks * batch_size) * num_ranks * batch_size
    batches = order[:whole].reshape(-1, num_ranks, batch_size).tolist()
    return batches, time.perf_counter() - started


def trl_bfd(lengths: np.ndarray, capacity: int, num_ranks: int, batch_size: int) -> tuple[Batches, float]:
    """TRL's best fit decreasing over the data set, as ``packing=True`` does it; a shuffle deals the packs out."""
    del batch_size
    import pyarrow as pa
    from datasets import Dataset
    from trl import pack_dataset

    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    ids = pa.ListArray.from_arrays(offsets, pa.array(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)))
    data = Dataset(pa.table({"input_ids": ids}))
    started = time.perf_counter()
    packed = pack_dataset(data, capacity, strategy="bfd")
    seconds = time.perf_counter() - started
    column = packed.data.column("input_ids").combine_chunks()
    values, bounds = np.asarray(column.values), np.asarray(column.offsets)
    packs = [np.unique(values[start:end]).tolist() for start, end in itertools.pairwise(bounds)]
    return _deal(packs, num_ranks), seconds


def axolotl(lengths: np.ndarray, capacity: int, num_ranks: int, batch_size: int) -> tuple[Batches, float]:
    """Axolotl's batch sampler over a shuffle; accelerate deals its packs out."""
    del batch_size
    module = importlib.import_module("axolotl.utils.samplers.multipack")
    fitting = np.flatnonzero(lengths <= capacity)  # longer ones are dropped when the data is prepared
    order = fitting[np.random.default_rng(0).permutation(len(fitting))].tolist()

    def sampler() -> object:
        return module.MultipackBatchSampler(
            order, batch_size=1, batch_max_len=capacity, lengths=lengths, bin_size=200, num_processes=1
        )

    module.MultipackBatchSampler(
        order[:100], batch_size=1, batch_max_len=capacity, lengths=lengths, bin_size=200, num_processes=1
    ).generate_batches()  # compiles
    started = time.perf_counter()
    packs = [batch[0] for batch in sampler().generate_batches()]
    return _deal(packs, num_ranks, shuffle=False), time.perf_counter() - started


def fms_aadp(lengths: np.ndarray, capacity: int, num_ranks: int, batch_size: int) -> tuple[Batches, float]:
    """fms-acceleration's sampler; every rank plans for itself, one is timed."""
    del batch_size
    module = _load("fms_acceleration_aadp", "multipack_sampler.py")
    found = []
    with contextlib.redirect_stdout(io.StringIO()):
        for rank in range(-1, num_ranks):  # the first call compiles
            sampler = module.MultipackDistributedBatchSampler(
                capacity, lengths, num_replicas=num_ranks, rank=max(rank, 0), seed=42, padding=False
            )
            started = time.perf_counter()
            found.append([batch.tolist() for batch in sampler.generate_batches()])
            seconds = time.perf_counter() - started
    return [list(step) for step in zip(*found[1:], strict=False)], seconds


def _load(package: str, name: str) -> ModuleType:
    """Import one file of a package whose ``__init__`` needs what is not installed, such as an older TRL."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ImportError(package)
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), Path(found.origin).with_name(name))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _deal(packs: list[list[int]], num_ranks: int, *, shuffle: bool = True) -> Batches:
    order = np.random.default_rng(0).permutation(len(packs)) if shuffle else np.arange(len(packs))
    whole = len(packs) // num_ranks * num_ranks
    dealt = [packs[number] for number in order[:whole]]
    return [dealt[start : start + num_ranks] for start in range(0, whole, num_ranks)]


PACKERS: dict[str, tuple[str | None, Packer]] = {
    "fixed_batch": (None, fixed_batch),
    "trl_bfd": ("trl", trl_bfd),
    "axolotl": ("axolotl.utils.samplers.multipack", axolotl),
    "fms_aadp": ("fms_acceleration_aadp", fms_aadp),
}


def available(name: str) -> bool:
    """Say whether a packer's project, and what it needs, can be imported."""
    module = PACKERS[name][0]
    if module is None:
        return True
    if name == "fms_aadp":
        return all(importlib.util.find_spec(package) is not None for package in (module, "numba"))
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
