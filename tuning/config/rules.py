"""The rules of a run, one function a subject; each returns a sentence for every broken rule.

A rule reads the config and, where it must, whether a path exists. ``config.train`` may hold the arguments a user gave
or all of them, so a rule asks whether a value does harm, never whether it is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

from tuning.config.number_rules import check_numbers
from tuning.config.path_rules import check_paths
from tuning.config.peft_config import LoraConfig, PromptTuningConfig
from tuning.config.run_config import RunConfig
from tuning.config.values import show

__all__ = ["RULES", "find_notes", "read"]

# training argument -> values that ask for nothing, why any other is refused, and what to do
_UNSUPPORTED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "dataset_kwargs": (
        (None,),
        "sets options of TRL's data preparation, which is not used; drop it (rows with input_ids are never tokenized)",
    ),
    "bf16_full_eval": (
        (None, False),
        "casts the model for an evaluation after training, and this run evaluates while it trains; drop it",
    ),
    "do_predict": ((None, False), "asks for predictions, which a training run does not make; drop it"),
    "eval_packing": (
        (None, False),
        "joins samples of the evaluation, which is not supported; drop it (--padding_free holds for evaluation too)",
    ),
    "fp16_full_eval": (
        (None, False),
        "casts the model for an evaluation after training, and this run evaluates while it trains; drop it",
    ),
    "liger_kernel_config": (
        (None,),
        "chooses among Liger's kernels, which are not used; name kernels with --fast_kernels",
    ),
    "packing": (
        (None, False),
        "joins and cuts samples, so that they are trained on out of their place; use --padding_free huggingface, with "
        "--multipack mode=budget for full packs",
    ),
    "packing_strategy": ((None, "bfd"), "belongs to --packing, which is not supported; use --multipack mode=budget"),
    "parallelism_config": ((None,), "needs a Python object; configure it with accelerate config"),
    "shuffle_dataset": (
        (None, False),
        "shuffles rows once, while every epoch is shuffled anyway; drop it (--seed changes the order)",
    ),
    "truncation_mode": (
        (None, "keep_start"),
        "would keep the end of a long sample, which is not supported; use --max_seq_length_policy truncate, drop or "
        "error",
    ),
}
_BASES: Final[Mapping[str, str]] = {"auto_gptq": "--auto_gptq", "bitsandbytes": "--bitsandbytes (--bnb_qlora)"}
# options of torch.utils.checkpoint.checkpoint
_CHECKPOINTING = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "context_fn", "early_stop")
_DTYPES = ("auto", "bfloat16", "float16", "float32")


def read(config: RunConfig, name: str) -> Any:  # noqa: ANN401 - any training argument
    """Return a training argument, the value of an enum for it, or None if it was not given."""
    value = config.train.get(name)
    return value.value if isinstance(value, Enum) else value


def find_notes(config: RunConfig) -> list[str]:
    """Return what the user should know and no rule forbids."""
    notes = []
    if read(config, "assistant_only_loss") is False and "assistant_only_loss" in config.given:
        notes.append(
            "--assistant_only_loss false changes nothing: conversations are trained on the assistant's turns unless "
            "--train_on_input is true"
        )
    has_validation = config.data.validation_data_path is not None or config.data.validation_split > 0
    if has_validation and read(config, "eval_strategy") in (None, "no"):
        notes.append("validation data was given, but --eval_strategy is no; set it to steps or epoch to evaluate")
    return notes


def _check_attention(config: RunConfig) -> list[str]:
    attention, problems = config.acceleration.attention, []
    kwargs = read(config, "model_init_kwargs")
    if attention.padding_free is not None:
        if not config.model.use_flash_attn:
            problems.append(
                "--padding_free needs variable-length attention, but --use_flash_attn is false; set it to true or "
                "drop --padding_free"
            )
        if read(config, "packing") is True:
            problems.append(
                "--packing and --padding_free cannot be used together, since packing joins samples that padding_free "
                "keeps apart; drop --packing (--multipack mode=budget makes full packs)"
            )
        if read(config, "pad_to_multiple_of") not in (None, "auto"):
            problems.append("--pad_to_multiple_of asks for padding and --padding_free for none; drop one of them")
        if config.peft_method == "pt":
            problems.append(
                "--peft_method pt puts its virtual tokens before each row, but with --padding_free all samples share "
                "one row; drop --padding_free or use --peft_method lora"
            )
    if isinstance(kwargs, Mapping) and "attn_implementation" in kwargs and config.model.use_flash_attn:
        problems.append(
            f"model_init_kwargs asks for attn_implementation {kwargs['attn_implementation']}, but --use_flash_attn is "
            "true and picks the attention; drop the key or set --use_flash_attn to false"
        )
    return problems


def _check_multipack(config: RunConfig) -> list[str]:
    attention = config.acceleration.attention
    problems: list[str] = []
    if attention.multipack is None:
        return problems
    if attention.padding_free is None:
        problems.append(
            "--multipack needs --padding_free, since its batches hold samples of any length; add --padding_free "
            "huggingface or drop --multipack"
        )
    strategy = read(config, "train_sampling_strategy")
    if strategy not in (None, "random"):
        problems.append(
            f"--multipack and --train_sampling_strategy {strategy} both choose the samples of a batch; drop one of them"
        )
    for name, why in (
        (
            "auto_find_batch_size",
            "changes the batch size during the run, while the plan of --multipack is made for one",
        ),
        ("dataloader_drop_last", "drops samples, while --multipack keeps every one"),
    ):
        if read(config, name) is True:
            problems.append(f"--{name} {why}; drop --{name} or --multipack")
    accelerator = read(config, "accelerator_config")
    for name in ("split_batches", "dispatch_batches"):
        if isinstance(accelerator, Mapping) and accelerator.get(name):
            problems.append(
                f"accelerator_config asks for {name}, but --multipack gives each rank batches of its own; drop {name} "
                "or --multipack"
            )
    return problems


def _check_streaming(config: RunConfig) -> list[str]:
    if not config.data.streaming:
        return []
    problems = []
    if config.acceleration.attention.multipack is not None:
        problems.append(
            "--streaming and --multipack cannot be used together, since multipack needs the lengths of all samples "
            "beforehand; drop --streaming or --multipack"
        )
    if (read(config, "max_steps") or -1) < 1:
        problems.append(
            "--streaming reads rows without counting them, so --max_steps must say when to stop; give it or drop "
            "--streaming"
        )
    return problems


def _check_quantised(config: RunConfig) -> list[str]:
    quantised = config.acceleration.quantized
    problems: list[str] = []
    loaded = {"auto_gptq": quantised.auto_gptq, "bitsandbytes": quantised.bnb_qlora}
    bases = [name for name, value in loaded.items() if value is not None]
    if len(bases) == 2:
        problems.append(f"{_BASES['auto_gptq']} and {_BASES['bitsandbytes']} both load a quantised base; keep one")
    problems += [
        f"{_BASES[name]} loads a quantised base, which cannot be trained itself, but --peft_method is "
        f"{config.peft_method}; add --peft_method lora or drop {_BASES[name]}"
        for name in bases
        if config.peft_method != "lora"
    ]
    if quantised.auto_gptq is not None and not quantised.auto_gptq.from_quantized:
        problems.append(
            "--auto_gptq from_quantized=false would quantise the model itself, which is not supported; name a GPTQ "
            "checkpoint with --model_name_or_path"
        )
    return problems + _check_fused_lora(config, bases)


def _check_fused_lora(config: RunConfig, bases: list[str]) -> list[str]:
    fused = config.acceleration.kernels.fused_lora
    if fused is None:
        return []
    base, problems = fused.base_layer, []
    if config.peft_method != "lora":
        problems.append(
            f"--fused_lora {base} fuses adapters, but --peft_method is {config.peft_method}; add --peft_method lora or "
            "drop --fused_lora"
        )
    if base != "auto" and not bases:
        flag = {"auto_gptq": "--auto_gptq triton_v2", "bitsandbytes": "--bitsandbytes nf4"}[base]
        problems.append(
            f"--fused_lora {base} needs a quantised base, but none is loaded; add {flag}, or use --fused_lora auto, "
            "which fuses ordinary LoRA too"
        )
    elif base != "auto" and base not in bases:
        problems.append(f"--fused_lora names {base}, but {_BASES[bases[0]]} loads the base; name the same in both")
    return problems


def _check_peft(config: RunConfig) -> list[str]:
    problems = []
    for config_type, method in ((LoraConfig, "lora"), (PromptTuningConfig, "pt")):
        names = [item.name for item in dataclasses.fields(config_type) if item.name in config.given]
        if names and config.peft_method != method:
            flags = ", ".join(f"--{name}" for name in names)
            verb = "belongs" if len(names) == 1 else "belong"
            problems.append(
                f"{flags} {verb} to --peft_method {method}, but --peft_method is {config.peft_method}; add "
                f"--peft_method {method} or drop {flags}"
            )
    if isinstance(config.peft, LoraConfig) and config.peft.target_modules == []:
        problems.append("--target_modules is empty; name modules, or all-linear")
    return problems


def _check_precision(config: RunConfig) -> list[str]:
    dtype, problems = config.model.torch_dtype, []
    fp16, bf16 = read(config, "fp16") is True, read(config, "bf16") is True
    if fp16 and bf16:
        problems.append("--fp16 and --bf16 are both true; keep one")
    if dtype is not None and dtype not in _DTYPES:
        problems.append(f"--torch_dtype is {dtype}, but takes one of {', '.join(_DTYPES)}; correct the value")
    for flag, on, other in (("fp16", fp16, "bfloat16"), ("bf16", bf16, "float16")):
        if on and dtype == other:
            problems.append(
                f"--{flag} computes in another 16-bit format than --torch_dtype {dtype} stores; drop --{flag}, or use "
                "--torch_dtype float32 for mixed precision"
            )
    if fp16 and dtype == "float16" and config.peft_method == "none":
        problems.append(
            "--fp16 scales gradients, which needs float32 weights, but --torch_dtype is float16; use --torch_dtype "
            "float32"
        )
    return problems


def _check_evaluation(config: RunConfig) -> list[str]:
    data, problems = config.data, []
    has_validation = (
        data.validation_data_path is not None or data.validation_split != 0 or data.data_config_path is not None
    )
    strategy = read(config, "eval_strategy") or "no"
    if not has_validation:
        if read(config, "load_best_model_at_end") is True:
            problems.append(
                "--load_best_model_at_end compares checkpoints on validation data, but there is none; give "
                "--validation_data_path or --validation_split"
            )
        if strategy != "no":
            problems.append(
                f"--eval_strategy {strategy} evaluates on validation data, but there is none; give "
                "--validation_data_path or --validation_split, or drop --eval_strategy"
            )
        if read(config, "eval_on_start") is True:
            problems.append(
                "--eval_on_start evaluates on validation data, but there is none; give --validation_data_path or "
                "--validation_split, or drop --eval_on_start"
            )
    elif read(config, "load_best_model_at_end") is True and strategy == "no":
        problems.append(
            "--load_best_model_at_end needs evaluations to compare, but --eval_strategy is no; set it as "
            "--save_strategy is"
        )
    if data.validation_data_path is not None and data.validation_split > 0:
        problems.append("--validation_data_path and --validation_split both make validation data; keep one")
    return [*problems, *_check_best(config, strategy)]


def _check_best(config: RunConfig, strategy: str) -> list[str]:
    """Check what needs evaluations that are made: upstream finds out after loading the model, or never."""
    problems = []
    saving = read(config, "save_strategy") or "steps"
    if strategy == "no":
        if saving == "best":
            problems.append(
                "--save_strategy best saves after evaluations, but --eval_strategy is no, so nothing would be saved; "
                "set --eval_strategy, or --save_strategy to steps or epoch"
            )
        if read(config, "do_eval") is True:
            problems.append(
                "--do_eval asks for evaluation, but --eval_strategy is no; set it to steps or epoch, or drop --do_eval"
            )
    elif saving == "best" and read(config, "metric_for_best_model") is None:
        problems.append(
            "--save_strategy best compares a metric, but none is named; give --metric_for_best_model, such as loss"
        )
    elif read(config, "load_best_model_at_end") is True and saving not in ("best", strategy):
        problems.append(
            f"--load_best_model_at_end needs a checkpoint at each evaluation, but --save_strategy is {saving} and "
            f"--eval_strategy {strategy}; set both to the same"
        )
    return problems


def _check_training(config: RunConfig) -> list[str]:
    """Check flags of which one takes the effect of another, or upstream takes the effect silently."""
    problems = []
    if read(config, "loss_type") == "dft" and (read(config, "label_smoothing_factor") or 0) > 0:
        problems.append(
            "--label_smoothing_factor smooths the targets of --loss_type nll, but --loss_type is dft, which weighs "
            "them; drop one of them"
        )
    if "do_train" in config.given and read(config, "do_train") is False:
        problems.append("--do_train false asks not to train, which is all that this command does; drop it")
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        options = read(config, name)
        unknown = [key for key in options if key not in _CHECKPOINTING] if isinstance(options, Mapping) else []
        if unknown:
            problems.append(
                f"--{name} has {', '.join(map(str, unknown))}, which torch.utils.checkpoint does not take; it takes "
                f"{', '.join(_CHECKPOINTING)}"
            )
    return problems


def _check_text(config: RunConfig) -> list[str]:
    data, problems = config.data, []
    for name in ("dataset_text_field", "response_template", "instruction_template", "data_formatter_template"):
        if getattr(data, name) is not None and not getattr(data, name).strip(" "):
            problems.append(f"--{name} is empty; give a text or drop it")
    if data.instruction_template and not data.response_template:
        problems.append(
            "--instruction_template ends the answers that --response_template begins, but the latter is not given; add "
            "--response_template"
        )
    if data.dataset_text_field and data.data_formatter_template:
        problems.append("--dataset_text_field and --data_formatter_template both make the text of a row; keep one")
    if data.data_formatter_template and "{{" not in data.data_formatter_template:
        problems.append(
            f"--data_formatter_template is {show(data.data_formatter_template)}, which names no column; write columns "
            "as {{column}}"
        )
    return problems


def _check_unsupported(config: RunConfig) -> list[str]:
    problems = []
    for name, (harmless, why) in _UNSUPPORTED.items():
        value = read(config, name)
        if name == "packing" and config.acceleration.attention.padding_free is not None:
            continue  # the rule on both says more
        if value not in harmless:
            problems.append(f"--{name} {value if isinstance(value, str) else show(value)} {why}")
    return problems


RULES: Final[tuple[Callable[[RunConfig], list[str]], ...]] = (
    check_paths,
    _check_attention,
    _check_multipack,
    _check_streaming,
    _check_quantised,
    _check_peft,
    _check_precision,
    _check_evaluation,
    _check_training,
    _check_text,
    check_numbers,
    _check_unsupported,
)
