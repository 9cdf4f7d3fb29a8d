"""One run, stage by stage: the only file that knows the order.

Everything that can be refused is refused before weights are loaded: flags first (``tuning.config``), then what the
device, the model's config and the tokenizer say, then the data. A run leaves no trace in the process: patches are
undone, and what upstream trainers put on the model is taken off again.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import set_seed

from tuning import environment
from tuning.acceleration.framework import AccelerationFramework, all_plugins
from tuning.acceleration.plugin import Facts
from tuning.acceleration.plugins import BUILTIN
from tuning.config import validation
from tuning.config.acceleration_configs import (
    AccelerationFrameworkConfig,
    AttentionAndDistributedPackingConfig,
    FusedOpsAndKernelsConfig,
    QuantizedLoraConfig,
)
from tuning.config.configs import DEFAULT_MAX_SEQ_LENGTH, DataArguments, ModelArguments
from tuning.config.peft_config import LoraConfig, PromptTuningConfig
from tuning.config.run_config import RunConfig
from tuning.data import collators, sources, tokenization
from tuning.errors import ConfigError, UserError
from tuning.logs import logger
from tuning.models import adapters, loader
from tuning.trainers import arguments, checkpoints
from tuning.trainers.fit import fit, restored
from tuning.trainers.sft import SFTTrainer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, TrainerCallback

    from tuning.environment import Environment, Launch
    from tuning.trainers.arguments import TrainingArguments

__all__ = ["run", "train"]

_log = logger(__name__)
_PEFT_METHODS = {LoraConfig: "lora", PromptTuningConfig: "pt"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """What a Python program may add to a run and a command line cannot.

    Attributes:
        callbacks: Trainer callbacks beside the plugins'.
        compute_metrics: As in ``transformers.Trainer``.
        preprocess_logits_for_metrics: As in ``transformers.Trainer``.
    """

    callbacks: tuple[TrainerCallback, ...] = ()
    compute_metrics: Callable[..., dict[str, float]] | None = None
    preprocess_logits_for_metrics: Callable[..., torch.Tensor] | None = None


def run(config: RunConfig, launch: Launch) -> None:
    """Do what the command line asked; ``config`` is parsed, resolved and checked."""
    env = environment.detect(launch, use_cpu=bool(config.train.get("use_cpu", False)))
    train_args = arguments.build(_with_mixed_precision(config, env))
    _run_stages(config, train_args, Hooks())


def train(  # noqa: PLR0913 - the signature of fms-hf-tuning
    model_args: ModelArguments,
    data_args: DataArguments,
    train_args: TrainingArguments,
    peft_config: LoraConfig | PromptTuningConfig | None = None,
    *,
    quantized_lora_config: QuantizedLoraConfig | None = None,
    fusedops_kernels_config: FusedOpsAndKernelsConfig | None = None,
    attention_and_distributed_packing_config: AttentionAndDistributedPackingConfig | None = None,
    extra_plugins: tuple[tuple[str, Any], ...] = (),
    additional_callbacks: Sequence[TrainerCallback] = (),
    compute_metrics: Callable[..., dict[str, float]] | None = None,
    preprocess_logits_for_metrics: Callable[..., torch.Tensor] | None = None,
) -> tuple[SFTTrainer, dict[str, float]]:
    """Fine-tune a model: the command line as a function.

    Args:
        model_args: Which model.
        data_args: Which data.
        train_args: Hugging Face's and TRL's training arguments.
        peft_config: Adapters; None trains every parameter. One of peft's own configs is taken as it is.
        quantized_lora_config: Quantised base.
        fusedops_kernels_config: Fast kernels, fused LoRA.
        attention_and_distributed_packing_config: Padding-free, multipack.
        extra_plugins: Third-party flags and their values.
        additional_callbacks: Trainer callbacks beside the plugins'.
        compute_metrics: As in ``transformers.Trainer``; one row a sample, also padding-free.
        preprocess_logits_for_metrics: As in ``transformers.Trainer``.

    Returns:
        The trainer after training, and the metrics of the run. The model is ``trainer.model``, free of patches.

    Raises:
        UserError: For everything the user can mend; nothing has been written then.
    """
    launch = environment.detect_launch()
    config = RunConfig(
        model=model_args,
        data=data_args,
        train={
            item.name: getattr(train_args, item.name)
            for item in dataclasses.fields(train_args)
            # mirrors of the old names, which TrainingArguments has compared
            if not item.name.startswith("activation_checkpointing")
        },
        peft_method=_PEFT_METHODS.get(type(peft_config), "none" if peft_config is None else "lora"),
        peft=peft_config,
        acceleration=AccelerationFrameworkConfig(
            attention=attention_and_distributed_packing_config or AttentionAndDistributedPackingConfig(),
            kernels=fusedops_kernels_config or FusedOpsAndKernelsConfig(),
            quantized=quantized_lora_config or QuantizedLoraConfig(),
            extra=extra_plugins,
        ),
    )
    config = validation.resolve(config, launch)
    validation.check(config, launch)
    hooks = Hooks(
        callbacks=tuple(additional_callbacks),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    return _run_stages(config, train_args, hooks)


def _run_stages(config: RunConfig, train_args: TrainingArguments, hooks: Hooks) -> tuple[SFTTrainer, dict[str, float]]:
    """Do the stages of a run that has been checked; see :func:`train`."""
    model_args, data_args = config.model, config.data
    framework = AccelerationFramework(config.acceleration.active(), plugins=all_plugins(BUILTIN))
    checkpoint = loader.find_checkpoint(model_args, trust_remote_code=train_args.trust_remote_code)
    sources.check(data_args)
    resume_from = checkpoints.find_resume(
        train_args.output_dir, train_args.resume_from_checkpoint, model_only=train_args.save_only_model
    )
    model_config = loader.load_config(checkpoint)
    loaded = loader.load_tokenizer(
        model_args,
        checkpoint,
        chat_template=data_args.chat_template,
        add_special_tokens=data_args.add_special_tokens,
        eos_token=train_args.eos_token,
        pad_token=train_args.pad_token,
    )
    peft = adapters.build_peft_config(
        config.peft,
        tokenizer_name=model_args.tokenizer_name_or_path or checkpoint.name,
        has_new_tokens=bool(loaded.added),
    )
    facts = _facts(framework, checkpoint, model_config, model_args, train_args, peft)
    framework.check(facts)

    data = tokenization.tokenize(
        sources.read(data_args, seed=train_args.seed),
        loaded.tokenizer,
        data_args,
        max_seq_length=max_sample_tokens(data_args, model_config, peft),
        vocab_size=max(len(loaded.tokenizer), getattr(model_config.get_text_config(), "vocab_size", None) or 0),
        main_first=train_args.main_process_first(desc="data"),
    )
    _log.info("data:\n%s", data.report)

    # the seed is set where TRL sets it, so that adapters start from the same values
    set_seed(train_args.seed)
    model = framework.load_model(facts) or loader.load_model(checkpoint, facts.model_kwargs)
    loader.resize_embeddings_(model, len(loaded.tokenizer), multiple_of=model_args.embedding_size_multiple_of)
    if peft is not None:
        model = adapters.wrap(model, peft)
    framework.check_model(model, facts)

    with _left_as_found(Path(train_args.output_dir)), restored(model), framework.patched(model, facts):
        pad = collators.PaddedCollator(
            pad_token_id=loaded.tokenizer.pad_token_id, pad_to_multiple_of=_multiple(train_args.pad_to_multiple_of)
        )
        seats = framework.seats(data.lengths, pad, facts)
        trainer = SFTTrainer(
            model,
            train_args,
            train_dataset=data.train,
            eval_dataset=data.eval,
            tokenizer=loaded.tokenizer,
            seats=dataclasses.replace(seats, callbacks=(*seats.callbacks, *hooks.callbacks)),
            compute_metrics=hooks.compute_metrics,
            preprocess_logits_for_metrics=hooks.preprocess_logits_for_metrics,
        )
        first_rows = list(itertools.islice(data.train, train_args.per_device_train_batch_size))
        framework.self_test(model, trainer.data_collator(first_rows))
        metrics = fit(trainer, resume_from, added_tokens=loaded.added, metadata=config.exp_metadata)
    return trainer, metrics


@contextmanager
def _left_as_found(folder: Path) -> Iterator[None]:
    """Remove the output folder again if the run is refused before anything is in it; upstream makes it very early."""
    was_there = os.path.isdir(folder)
    try:
        yield
    except UserError:
        if not was_there and os.path.isdir(folder) and not os.listdir(folder):
            with suppress(FileNotFoundError):  # another rank was first
                folder.rmdir()
        raise


def max_sample_tokens(data: DataArguments, model_config: PretrainedConfig, peft: Any) -> int:  # noqa: ANN401
    """Return the longest sample the run takes: as asked, else the default or the model's positions, the lesser.

    Args:
        data: May ask for a length.
        model_config: Says how many positions the model has, if it does.
        peft: Prompt tuning takes positions for its virtual tokens.

    Raises:
        ConfigError: If the length asked for is beyond the model's positions, or virtual tokens leave none.
    """
    text_config = model_config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or getattr(text_config, "n_positions", None)
    if positions is not None:
        num_virtual = getattr(peft, "num_virtual_tokens", None) or 0
        if num_virtual and positions - num_virtual < 2:
            raise ConfigError(
                f"--num_virtual_tokens {num_virtual} leaves no room for a sample in the {positions} positions of the "
                "model; lower it"
            )
        positions -= num_virtual
    asked = data.max_seq_length
    if asked is None:
        return min(DEFAULT_MAX_SEQ_LENGTH, positions or DEFAULT_MAX_SEQ_LENGTH)
    if positions is not None and asked > positions:
        raise ConfigError(
            f"--max_seq_length {asked} is more than the {positions} positions of the model; lower it, or raise "
            "max_position_embeddings in the model's config.json if the model is meant to be extended"
        )
    return asked


def _multiple(value: object) -> int | None:
    """Return TRL's ``pad_to_multiple_of`` as a number; its ``auto`` pads on accelerators that compile by shape only."""
    return value if isinstance(value, int) else None


def _with_mixed_precision(config: RunConfig, env: Environment) -> dict[str, Any]:
    """Return the training values with ``bf16`` decided: where weights or adapters are fp32 on a GPU, else off."""
    values = dict(config.train)
    if values.get("bf16") is None and not values.get("fp16"):
        dtype = loader.weights_dtype(config.model.torch_dtype, device_type=env.device_type)
        has_fp32 = dtype in (torch.float32, "auto") or config.peft is not None
        values["bf16"] = env.device_type == "cuda" and has_fp32
    _log.info(
        "device %s, weights %s, mixed precision %s",
        env.device_name,
        str(loader.weights_dtype(config.model.torch_dtype, device_type=env.device_type)).removeprefix("torch."),
        "bf16" if values.get("bf16") else "fp16" if values.get("fp16") else "off",
    )
    return values


def _facts(
    framework: AccelerationFramework,
    checkpoint: loader.Checkpoint,
    model_config: PretrainedConfig,
    model_args: ModelArguments,
    train_args: TrainingArguments,
    peft: Any,  # noqa: ANN401 - a peft config
) -> Facts:
    env = environment.detect(use_cpu=train_args.use_cpu)
    model_kwargs = dict(train_args.model_init_kwargs or {})
    model_kwargs.setdefault("dtype", loader.weights_dtype(model_args.torch_dtype, device_type=env.device_type))
    model_kwargs.setdefault("attn_implementation", loader.attention_name(model_config))
    return Facts(
        model_config=model_config,
        model_name_or_path=checkpoint.name,
        model_kwargs={**checkpoint.kwargs, **model_kwargs},
        train_args=train_args,
        peft_config=peft,
        active=framework.active,
        world_size=train_args.world_size,
        rank=train_args.process_index,
        seed=train_args.seed,
        device_type=env.device_type,
        compute_capability=env.compute_capability,
    )
