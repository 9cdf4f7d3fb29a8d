"""Every rule with its full text; what is said to do in the text is then accepted."""

import pytest

from tests.config.inputs import broken_rules

PADDING_FREE = ["--padding_free", "huggingface"]
LORA = ["--peft_method", "lora"]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        # attention and packing
        ([*PADDING_FREE, "--use_flash_attn", "false"],
         "--padding_free needs variable-length attention, but --use_flash_attn is false; set it to true or drop "
         "--padding_free"),
        ([*PADDING_FREE, "--packing"],
         "--packing and --padding_free cannot be used together, since packing joins samples that padding_free keeps "
         "apart; drop --packing (--multipack mode=budget makes full packs)"),
        (["--packing"],
         "--packing true joins and cuts samples, so that they are trained on out of their place; use --padding_free "
         "huggingface, with --multipack mode=budget for full packs"),
        (["--packing_strategy", "wrapped"],
         "--packing_strategy wrapped belongs to --packing, which is not supported; use --multipack mode=budget"),
        (["--eval_packing", "true"],
         "--eval_packing true joins samples of the evaluation, which is not supported; drop it (--padding_free holds "
         "for evaluation too)"),
        ([*PADDING_FREE, "--pad_to_multiple_of", "8"],
         "--pad_to_multiple_of asks for padding and --padding_free for none; drop one of them"),
        ([*PADDING_FREE, "--peft_method", "pt"],
         "--peft_method pt puts its virtual tokens before each row, but with --padding_free all samples share one row; "
         "drop --padding_free or use --peft_method lora"),
        (["--model_init_kwargs", '{"attn_implementation": "eager"}'],
         "model_init_kwargs asks for attn_implementation eager, but --use_flash_attn is true and picks the attention; "
         "drop the key or set --use_flash_attn to false"),
        (["--multipack", "16"],
         "--multipack needs --padding_free, since its batches hold samples of any length; add --padding_free "
         "huggingface or drop --multipack"),
        ([*PADDING_FREE, "--multipack", "16", "--group_by_length"],
         "--multipack and --train_sampling_strategy group_by_length both choose the samples of a batch; drop one of "
         "them"),
        ([*PADDING_FREE, "--multipack", "16", "--train_sampling_strategy", "batch_rebalance"],
         "--multipack and --train_sampling_strategy batch_rebalance both choose the samples of a batch; drop one of "
         "them"),
        ([*PADDING_FREE, "--multipack", "16", "--auto_find_batch_size"],
         "--auto_find_batch_size changes the batch size during the run, while the plan of --multipack is made for one; "
         "drop --auto_find_batch_size or --multipack"),
        ([*PADDING_FREE, "--multipack", "16", "--dataloader_drop_last"],
         "--dataloader_drop_last drops samples, while --multipack keeps every one; drop --dataloader_drop_last or "
         "--multipack"),
        ([*PADDING_FREE, "--multipack", "16", "--accelerator_config", '{"split_batches": true}'],
         "accelerator_config asks for split_batches, but --multipack gives each rank batches of its own; drop "
         "split_batches or --multipack"),
        # streaming
        (["--streaming", "--max_steps", "3", *PADDING_FREE, "--multipack", "4"],
         "--streaming and --multipack cannot be used together, since multipack needs the lengths of all samples "
         "beforehand; drop --streaming or --multipack"),
        (["--streaming"],
         "--streaming reads rows without counting them, so --max_steps must say when to stop; give it or drop "
         "--streaming"),
        # quantised bases and fused LoRA
        (["--bnb_qlora", "nf4"],
         "--bitsandbytes (--bnb_qlora) loads a quantised base, which cannot be trained itself, but --peft_method is "
         "none; add --peft_method lora or drop --bitsandbytes (--bnb_qlora)"),
        (["--auto_gptq", "triton_v2", "--peft_method", "pt"],
         "--auto_gptq loads a quantised base, which cannot be trained itself, but --peft_method is pt; add "
         "--peft_method lora or drop --auto_gptq"),
        ([*LORA, "--auto_gptq", "triton_v2", "--bitsandbytes", "nf4"],
         "--auto_gptq and --bitsandbytes (--bnb_qlora) both load a quantised base; keep one"),
        ([*LORA, "--auto_gptq", "from_quantized=false"],
         "--auto_gptq from_quantized=false would quantise the model itself, which is not supported; name a GPTQ "
         "checkpoint with --model_name_or_path"),
        ([*LORA, "--fused_lora", "auto_gptq", "True"],
         "--fused_lora auto_gptq needs a quantised base, but none is loaded; add --auto_gptq triton_v2, or use "
         "--fused_lora auto, which fuses ordinary LoRA too"),
        ([*LORA, "--fused_lora", "bitsandbytes", "True"],
         "--fused_lora bitsandbytes needs a quantised base, but none is loaded; add --bitsandbytes nf4, or use "
         "--fused_lora auto, which fuses ordinary LoRA too"),
        ([*LORA, "--fused_lora", "auto_gptq", "True", "--bitsandbytes", "nf4"],
         "--fused_lora names auto_gptq, but --bitsandbytes (--bnb_qlora) loads the base; name the same in both"),
        (["--fused_lora", "auto"],
         "--fused_lora auto fuses adapters, but --peft_method is none; add --peft_method lora or drop --fused_lora"),
        # adapters
        (["--r", "4", "--lora_alpha", "8"],
         "--r, --lora_alpha belong to --peft_method lora, but --peft_method is none; add --peft_method lora or drop "
         "--r, --lora_alpha"),
        ([*LORA, "--num_virtual_tokens", "4"],
         "--num_virtual_tokens belongs to --peft_method pt, but --peft_method is lora; add --peft_method pt or drop "
         "--num_virtual_tokens"),
        ([*LORA, "--target_modules", "[]"],
         "--target_modules is empty; name modules, or all-linear"),
        # precision
        (["--fp16", "--bf16"], "--fp16 and --bf16 are both true; keep one"),
        (["--fp16_full_eval"],
         "--fp16_full_eval true casts the model for an evaluation after training, and this run evaluates while it "
         "trains; drop it"),
        (["--bf16_full_eval"],
         "--bf16_full_eval true casts the model for an evaluation after training, and this run evaluates while it "
         "trains; drop it"),
        (["--torch_dtype", "int8"],
         "--torch_dtype is int8, but takes one of auto, bfloat16, float16, float32; correct the value"),
        (["--torch_dtype", "bfloat16", "--fp16"],
         "--fp16 computes in another 16-bit format than --torch_dtype bfloat16 stores; drop --fp16, or use "
         "--torch_dtype float32 for mixed precision"),
        (["--torch_dtype", "float16", "--bf16"],
         "--bf16 computes in another 16-bit format than --torch_dtype float16 stores; drop --bf16, or use "
         "--torch_dtype float32 for mixed precision"),
        (["--torch_dtype", "float16", "--fp16"],
         "--fp16 scales gradients, which needs float32 weights, but --torch_dtype is float16; use --torch_dtype "
         "float32"),
        # evaluation
        (["--load_best_model_at_end"],
         "--load_best_model_at_end compares checkpoints on validation data, but there is none; give "
         "--validation_data_path or --validation_split"),
        (["--eval_strategy", "epoch"],
         "--eval_strategy epoch evaluates on validation data, but there is none; give --validation_data_path or "
         "--validation_split, or drop --eval_strategy"),
        (["--eval_on_start"],
         "--eval_on_start evaluates on validation data, but there is none; give --validation_data_path or "
         "--validation_split, or drop --eval_on_start"),
        (["--load_best_model_at_end", "--validation_split", "0.5"],
         "--load_best_model_at_end needs evaluations to compare, but --eval_strategy is no; set it as --save_strategy "
         "is"),
        (["--validation_split", "0.5", "--validation_data_path", "org/name"],
         "--validation_data_path and --validation_split both make validation data; keep one"),
        # texts
        (["--response_template", ""], "--response_template is empty; give a text or drop it"),
        (["--dataset_text_field", " "], "--dataset_text_field is empty; give a text or drop it"),
        (["--instruction_template", "Q:"],
         "--instruction_template ends the answers that --response_template begins, but the latter is not given; add "
         "--response_template"),
        (["--dataset_text_field", "text", "--data_formatter_template", "{{a}}"],
         "--dataset_text_field and --data_formatter_template both make the text of a row; keep one"),
        (["--data_formatter_template", "a"],
         '--data_formatter_template is "a", which names no column; write columns as {{column}}'),
        # what TRL's own data preparation would do
        (["--dataset_kwargs", '{"skip_prepare_dataset": true}'],
         '--dataset_kwargs {"skip_prepare_dataset": true} sets options of TRL\'s data preparation, which is not used; '
         "drop it (rows with input_ids are never tokenized)"),
        (["--shuffle_dataset"],
         "--shuffle_dataset true shuffles rows once, while every epoch is shuffled anyway; drop it (--seed changes the "
         "order)"),
        (["--truncation_mode", "keep_end"],
         "--truncation_mode keep_end would keep the end of a long sample, which is not supported; use "
         "--max_seq_length_policy truncate, drop or error"),
        (["--liger_kernel_config", '{"rope": true}'],
         '--liger_kernel_config {"rope": true} chooses among Liger\'s kernels, which are not used; name kernels with '
         "--fast_kernels"),
        (["--save_strategy", "best", "--metric_for_best_model", "loss"],
         "--save_strategy best saves after evaluations, but --eval_strategy is no, so nothing would be saved; set "
         "--eval_strategy, or --save_strategy to steps or epoch"),
        (["--save_strategy", "best", "--eval_strategy", "steps", "--validation_split", "0.1"],
         "--save_strategy best compares a metric, but none is named; give --metric_for_best_model, such as loss"),
        (["--load_best_model_at_end", "--save_strategy", "no", "--eval_strategy", "epoch", "--validation_split", "0.1"],
         "--load_best_model_at_end needs a checkpoint at each evaluation, but --save_strategy is no and "
         "--eval_strategy epoch; set both to the same"),
        (["--do_eval"],
         "--do_eval asks for evaluation, but --eval_strategy is no; set it to steps or epoch, or drop --do_eval"),
        (["--do_train", "false"],
         "--do_train false asks not to train, which is all that this command does; drop it"),
        (["--loss_type", "dft", "--label_smoothing_factor", "0.1"],
         "--label_smoothing_factor smooths the targets of --loss_type nll, but --loss_type is dft, which weighs them; "
         "drop one of them"),
        (["--gradient_checkpointing", "--gradient_checkpointing_kwargs", '{"use_reentrant": false, "foo": 1}'],
         "--gradient_checkpointing_kwargs has foo, which torch.utils.checkpoint does not take; it takes use_reentrant, "
         "preserve_rng_state, determinism_check, debug, context_fn, early_stop"),
        (["--do_predict"],
         "--do_predict true asks for predictions, which a training run does not make; drop it"),
    ],
)  # fmt: skip
def test_broken(tmp_path, argv, problem):
    assert broken_rules(tmp_path, *argv) == [problem]


def test_streaming_with_padding_free(tmp_path):
    assert broken_rules(tmp_path, "--streaming", "--max_steps", "3", *PADDING_FREE) == []


@pytest.mark.parametrize(
    "argv",
    [
        PADDING_FREE,
        [*PADDING_FREE, "--multipack", "16"],
        [*PADDING_FREE, "--multipack", "mode=budget", "max_tokens=4096"],
        [*PADDING_FREE, "--packing", "false", "--eval_packing", "false", "--packing_strategy", "bfd"],
        ["--fast_kernels", "True", "True", "True"],
        [*LORA, "--bitsandbytes", "nf4", "--fused_lora", "bitsandbytes", "True", "--fast_kernels", "all"],
        [*LORA, "--auto_gptq", "triton_v2", "--fused_lora", "auto_gptq", "True"],
        [*LORA, "--fused_lora", "auto"],
        [*LORA, "--r", "4", "--target_modules", "all-linear"],
        ["--peft_method", "pt", "--num_virtual_tokens", "4"],
        ["--torch_dtype", "float32", "--bf16", "true"],
        ["--torch_dtype", "bfloat16", "--bf16", "true"],
        [*LORA, "--torch_dtype", "float16", "--fp16"],
        ["--streaming", "--max_steps", "5"],
        ["--use_flash_attn", "false", "--model_init_kwargs", '{"attn_implementation": "eager"}'],
        ["--load_best_model_at_end", "--validation_split", "0.1", "--eval_strategy", "steps"],
        ["--response_template", "A:", "--instruction_template", "Q:", "--dataset_text_field", "text"],
        ["--data_formatter_template", "{{q}} {{a}}"],
        ["--pad_to_multiple_of", "8"],
        ["--loss_type", "dft", "--neftune_noise_alpha", "5", "--do_train"],
        ["--label_smoothing_factor", "0.1", "--loss_type", "nll"],
        ["--gradient_checkpointing_kwargs", '{"use_reentrant": true, "preserve_rng_state": false}'],
        [
            "--save_strategy",
            "best",
            "--metric_for_best_model",
            "loss",
            "--eval_strategy",
            "epoch",
            "--validation_split",
            "0.1",
            "--do_eval",
        ],
        ["--torch_compile", "--push_to_hub", "--train_sampling_strategy", "group_by_length"],
        ["--truncation_mode", "keep_start", "--shuffle_dataset", "false", "--do_predict", "false"],
    ],
)
def test_allowed(tmp_path, argv):
    assert broken_rules(tmp_path, *argv) == []
