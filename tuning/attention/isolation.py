"""Prove on the loaded model that samples of a flattened batch cannot see each other.

The idea: change every token of one sample and look whether anything of the others moves. A small batch is cut from the
first real one (the first tokens of three samples), so the final collator's keyword arguments are seen, a 7B model needs
well under a second, and every layer runs with its real class. Layers are judged one by one: in the changed run each
layer gets the unchanged input for the other samples' tokens, so what then differs in its output leaked in that very
layer. This also keeps rounding from growing from layer to layer until an expert router flips.

A second look catches what leaves others alone and is wrong all the same, as positions that do not restart: the last
sample's logits must equal those of the sample run alone, by the attention the model had before.

Nothing may stay behind: no gradient is made, and random numbers, buffers and training modes are put back bit for bit.
What is not seen: a fault that needs samples longer than the cut, and leaks in the backward pass alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tuning.errors import PluginError, UserError

__all__ = ["check_isolation", "cut_batch"]

_SAMPLES = 3  # the middle one is changed, so that leaks in both directions show
_TOKENS = 24  # a sample; enough for every convolution and short window
# largest relative change of a token's state (l2) that is rounding: experts get other batch shapes, nothing else differs
_SAME = {True: 1e-4, False: 2e-2}  # fp32: yes, no
# the same for a sample alone, where every kernel gets another shape and rounding grows through the layers
_ALONE = {True: 1e-3, False: 1e-1}
# a buffer above this holds quantised weights, which no forward writes
_COPIED_BYTES = 2**24


def check_isolation(model: nn.Module, batch: Mapping[str, Any], *, autocast: torch.dtype | None = None) -> float:
    """Check that no sample of a flattened batch can see another.

    Args:
        model: The model as it will train: patched, on its device.
        batch: The first batch, as the final collator made it; not changed.
        autocast: The dtype the run computes in where it differs from the weights'; None: none.

    Returns:
        Seconds it took.

    Raises:
        PluginError: With the first layer that leaks, or what else is wrong.
    """
    started = time.monotonic()
    device = next(model.parameters()).device
    small = _move(cut_batch(batch), device)
    changed, others = _change_middle(small, _count_ids(model))
    with _no_trace(model, device), torch.autocast(device.type, autocast, enabled=autocast is not None):
        model.train()
        before = _run(model, small)
        after = _run(model, changed, before=before, others=others)
        exact = autocast is None and before.logits.dtype == torch.float32
        _judge_layers(before, after, others, _SAME[exact])
        model.eval()
        together, alone, first = _run_last_alone(model, small)
        _judge_alone(together[first:], alone, _ALONE[exact], has_experts=_has_experts(model))
    return time.monotonic() - started


def cut_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the first tokens of a few samples out of a flattened batch.

    A batch of fewer samples gives some of them twice. Whatever has one entry a token is cut alike, so arguments that
    the collator of this project does not make stay in.

    Raises:
        PluginError: If the batch is not flattened.
    """
    cu_seqlens = batch.get("cu_seq_lens_q")
    if cu_seqlens is None or batch.get("position_ids") is None:
        raise PluginError(
            "--padding_free was asked for, but the first batch carries no boundaries of samples (it has "
            f"{', '.join(sorted(batch))}): another collator took its place. Drop that collator or --padding_free."
        )
    bounds = cu_seqlens.tolist()
    spans = [(start, min(end, start + _TOKENS)) for start, end in itertools.pairwise(bounds) if end > start]
    spans = sorted(spans, key=lambda span: span[0] - span[1])[:_SAMPLES]  # the longest
    spans = [spans[i % len(spans)] for i in range(_SAMPLES)]
    device = batch["position_ids"].device
    keep = torch.cat([torch.arange(start, end, device=device) for start, end in spans])
    lengths = [end - start for start, end in spans]
    tokens = bounds[-1]
    cut: dict[str, Any] = {
        name: value.index_select(-1, keep.to(value.device)) if _is_per_token(value, tokens) else value
        for name, value in batch.items()
        if name != "labels"
    }
    new_bounds = torch.tensor([0, *lengths]).cumsum(0).to(cu_seqlens)
    cut |= {"cu_seq_lens_q": new_bounds, "cu_seq_lens_k": new_bounds}
    cut |= {name: max(lengths) for name in ("max_length_q", "max_length_k")}
    if "seq_idx" in cut:
        numbers = torch.arange(_SAMPLES, device=device).repeat_interleave(torch.tensor(lengths, device=device))
        cut["seq_idx"] = numbers[None].to(cut["seq_idx"])
    return cut


def _is_per_token(value: Any, tokens: int) -> bool:  # noqa: ANN401 - anything a batch may hold
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[-1] == tokens


def _move(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _count_ids(model: nn.Module) -> int:
    """Return how many ids the model embeds."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    rows: int = embedding.weight.shape[0]
    return rows


def _change_middle(small: Mapping[str, Any], num_ids: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the batch with every id of its middle sample changed, and which tokens belong to the others."""
    ids = small["input_ids"]
    start, end = small["cu_seq_lens_q"][1:3].tolist()
    others = torch.ones(ids.shape[-1], dtype=torch.bool, device=ids.device)
    others[start:end] = False
    moved = (ids + max(1, num_ids // 2)) % num_ids
    return {**small, "input_ids": torch.where(others, ids, moved)}, others


@dataclass
class _Record:
    """What one forward showed: input and output of each layer and the logits, all [T, width]."""

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))


def _find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the decoder layers by name: what can be checkpointed, or else the longest list of modules."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}
    if layers:
        return layers
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    name, longest = max(lists, key=lambda item: len(item[1]), default=("", nn.ModuleList()))
    return {f"{name}.{i}": layer for i, layer in enumerate(longest)}


def _run(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    before: _Record | None = None,
    others: torch.Tensor | None = None,
) -> _Record:
    """Run the model and record its layers; with ``before``, each layer gets its former input at ``others``."""
    record = _Record()
    with ExitStack() as hooks:
        for name, layer in _find_layers(model).items():
            record.classes[name] = type(layer).__name__

            def enter(
                _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str = name
            ) -> tuple[tuple[Any, ...], dict[str, Any]]:
                hidden = args[0] if args else kwargs["hidden_states"]
                if before is not None and others is not None:
                    hidden = torch.where(others[:, None], before.inputs[name], hidden)
                record.inputs[name] = hidden
                return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

            def leave(_: nn.Module, args: tuple[Any, ...], output: Any, *, name: str = name) -> None:  # noqa: ANN401
                record.outputs[name] = output if isinstance(output, torch.Tensor) else output[0]

            hooks.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(leave).remove)
        record.logits = _forward(model, batch)
    return record


def _forward(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the logits, [T, V]; random numbers are the same in every call.

    Raises:
        PluginError: If the model cannot run the batch at all.
    """
    torch.manual_seed(0)
    try:
        logits: torch.Tensor = model(**batch, use_cache=False).logits
    except (UserError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise PluginError(
            f"--padding_free was asked for, but {type(model).__name__} cannot run a flattened batch "
            f"({type(error).__name__}: {error}). Train this model without --padding_free."
        ) from error
    return logits[0]


def _run_last_alone(model: nn.Module, small: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the logits of the batch, those of its last sample run alone, and where that sample starts."""
    first = int(small["cu_seq_lens_q"][-2])
    ids = small["input_ids"][:, first:]
    positions = torch.arange(ids.shape[-1], device=ids.device)[None]
    return _forward(model, small), _forward(model, {"input_ids": ids, "position_ids": positions}), first


def _relative_change(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return each token's change in units of its state, [T]."""
    old, new = old.float(), new.float()
    return torch.linalg.vector_norm(new - old, dim=-1) / torch.linalg.vector_norm(old, dim=-1).clamp(min=1e-6)


def _judge_layers(before: _Record, after: _Record, others: torch.Tensor, limit: float) -> None:
    changes = {name: _relative_change(before.outputs[name][0], after.outputs[name][0]) for name in before.outputs}
    changes["the logits, after all layers"] = _relative_change(before.logits, after.logits)
    worst = {name: float(change[others].max()) for name, change in changes.items()}
    # a NaN compares false: it must not pass
    leaks = [name for name, change in worst.items() if not change <= limit]
    if leaks:
        first = leaks[0]
        kind = f" ({before.classes[first]})" if first in before.classes else ""
        raise PluginError(
            f"--padding_free was asked for, but this model lets samples of one batch see each other: after one sample "
            f"was changed, the others moved by {worst[first]:.2g} (relative) in {first}{kind}, and in {len(leaks) - 1} "
            "more places. Train it without --padding_free; --isolation_check off would train on mixed samples."
        )


def _judge_alone(together: torch.Tensor, alone: torch.Tensor, limit: float, *, has_experts: bool) -> None:
    change = _relative_change(alone, together)
    # rounding may send a token to another expert, which says nothing of samples: then most tokens must agree
    difference = float(change.median() if has_experts else change.max())
    if not difference <= limit:
        raise PluginError(
            f"--padding_free was asked for, but a sample inside a batch gives other logits than alone (relative "
            f"difference {difference:.2g}, allowed {limit:.2g}): its positions or its attention are not those of a "
            "sample of its own. Train this model without --padding_free."
        )


def _has_experts(model: nn.Module) -> bool:
    return any(word in name.rpartition(".")[2] for name, _ in model.named_modules() for word in ("expert", "router"))


@contextmanager
def _no_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run without gradients or compilation, and put random state, buffers and training modes back."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer._version, buffer.clone() if buffer.nbytes <= _COPIED_BYTES else None)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module, name, buffer, version, copy in buffers:
                if buffer._version != version and copy is not None:
                    buffer.copy_(copy)
                module._buffers[name] = buffer
