"""SFTTrainer: TRL's, with the plugins' seats in place, an exact loss, and no wait for the device between log lines.

What is different from TRL's, and why:

- data is tokenized and masked before the trainer is made (``tuning.data``), so its own preparation is skipped;
- the loss is summed over supervised tokens and divided once a step, also for model classes that take no loss kwargs;
- counts stay on the device; TRL gathers four tensors and waits five times a micro-step for the same log line;
- evaluation adds up tokens, not means of batches, so that its loss is the same whatever the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import trl

from tuning.logs import logger
from tuning.seats import Loss, LossTerms, Seats
from tuning.trainers import refusals
from tuning.trainers.checkpointing import choose_checkpointing_
from tuning.trainers.checkpoints import write_run_state, writing
from tuning.trainers.loaders import (
    FillerBatch,
    build_eval_loader,
    build_loader,
    check_size,
    endless,
    eval_batches,
    loader_options,
    plain_batches,
    to_rows,
)
from tuning.trainers.loss import IGNORE_INDEX, HeadLoss
from tuning.trainers.metrics import Counts, Meter, Stopwatch

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn
    from torch.utils.data import DataLoader
    from transformers import PreTrainedTokenizerBase
    from transformers.trainer_utils import EvalLoopOutput

    from tuning.trainers.arguments import TrainingArguments

__all__ = ["SFTTrainer"]

_log = logger(__name__)
_GIB = 2**30
_NO_TARGET = "an optimizer step up to step %d had no token to train on: every label was %d; its loss counts as 0"
_NOT_FINITE = (
    "the loss is %s up to step %d: weights are, or became, no finite numbers; lower --learning_rate, use --torch_dtype "
    "float32 or bfloat16, or look at the checkpoint"
)


class SFTTrainer(trl.SFTTrainer):
    """TRL's trainer with a collator, a batch sampler and a loss that plugins may replace.

    Args:
        model: Ready to train, wrapped by peft where asked.
        args: Complete training arguments.
        train_dataset: Columns ``input_ids`` and ``labels``.
        eval_dataset: The same, or None.
        tokenizer: Saved beside each checkpoint.
        seats: Collator for training and evaluation; batch sampler, None for Hugging Face's order; loss, None for
            TRL's fused head; callbacks beside Hugging Face's own.
        compute_metrics: As in ``transformers.Trainer``; logits and labels come one row a sample, padded by -100.
        preprocess_logits_for_metrics: As in ``transformers.Trainer``.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        train_dataset: Dataset,
        eval_dataset: Dataset | None,
        tokenizer: PreTrainedTokenizerBase,
        seats: Seats,
        compute_metrics: Callable[..., dict[str, float]] | None = None,
        preprocess_logits_for_metrics: Callable[..., torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        check_size(train_dataset, args)
        if compute_metrics is None and not isinstance(eval_dataset, dict):
            refusals.check_best_metric(args)
        args.dataset_kwargs = {"skip_prepare_dataset": True}
        choose_checkpointing_(args, model)
        if args.dataloader_pin_memory:
            # Hugging Face's own loader waits for each copy to the device otherwise
            args.accelerator_config.non_blocking = True
        # upstream turns the cache of generation off in the config, which is saved; a step turns it off by itself
        config: Any = model.config
        use_cache = getattr(config, "use_cache", None)
        with refusals.of_trainer():
            super().__init__(
                model=model,
                args=args,
                train_dataset=endless(train_dataset),
                eval_dataset=eval_dataset,
                processing_class=tokenizer,
                data_collator=seats.collator,
                callbacks=list(seats.callbacks),
                compute_metrics=compute_metrics,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            )
        if use_cache is not None:
            config.use_cache = use_cache
        # our loss divides by num_items_in_batch itself, so the model need not know the argument
        self.model_accepts_loss_kwargs = True
        self.batch_sampler = seats.batch_sampler or plain_batches(train_dataset, args)
        self.loss_of_batch: Loss = seats.loss or HeadLoss(
            label_smoothing=args.label_smoothing_factor if args.loss_type == "nll" else 0.0,
            dynamic=args.loss_type == "dft",
            with_router_loss=self.aux_loss_enabled,
            # TRL's fused head reads num_experts, which Granite's mixtures call num_local_experts
            full_logits=self.aux_loss_enabled and not hasattr(config.get_text_config(), "num_experts"),
        )
        self.meters = {"train": Meter(args.device), "eval": Meter(args.device)}
        # totals: up to the last log line; pending: read since then, because a checkpoint was written
        self.totals = Counts()
        self.pending = Counts()
        self.stopwatch = Stopwatch()
        self.train_seconds = 0.0
        self.resumed_tokens = 0.0  # real tokens of the run before this process
        self._warned: set[str] = set()
        self._last_metered_step = 0

    # ---- data ----

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's training batches; Hugging Face's own loader where no plugin gave a sampler."""
        if self.batch_sampler is None:
            return super().get_train_dataloader()
        return build_loader(
            self.train_dataset, self.batch_sampler, self.data_collator, options=loader_options(self.args)
        )

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader[Any]:
        """Return this rank's evaluation batches, each sample once over all ranks."""
        if isinstance(eval_dataset, str) and isinstance(self.eval_dataset, dict):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        keeps_rows = self.compute_metrics is not None
        batches = eval_batches(dataset, self.data_collator, self.args, keeps_rows=keeps_rows)
        return build_eval_loader(dataset, batches, self.data_collator, options=loader_options(self.args))

    def _prepare_input(self, data: Any) -> Any:  # noqa: ANN401 - a batch, or anything inside one
        """Move a batch to the device without waiting for what the device still has to do."""
        if isinstance(data, torch.Tensor) and not self.is_deepspeed_enabled:
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    # ---- optimizer ----

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer.

        Raises:
            ConfigError: If ``--optim`` or ``--optim_args`` cannot be followed.
        """
        with refusals.of_optimizer(self.args):
            optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        refusals.check_optimizer_options(optimizer, self.args.optim.value, self.args.optim_args)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:  # noqa: ANN401 - as upstream
        """Make the schedule of the learning rate.

        Raises:
            ConfigError: If ``--lr_scheduler_type`` does not take ``--lr_scheduler_kwargs``, or needs more.
        """
        with refusals.of_schedule(self.args):
            return super().create_scheduler(num_training_steps, optimizer)

    # ---- loss ----

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Count the supervised tokens of one optimizer step over all ranks: one collective, no wait for the device.

        Args:
            batch_samples: Batches of this rank.
            device: Where a count that needs a collective goes.

        Returns:
            A plain number on one rank whose batches are on the host, else a scalar on the device.
        """
        if not batch_samples:
            return None
        count = torch.stack([batch["labels"][..., 1:].ne(IGNORE_INDEX).sum() for batch in batch_samples]).sum()
        if self.args.average_tokens_across_devices and self.accelerator.num_processes > 1:
            return self.accelerator.reduce(count.to(device, non_blocking=True), reduction="sum") // self.get_tp_size()
        return int(count) if count.device.type == "cpu" else count

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002 - the signature of transformers.Trainer
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:  # noqa: ANN401 - loss, or loss and outputs
        """Return the loss of one micro-batch, scaled so that the sum over ranks and micro-steps is the mean a token.

        Args:
            model: As wrapped for training.
            inputs: One batch.
            return_outputs: Also return the model's outputs, with full logits, one row a sample.
            num_items_in_batch: Supervised tokens of this optimizer step over all ranks; None in evaluation.
        """
        training = self.model.training
        inputs["use_cache"] = False
        factor = None if num_items_in_batch is None else self._loss_factor(num_items_in_batch)
        if factor is not None and getattr(self.loss_of_batch, "takes_loss_factor", False):
            # a loss that computes gradients in its forward scales them there, and rounds them once
            inputs["loss_factor"] = factor
        terms = self.loss_of_batch(model, inputs)
        loss = terms.nll_sum * (self._loss_factor(terms.num_tokens) if factor is None else factor)
        if terms.aux_loss is not None:
            micro_steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * terms.aux_loss / micro_steps
        self._count("train" if training else "eval", inputs, terms, num_items_in_batch)
        if not return_outputs:
            return loss
        with torch.no_grad():
            outputs = model(**{key: value for key, value in inputs.items() if key != "labels"})
        return loss, outputs

    def _loss_factor(self, num_items: torch.Tensor | int) -> torch.Tensor:
        """Return what the summed loss of a micro-batch is multiplied by, a scalar on the device.

        It is one over the supervised tokens; at least 1 of them, so that a step without a target is a loss of 0, not
        0 / 0. DDP and FSDP average gradients over ranks, so a count over all ranks is multiplied by their number.
        """
        if isinstance(num_items, torch.Tensor):
            count = num_items.to(torch.float32).clamp(min=1)
        else:
            # filled on the device: copying a number there would wait for it
            count = torch.full((), float(max(num_items, 1)), device=self.args.device)
        over_all_ranks = self.args.average_tokens_across_devices and self.model.training
        return (self.accelerator.num_processes // self.get_tp_size() if over_all_ranks else 1) / count

    def _count(
        self, mode: str, inputs: Mapping[str, Any], terms: LossTerms, num_items: torch.Tensor | int | None
    ) -> None:
        slots = inputs["input_ids"].numel()
        mask = inputs.get("attention_mask")
        real: torch.Tensor | int = slots if mask is None else mask.sum()
        self.meters[mode].add(
            nll_sum=terms.nll_sum,
            supervised=terms.num_tokens,
            correct=terms.num_correct,
            entropy_sum=terms.entropy_sum,
            real=0 if isinstance(inputs, FillerBatch) else real,
            slots=slots,
            aux_loss=terms.aux_loss,
            micro_steps=1,
            idle=num_items == 0 if num_items is not None else None,
        )

    # ---- evaluation ----

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,  # noqa: FBT001 - the signature of transformers.Trainer
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Evaluate one batch; logits and labels come back as one row a sample and as many rows as a batch may have.

        Rows beyond the samples are all -100; they let ranks with fewer samples gather, and are cut off after that.
        """
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if logits is None or labels is None:
            return loss, logits, labels
        boundaries = inputs.get("cu_seq_lens_q")
        # a boundary may be repeated to fill a fixed number of them
        lengths = None if boundaries is None else [length for length in boundaries.diff().tolist() if length]
        num_rows = self.args.eval_batch_size
        if "inputs" in self.args.include_for_metrics:
            inputs["input_ids"] = to_rows(inputs["input_ids"], lengths, num_rows)
        return loss, to_rows(logits, lengths, num_rows), to_rows(labels, lengths, num_rows)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:  # noqa: ANN401
        """Evaluate, and put the mean loss a supervised token over all batches and ranks in place of HF's mean."""
        self.stopwatch.stop()
        self.meters["eval"].read(self.accelerator)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        counts = self.meters["eval"].read(self.accelerator)
        output.metrics[f"{metric_key_prefix}_loss"] = self._mean_loss(counts)
        output.metrics[f"{metric_key_prefix}_mean_token_accuracy"] = counts.correct / max(counts.supervised, 1)
        output.metrics[f"{metric_key_prefix}_entropy"] = counts.entropy_sum / max(counts.supervised, 1)
        output.metrics[f"{metric_key_prefix}_num_tokens"] = counts.real
        if self.is_in_train:
            self.stopwatch.start()
        return output

    def _mean_loss(self, counts: Counts) -> float:
        loss = counts.loss
        if self.aux_loss_enabled and counts.micro_steps:
            loss += self.router_aux_loss_coef * counts.aux_loss / counts.micro_steps
        return loss

    # ---- logging ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the meters to a training log line: the only place where training waits for the device."""
        if "loss" in logs and self.is_in_train:
            logs.update(self._read_meters())
            if not math.isfinite(logs["loss"]) and "not finite" not in self._warned:
                self._warned.add("not finite")
                _log.warning(_NOT_FINITE, logs["loss"], self.state.global_step)
        super().log(logs, start_time)

    def _read_meters(self) -> dict[str, float]:
        counts = self.pending.plus(self.meters["train"].read(self.accelerator))
        self.pending = Counts()
        seconds = self.stopwatch.lap()
        self.train_seconds += seconds
        self.totals = self.totals.plus(counts)
        if counts.idle and "without target" not in self._warned:
            self._warned.add("without target")
            _log.warning(_NO_TARGET, self.state.global_step, IGNORE_INDEX)
        supervised = max(counts.supervised, 1)
        meters = {
            # TRL's names
            "entropy": counts.entropy_sum / supervised,
            "mean_token_accuracy": counts.correct / supervised,
            "num_tokens": self.totals.real,
            # ours
            "supervised_tokens": self.totals.supervised,
            "padding_share": round(counts.padding_share, 4),
            "tokens_per_second": round(counts.real / seconds, 1) if seconds > 0 else math.nan,
        }
        sampler_meters = getattr(self.batch_sampler, "meters", None)
        if sampler_meters is not None and self.state.global_step > self._last_metered_step:
            meters |= sampler_meters(self._last_metered_step, self.state.global_step)
        self._last_metered_step = self.state.global_step
        if self.aux_loss_enabled:
            meters["aux_loss"] = counts.aux_loss / max(counts.micro_steps, 1)
        if self.args.device.type == "cuda":
            meters["peak_memory_gib"] = round(torch.cuda.max_memory_allocated(self.args.device) / _GIB, 2)
        return meters

    def final_meters(self) -> dict[str, float]:
        """Return the meters of the whole run, steps since the last log line included; every rank must call."""
        self.totals = self.totals.plus(self.pending).plus(self.meters["train"].read(self.accelerator))
        self.pending = Counts()
        self.train_seconds += self.stopwatch.lap()
        here = self.totals.real - self.resumed_tokens
        return {
            "train_real_tokens": self.totals.real,
            "train_supervised_tokens": self.totals.supervised,
            "train_padding_share": self.totals.padding_share,
            "train_tokens_per_second": here / self.train_seconds if self.train_seconds > 0 else math.nan,
        }

    # ---- checkpoints ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:  # noqa: ANN401 - an optuna trial
        self.stopwatch.stop()
        self.pending = self.pending.plus(self.meters["train"].read(self.accelerator))
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        save_sampler: Any = getattr(self.batch_sampler, "state_dict", None)
        with writing(folder):
            if self.args.should_save:
                # before everything else: trainer_state.json, written last, says that a checkpoint is complete
                counts = self.totals.plus(self.pending)
                write_run_state(folder, counts=counts, sampler=None if save_sampler is None else save_sampler())
            super()._save_checkpoint(model, trial)
        self.stopwatch.start()

    # ---- hub ----

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the signature of transformers.Trainer
        """Make the repository that ``--push_to_hub`` pushes to, before anything is trained.

        Raises:
            ConfigError: If the hub cannot be reached or refuses.
        """
        with refusals.of_repository(self.args):
            super().init_hf_repo(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the signature of transformers.Trainer
        """Save the model to the output folder and push it.

        Raises:
            CheckpointError: If it cannot be pushed; it is saved then.
        """
        with refusals.of_push(self.args.output_dir, self.hub_model_id):
            return super().push_to_hub(*args, **kwargs)
