"""``--fast_kernels``: Triton kernels take the place of a model's norms, rotary embeddings, gated MLPs and loss.

What fits is found by what modules compute (``tuning.models.structure``), so a model class nobody has heard of gets
the same treatment as a known one. Each change is on one instance and goes away with the run.

How each seat is taken:

- norms and MLPs get a ``forward`` of their own on the instance, which calls the kernel;
- attention modules call a rotary function of their file by its name. The instance gets the very same forward, built
  anew from its code with that one name bound to the kernel; the file's own globals stay as they are;
- the causal model's forward takes ``fast_loss=True`` and answers with summed loss terms. It runs the model's own
  forward; for ``linear_cross_entropy`` its head computes the loss in place of the logits. So wrappers, hooks,
  adapters and auxiliary losses all work as without it.

docs/adr/020-seats-of-the-kernels.md has the alternatives.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tuning.acceleration.plugin import AccelerationPlugin, Collator, Facts, Loss, LossTerms, Patch
from tuning.config.acceleration_configs import FastKernelsConfig
from tuning.environment import triton_interpreted
from tuning.errors import PluginError
from tuning.logs import logger
from tuning.models import structure
from tuning.models.causal_loss import IGNORE_INDEX, HeadInputs, next_labels, with_head_loss, with_logits_loss
from tuning.models.forwards import own_forward, rebind
from tuning.models.heads import find_causal_model, find_head, head_parts
from tuning.models.structure import GatedMLP, RMSNorm, Rotary

__all__ = ["FastKernelsPlugin", "FastLoss", "SupervisedIndex"]

_LOSSES = ("linear_cross_entropy", "cross_entropy")
# inside a compiled layer Inductor fuses these itself, and an operator of ours would only stand in its way
_FUSED_BY_COMPILER = ("rms_norm", "rope", "swiglu")
_COMPILING = frozenset({"compile_layers", "compiled"})
# plugins that lay out batches themselves: no batch of theirs is cut into pieces on its way to a rank
_KEEP_BATCHES_WHOLE = frozenset({"multipack", "padding_free"})
_log = logger(__name__)

Forward = Callable[..., Any]


@dataclass
class _Plan:
    """What is to be done to one model.

    Attributes:
        patches: In order.
        notes: Kernel to (modules, why no more).
        loss: Kernel that takes the loss seat, or None.
    """

    patches: list[Patch] = field(default_factory=list)
    notes: dict[str, tuple[int, str]] = field(default_factory=dict)
    loss: str | None = None


class FastKernelsPlugin(AccelerationPlugin[FastKernelsConfig]):
    """Replaces operations by Triton kernels; stable."""

    name = "fast_kernels"
    config_type = FastKernelsConfig

    def __init__(self, config: FastKernelsConfig) -> None:
        super().__init__(config)
        self._plan: _Plan | None = None

    def may_do_nothing(self) -> bool:
        """Say so of ``auto`` and of an empty list; what was asked for by name is patched or refused."""
        return self.config.auto or not self.config.kernels

    def check(self, facts: Facts) -> None:
        """Refuse kernels that were asked for by name where this machine or this run has no place for them.

        Raises:
            PluginError: With every kernel and its reason.
        """
        if self.config.auto:
            return
        reasons = {kernel: _why_not_here(facts) or _why_not_in_this_run(kernel, facts) for kernel in self._wanted()}
        _refuse({kernel: reason for kernel, reason in reasons.items() if reason})

    def check_model(self, model: nn.Module, facts: Facts) -> None:
        """Refuse a model without a module for a kernel that was asked for by name.

        Raises:
            PluginError: With every such kernel and its reason.
        """
        self._plan = self._make_plan(model, facts)
        if not self.config.auto:
            _refuse({kernel: note for kernel, (count, note) in self._plan.notes.items() if not count})

    def patches(self, model: nn.Module, facts: Facts) -> Sequence[Patch]:
        """List the changes, and log which kernel was applied how often and why not more.

        Raises:
            PluginError: As :meth:`check_model`.
        """
        self.check_model(model, facts)
        plan = self._plan
        if plan is None or not plan.notes:
            return ()
        lines = [
            f"  {kernel}: {count} modules{'; ' * bool(note)}{note}" for kernel, (count, note) in plan.notes.items()
        ]
        _log.info("fast kernels for %s:\n%s", type(model).__name__, "\n".join(lines))
        return plan.patches

    def collator(self, inner: Collator, facts: Facts) -> Collator | None:
        """Name the supervised rows of each batch while it is on the CPU, if the head computes those alone."""
        if self._loss_kernel() != "linear_cross_entropy":
            return None
        if facts.peft_config is not None and facts.peft_config.is_prompt_learning:
            return None
        if facts.world_size > 1 and not facts.active & _KEEP_BATCHES_WHOLE:
            return None
        return SupervisedIndex(inner)

    def loss(self, facts: Facts) -> Loss | None:
        """Take the loss seat if a loss kernel was applied."""
        return FastLoss() if self._loss_kernel() else None

    def _loss_kernel(self) -> str | None:
        return self._plan.loss if self._plan is not None else None

    def _wanted(self) -> tuple[str, ...]:
        """Return the kernels to look for; the head with its loss makes a kernel for the loss alone idle."""
        if self.config.auto:
            return "rms_norm", "rope", "swiglu", *_LOSSES
        if _LOSSES[0] in self.config.kernels:
            return tuple(kernel for kernel in self.config.kernels if kernel != _LOSSES[1])
        return self.config.kernels

    def _make_plan(self, model: nn.Module, facts: Facts) -> _Plan:
        plan = _Plan()
        here = _why_not_here(facts)
        compiles = bool(facts.active & _COMPILING) or bool(getattr(facts.train_args, "torch_compile", False))
        for kernel in self._wanted():
            reason = here or _why_not_in_this_run(kernel, facts)
            if self.config.auto and compiles and kernel in _FUSED_BY_COMPILER:
                reason = reason or "torch.compile fuses it already"
            if self.config.auto and plan.loss is not None and kernel in _LOSSES:
                continue
            patches: list[Patch] = []
            if not reason:
                patches, reason = _SEATS[kernel](model, facts)
            plan.patches += patches
            plan.notes[kernel] = (len(patches), reason)
            if patches and kernel in _LOSSES:
                plan.loss = kernel
        return plan


def _refuse(reasons: Mapping[str, str]) -> None:
    if reasons:
        raise PluginError(
            "\n".join(
                f"--fast_kernels {kernel} was asked for, but {reason}; leave it out, or pass --fast_kernels auto to "
                "take what fits"
                for kernel, reason in reasons.items()
            )
        )


def _why_not_here(facts: Facts) -> str:
    """Return why no kernel can run on this machine, or nothing."""
    interpreted = triton_interpreted()
    if facts.device_type != "cuda" and not interpreted:
        return "Triton needs a GPU and this run has none (TRITON_INTERPRET=1 runs it on the CPU, slowly, for tests)"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    return ""


def _why_not_in_this_run(kernel: str, facts: Facts) -> str:
    if kernel not in _LOSSES:
        return ""
    if getattr(facts.train_args, "loss_type", None) == "dft":
        return "it computes the plain cross-entropy and --loss_type is dft"
    if getattr(facts.train_args, "use_liger_kernel", False):
        return "--use_liger_kernel replaces the loss as well"
    return ""


@contextmanager
def _with_forward(module: nn.Module, *, build: Callable[[nn.Module], Forward]) -> Iterator[None]:
    with own_forward(module, build(module)):
        yield


def _patches(kernel: str, sites: Sequence[Any], build: Callable[[Any], Callable[[nn.Module], Forward]]) -> list[Patch]:
    return [
        Patch(
            name=f"fast_kernels.{kernel}",
            target=site.target,
            apply=functools.partial(_with_forward, build=build(site)),
        )
        for site in sites
    ]


def _reason(unfit: Sequence[structure.Unfit], model: nn.Module, nothing: str) -> str:
    others = [
        f"{unfit_.target} ({type(model.get_submodule(unfit_.target)).__name__}) {unfit_.reason}" for unfit_ in unfit
    ]
    return ", ".join(others) or nothing


def _seat_rms_norm(model: nn.Module, _facts: Facts) -> tuple[list[Patch], str]:
    from tuning.kernels.rms_norm import rms_norm  # noqa: PLC0415 - needs triton, which not every torch brings

    def build(site: RMSNorm) -> Callable[[nn.Module], Forward]:
        def forward(self: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:  # noqa: ANN401
            (x,) = (*args, *kwargs.values())
            return rms_norm(x, self.weight, site.eps, offset=site.offset, cast_before_weight=site.cast_before_weight)

        return lambda _module: forward

    sites, unfit = structure.find_rms_norms(model)
    return _patches("rms_norm", sites, build), _reason(unfit, model, "" if sites else "no module is an RMSNorm")


def _seat_rope(model: nn.Module, _facts: Facts) -> tuple[list[Patch], str]:
    from tuning.kernels.rope import rope  # noqa: PLC0415 - as above

    def build(site: Rotary) -> Callable[[nn.Module], Forward]:
        def turn(
            q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if unsqueeze_dim == 1:
                return rope(q, k, cos, sin, half_tables=site.half_tables)
            q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, half_tables=site.half_tables)
            return q.transpose(1, 2), k.transpose(1, 2)

        return lambda module: rebind(type(module).forward, site.function, turn)

    sites, unfit = structure.find_rotaries(model)
    nothing = "" if sites else "no module calls a rotary function of queries and keys"
    return _patches("rope", sites, build), _reason(unfit, model, nothing)


def _seat_swiglu(model: nn.Module, _facts: Facts) -> tuple[list[Patch], str]:
    from tuning.kernels import swiglu as kernel  # noqa: PLC0415 - as above

    split: dict[str, Forward] = {
        "silu": kernel.swiglu,
        "gelu_tanh": kernel.geglu,
        "gelu": functools.partial(kernel.geglu, approximate="none"),
    }
    packed: dict[str, Forward] = {
        "silu": kernel.swiglu_packed,
        "gelu_tanh": kernel.geglu_packed,
        "gelu": functools.partial(kernel.geglu_packed, approximate="none"),
    }

    def build(site: GatedMLP) -> Callable[[nn.Module], Forward]:
        def forward(self: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:  # noqa: ANN401
            (x,) = (*args, *kwargs.values())
            gate = getattr(self, site.gate)(x)
            if site.up is None:
                return getattr(self, site.down)(packed[site.activation](gate))
            up = getattr(self, site.up)(x)
            dtype = torch.promote_types(gate.dtype, up.dtype)
            return getattr(self, site.down)(split[site.activation](gate.to(dtype), up.to(dtype)))

        return lambda _module: forward

    sites, unfit = structure.find_gated_mlps(model)
    return _patches("swiglu", sites, build), _reason(unfit, model, "" if sites else "no module is a gated MLP")


def _seat_linear_cross_entropy(model: nn.Module, facts: Facts) -> tuple[list[Patch], str]:
    from tuning.kernels.linear_cross_entropy import linear_cross_entropy  # noqa: PLC0415 - as above

    head, reason = find_head(model)
    if head is None:
        return [], f"the model {reason}"
    parts, reason = head_parts(getattr(model.get_submodule(head.model), head.layer))
    if not parts:
        return [], reason
    smoothing = _label_smoothing(facts)

    def compute(inputs: HeadInputs) -> dict[str, torch.Tensor]:
        out = linear_cross_entropy(
            inputs.hidden_TD,
            inputs.weight_VD,
            inputs.labels_T,
            bias_V=inputs.bias_V,
            low_rank=inputs.low_rank,
            supervised_index=inputs.supervised_index,
            grad_scale=inputs.loss_factor,
            label_smoothing=smoothing,
            logit_scale=head.scale,
            softcap=head.softcap,
            statistics=True,
        )
        return _terms(out)

    apply = functools.partial(with_head_loss, layer=head.layer, compute=compute)
    return [Patch(name="fast_kernels.linear_cross_entropy", target=head.model, apply=apply)], ""


def _seat_cross_entropy(model: nn.Module, facts: Facts) -> tuple[list[Patch], str]:
    from tuning.kernels import cross_entropy as kernel  # noqa: PLC0415 - as above

    target = find_causal_model(model)
    if target is None:
        return [], "the model has no output head"
    head, _ = find_head(model)
    # logits straight from a product, scaled or not: no operation has saved them for its backward
    overwrite = head is not None and head.softcap == 0
    loss_of = kernel.cross_entropy_ if overwrite else kernel.cross_entropy
    smoothing = _label_smoothing(facts)

    def compute(logits_TV: torch.Tensor, labels_T: torch.Tensor) -> dict[str, torch.Tensor]:
        return _terms(loss_of(logits_TV, labels_T, label_smoothing=smoothing, statistics=True))

    apply = functools.partial(with_logits_loss, compute=compute)
    return [Patch(name="fast_kernels.cross_entropy", target=target, apply=apply)], ""


def _label_smoothing(facts: Facts) -> float:
    return float(getattr(facts.train_args, "label_smoothing_factor", 0.0) or 0.0)


def _terms(out: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401 - the named tuple of either kernel
    return {
        "nll_sum": out.loss_sum,
        "num_tokens": out.num_tokens,
        "entropy_sum": out.entropy_sum,
        "num_correct": out.num_correct,
    }


# kernel to what finds its modules: patches, and why not more
_SEATS: Mapping[str, Callable[[nn.Module, Facts], tuple[list[Patch], str]]] = {
    "rms_norm": _seat_rms_norm,
    "rope": _seat_rope,
    "swiglu": _seat_swiglu,
    "linear_cross_entropy": _seat_linear_cross_entropy,
    "cross_entropy": _seat_cross_entropy,
}


class SupervisedIndex:
    """Adds to each batch which positions have a target, so that the head computes no others.

    Args:
        inner: Makes the batch, with ``labels`` on the CPU.
    """

    def __init__(self, inner: Collator) -> None:
        self.inner = inner

    def __call__(self, samples: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
        """Return the batch of ``inner`` with ``supervised_index``, int64 positions in ``labels.flatten()``."""
        batch = self.inner(samples)
        batch["supervised_index"] = (next_labels(batch["labels"]) != IGNORE_INDEX).nonzero()[:, 0]
        return batch


class FastLoss:
    """The loss seat: asks the patched model for summed loss terms instead of logits.

    Attributes:
        takes_loss_factor: ``inputs`` may hold ``loss_factor``, the number or scalar tensor that the trainer is going
            to multiply ``nll_sum`` by; each gradient is then rounded once instead of twice.
    """

    takes_loss_factor = True

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> LossTerms:
        """Return the terms of one micro-batch.

        Args:
            model: As wrapped for training; its inner causal model is patched.
            inputs: ``labels`` and the model's keyword arguments; ``supervised_index`` and ``loss_factor`` where they
                are known.
        """
        return LossTerms(**model(**inputs, fast_loss=True))
