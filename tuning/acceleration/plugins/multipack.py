"""``--multipack``: every GPU gets equal work, and no sample is lost.

The plugin takes the batch-sampler seat. It turns the run's arguments into a packing spec, decides what happens to
samples longer than ``max_tokens``, and says in the log what the plan is worth and what to change where it is not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from transformers import TrainerCallback

from tuning.acceleration.plugin import AccelerationPlugin, Collator, Facts, Lengths
from tuning.config.acceleration_configs import MultiPack
from tuning.data import cost
from tuning.data.packing import PackingSpec, mean_tokens, surely_fits
from tuning.data.sampler import MultiPackSampler
from tuning.errors import ConfigError, DataError, PluginError
from tuning.logs import logger

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["LoaderCheck", "MultiPackPlugin", "TruncatingCollator", "shape_of"]

IntArray = npt.NDArray[np.integer[Any]]

_log = logger(__name__)

# below this share of busy time the log says what to change
_GOOD_BOUND = 0.95


class MultiPackPlugin(AccelerationPlugin[MultiPack]):
    """Balances the work of all ranks; stable."""

    name = "multipack"
    config_type = MultiPack
    requires = frozenset({"padding_free"})

    def __init__(self, config: MultiPack) -> None:
        super().__init__(config)
        self._sampler: MultiPackSampler | None = None
        self._longest: int | None = None

    def check(self, facts: Facts) -> None:
        """Refuse options that ask for another order of the data, or that leave nothing to balance by.

        Raises:
            ConfigError: With every reason.
        """
        problems = [
            *_order_problems(facts.train_args),
            *_option_problems(self.config, facts.train_args),
        ]
        if self.config.cost == "model":
            try:
                cost.from_shape(shape_of(facts))
            except cost.MissingShapeError as error:
                problems.append(
                    f"--multipack cost=model needs the number of {error} of the model, and its config.json has none; "
                    "use --multipack cost=tokens"
                )
        if problems:
            raise ConfigError(problems)

    def collator(self, inner: Collator, facts: Facts) -> Collator | None:
        """Cut samples to ``max_tokens`` before ``inner`` sees them, where over_long=truncate asks for it."""
        if self.config.over_long != "truncate":
            return None
        return TruncatingCollator(inner, self)

    @property
    def longest(self) -> int | None:
        """Tokens samples are cut to; None before the sampler is made, and where nothing is cut."""
        return self._longest

    def batch_sampler(self, lengths: Lengths, facts: Facts) -> MultiPackSampler:
        """Return this rank's planned batches.

        Raises:
            DataError: If no sample is left, or samples or steps do not fit ``max_tokens``.
        """
        sizes: IntArray = np.asarray(lengths, dtype=np.int64)
        if len(sizes) == 0:
            raise DataError("there is no sample to train on; see the data table for why rows were dropped")
        args = facts.train_args
        max_tokens = self.config.max_tokens
        if max_tokens is None and self.config.mode == "budget":
            max_tokens = mean_tokens(sizes, args.per_device_train_batch_size)
        sizes, rows = self._apply_over_long(sizes, max_tokens)
        spec = PackingSpec(
            mode=self.config.mode,
            num_ranks=facts.world_size,
            batch_size=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            seed=facts.seed if args.data_seed is None else args.data_seed,
            cost=cost.TOKENS if self.config.cost == "tokens" else cost.from_shape(shape_of(facts)),
            max_tokens=max_tokens,
        )
        started = time.perf_counter()
        sampler = MultiPackSampler(
            sizes, spec, rank=facts.rank, rows=rows, replan=self.config.resume == "replan"
        )  # fmt: skip
        seconds = time.perf_counter() - started
        if not surely_fits(sizes, spec):
            for epoch in range(1, _num_epochs(args, sampler.num_steps)):
                sampler.plan(epoch)
            sampler.plan(0)
        self._sampler = sampler
        _report(sampler, seconds, self.config, args)
        return sampler

    def callbacks(self) -> Sequence[TrainerCallback]:
        """Return the guard against a loader that was sharded a second time."""
        return () if self._sampler is None else (LoaderCheck(self._sampler),)

    def _apply_over_long(self, sizes: IntArray, max_tokens: int | None) -> tuple[IntArray, IntArray | None]:
        """Return the lengths that are trained on, and their rows where some are left out."""
        over = np.flatnonzero(sizes > max_tokens) if max_tokens is not None else np.empty(0, dtype=np.int64)
        if max_tokens is None or len(over) == 0:
            return sizes, None
        policy = self.config.over_long
        tokens = int((sizes[over] - max_tokens).sum())
        found = (
            f"{len(over)} of {len(sizes)} samples are longer than max_tokens={max_tokens} (longest {int(sizes.max())})"
        )
        if policy == "error" or (policy == "own_step" and self.config.mode == "exact"):
            raise DataError(_refusal(sizes, over, max_tokens, self.config))
        if policy == "truncate":
            self._longest = max_tokens
            _log.warning(
                "multipack: %s and lose their last %d tokens together; one whose answer lies beyond the cut trains on "
                "nothing", found, tokens,
            )  # fmt: skip
            return np.minimum(sizes, max_tokens), None
        if policy == "drop":
            rows = np.flatnonzero(sizes <= max_tokens)
            if len(rows) == 0:
                raise DataError(
                    f"--multipack over_long=drop drops every sample: {found}; raise max_tokens or choose another policy"
                )
            _log.warning("multipack: %s and are dropped; first: row %d", found, int(over[0]))
            return sizes[rows], rows
        _log.info(
            "multipack: %s: each gets a micro-step of its own, in which the other ranks are filled up to its length",
            found,
        )
        return sizes, None


class TruncatingCollator:
    """Cuts each sample to the plugin's ``longest`` and hands it on.

    Args:
        inner: Makes the batch.
        plugin: Knows the length once its sampler is made.
    """

    def __init__(self, inner: Collator, plugin: MultiPackPlugin) -> None:
        self.inner = inner
        self.plugin = plugin

    def __call__(self, samples: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
        """Return the batch of the samples' first tokens."""
        longest = self.plugin.longest
        if longest is not None:
            samples = [{key: value[:longest] for key, value in sample.items()} for sample in samples]
        return self.inner(samples)


class LoaderCheck(TrainerCallback):
    """Stops before the first step if the trainer's loader is not the sampler's, batch for batch.

    Args:
        sampler: Of this rank.
    """

    def __init__(self, sampler: MultiPackSampler) -> None:
        self.sampler = sampler

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401 - the signature of TrainerCallback
    ) -> None:
        """Compare the number of batches.

        Raises:
            PluginError: If the loader has more or fewer batches than were planned for this rank.
        """
        del args, state, control
        loader = kwargs.get("train_dataloader")
        if loader is not None and len(loader) != len(self.sampler):
            raise PluginError(
                f"--multipack planned {len(self.sampler)} batches for this rank, but the trainer's loader has "
                f"{len(loader)}: it was sharded a second time, and samples would be lost. Hand the loader to the "
                "trainer as it is, without accelerator.prepare"
            )


def shape_of(facts: Facts) -> dict[str, Any]:
    """Return the numbers of the model's config that ``tuning.data.cost`` asks for; a number it lacks is None."""
    text = facts.model_config.get_text_config()

    def first(*names: str) -> Any:  # noqa: ANN401 - a number, or None
        return next((value for name in names if (value := getattr(text, name, None))), None)

    expert = first("moe_intermediate_size", "intermediate_size")
    shared = first("shared_expert_intermediate_size")
    if shared is None and first("n_shared_experts") and expert:
        shared = first("n_shared_experts") * expert
    return {
        "layers": first("num_hidden_layers"),
        "hidden": first("hidden_size"),
        "heads": first("num_attention_heads"),
        "kv_heads": first("num_key_value_heads"),
        "head_dim": first("head_dim"),
        "intermediate": first("intermediate_size"),
        "vocab": first("vocab_size"),
        "experts_per_token": first("num_experts_per_tok"),
        "expert_intermediate": expert,
        "shared_intermediate": shared,
        "trainable": "full" if facts.peft_config is None else "lora",
    }


def _order_problems(args: TrainingArguments) -> Iterator[str]:
    """Yield what asks for another order of the data than the one that is planned."""
    strategy = getattr(args, "train_sampling_strategy", "random")
    if getattr(args, "group_by_length", False):
        strategy = "group_by_length"
    if strategy != "random":
        yield (
            f"--multipack and --train_sampling_strategy {strategy} both choose the samples of a batch; drop one of them"
        )
    if getattr(args, "packing", False):
        yield (
            "--multipack and --packing both put samples together; drop --packing (--multipack mode=budget makes full "
            "packs)"
        )
    for name, why in (
        (
            "auto_find_batch_size",
            "changes the batch size during the run, while the plan of --multipack is made for one",
        ),
        ("dataloader_drop_last", "drops samples, while --multipack keeps every one"),
    ):
        if getattr(args, name, False):
            yield f"--{name} {why}; drop --{name} or --multipack"
    accelerator = getattr(args, "accelerator_config", None)
    for name in ("split_batches", "dispatch_batches"):
        if getattr(accelerator, name, None):
            yield (
                f"accelerator_config asks for {name}, but --multipack gives each rank batches of its own; drop {name} "
                "or --multipack"
            )


def _option_problems(config: MultiPack, args: TrainingArguments) -> Iterator[str]:
    """Yield options of ``--multipack`` that cannot be kept."""
    if config.max_tokens is not None and config.max_tokens < 1:
        yield f"--multipack max_tokens={config.max_tokens} is no number of tokens; give 1 or more, or leave it out"
    if config.mode == "exact" and config.max_tokens is None and config.over_long != "own_step":
        yield (
            f"--multipack over_long={config.over_long} needs max_tokens, without which no sample is too long in "
            "mode=exact; add max_tokens, or drop over_long"
        )
    if config.over_long == "truncate" and str(getattr(args, "eval_strategy", "no")).rpartition(".")[2].lower() != "no":
        yield (
            "--multipack over_long=truncate would cut the evaluation samples too; use --max_seq_length to cut both, "
            "over_long=own_step or drop, or --eval_strategy no"
        )
    seedable = getattr(getattr(args, "accelerator_config", None), "use_seedable_sampler", True)
    if config.mode == "exact" and seedable is False:
        yield (
            "--multipack mode=exact follows the order of accelerate's seedable sampler, which accelerator_config "
            "use_seedable_sampler=false turns off; leave it on, or use mode=budget"
        )
    if getattr(args, "n_gpu", 1) > 1:
        yield (
            f"--multipack needs one process a GPU, and this one has {args.n_gpu}; start it with accelerate launch or "
            "torchrun, or set CUDA_VISIBLE_DEVICES to one GPU"
        )


def _refusal(sizes: IntArray, over: IntArray, max_tokens: int, config: MultiPack) -> str:
    first, longest = int(over[0]), int(sizes.max())
    others = "" if len(over) == 1 else f", and {len(over) - 1} more rows are too long (longest {longest})"
    why = "its step must hold it" if config.over_long == "own_step" else "over_long=error was asked for"
    return (
        f"--multipack mode={config.mode} max_tokens={max_tokens}: row {first} of the training data has "
        f"{int(sizes[first])} tokens and {why}{others}. Raise max_tokens to {longest}, shorten samples with "
        f"--max_seq_length {max_tokens}, or choose over_long=truncate or over_long=drop"
    )


def _num_epochs(args: TrainingArguments, num_steps: int) -> int:
    if args.max_steps > 0:
        return -(-args.max_steps // num_steps)
    return max(1, int(np.ceil(args.num_train_epochs)))


def _report(sampler: MultiPackSampler, seconds: float, config: MultiPack, args: TrainingArguments) -> None:
    """Say in the log what the plan is worth, and what to change where that is little."""
    spec, stats = sampler.spec, sampler.plan(0).stats()
    per_step = spec.num_ranks * spec.batch_size * spec.accumulation
    fill = "" if stats.fill is None else f"fill {stats.fill:.3f}, "
    _log.info(
        "multipack: %d samples for %d ranks planned in %.2f s, each rank for itself, once an epoch: %d optimizer steps "
        "an epoch (%d without --multipack) of %d to %d samples, %stoken balance %.3f, cost balance %.3f (at most %.3f)",
        stats.num_samples, spec.num_ranks, seconds, stats.num_steps,
        -(-len(sampler.lengths) // per_step),
        stats.least_samples, stats.most_samples, fill, stats.token_balance, stats.cost_balance, stats.bound,
    )  # fmt: skip
    _log.info(
        "multipack: num_processes=%d is how many processes measure lengths of data that does not know them, as far as "
        "there are cores; it changes no batch. If a rank times out while another still prepares data, raise it or "
        "raise --ddp_timeout (now %s s)", config.num_processes, getattr(args, "ddp_timeout", 1800),
    )  # fmt: skip
    if stats.num_fillers:
        log = _log.warning if len(sampler.lengths) < spec.num_ranks else _log.info
        log(
            "multipack: %d of %d seats an epoch have no sample (%d samples, %d ranks); a filler without a label stands "
            "in and adds nothing", stats.num_fillers, stats.num_fillers + _num_taken(sampler), stats.num_samples,
            spec.num_ranks,
        )  # fmt: skip
    if spec.mode == "exact" and spec.num_ranks > 1 and stats.bound < _GOOD_BOUND:
        _log.warning(
            "multipack: no seating can keep the ranks busier than %.0f %% of the time, because the longest sample of a "
            "step outlasts the others' share. Raise gradient_accumulation_steps and lower per_device_train_batch_size "
            "by the same factor, which keeps the steps, or use mode=budget", 100 * stats.bound,
        )  # fmt: skip


def _num_taken(sampler: MultiPackSampler) -> int:
    return int((np.diff(sampler.plan(0).offsets) > 0).sum())
