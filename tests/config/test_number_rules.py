import pytest

from tests.config.inputs import broken_rules
from tuning.config import number_rules
from tuning.config.catalog import list_flags

COUNT = "a whole number from 1"
FROM_0 = "a number from 0"
SHARE = "a number from 0 to below 1"
SEED = "a whole number from 0 to 4294967295"
STEPS = "a whole number of steps from 1, or a share of all steps below 1"


@pytest.mark.parametrize(
    ("name", "value", "shown", "takes"),
    [
        ("per_device_train_batch_size", "0", "0", COUNT),
        ("per_device_eval_batch_size", "-1", "-1", COUNT),
        ("gradient_accumulation_steps", "0", "0", COUNT),
        ("learning_rate", "-0.1", "-0.1", FROM_0),
        ("learning_rate", "inf", "Infinity", FROM_0),
        ("weight_decay", "-1", "-1.0", FROM_0),
        ("warmup_steps", "-1", "-1.0", FROM_0),
        ("max_grad_norm", "-1", "-1.0", FROM_0),
        ("adam_beta1", "1", "1.0", SHARE),
        ("adam_epsilon", "0", "0.0", "a number above 0"),
        ("label_smoothing_factor", "1.5", "1.5", SHARE),
        ("neftune_noise_alpha", "0", "0.0", "a number above 0"),
        ("max_steps", "0", "0", "-1 for no limit, or a whole number from 1"),
        ("max_steps", "-2", "-2", "-1 for no limit, or a whole number from 1"),
        ("num_train_epochs", "0", "0.0", "a number above 0, unless --max_steps is given"),
        ("max_seq_length", "1", "1", "a whole number from 2"),
        ("validation_split", "1", "1.0", SHARE),
        ("validation_split", "-0.1", "-0.1", SHARE),
        ("seed", "-1", "-1", SEED),
        ("data_seed", "4294967296", "4294967296", SEED),
        ("save_total_limit", "0", "0", COUNT),
        ("logging_steps", "0", "0.0", STEPS),
        ("logging_steps", "1.5", "1.5", STEPS),
        ("save_steps", "-1", "-1.0", STEPS),
        ("dataloader_num_workers", "-1", "-1", "a whole number from 0"),
        ("embedding_size_multiple_of", "0", "0", COUNT),
        ("pad_to_multiple_of", "0", "0", COUNT),
        ("pad_to_multiple_of", "-8", "-8", COUNT),
        ("preprocessing_num_workers", "0", "0", COUNT),
    ],
)
def test_out_of_range(tmp_path, name, value, shown, takes):
    assert broken_rules(tmp_path, f"--{name}", value) == [f"--{name} is {shown}, but takes {takes}; correct the value"]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--per_device_train_batch_size", "9223372036854775808"],
         "--per_device_train_batch_size is 9223372036854775808, which no count of 64 bits can hold; correct the value"),
        (["--peft_method", "lora", "--r", "0"], f"--r is 0, but takes {COUNT}; correct the value"),
        (["--peft_method", "lora", "--lora_alpha", "0"],
         "--lora_alpha is 0, but takes a number above 0; correct the value"),
        (["--peft_method", "lora", "--lora_dropout", "1"], f"--lora_dropout is 1.0, but takes {SHARE}; correct "
                                                           f"the value"),
        (["--peft_method", "pt", "--num_virtual_tokens", "0"],
         f"--num_virtual_tokens is 0, but takes {COUNT}; correct the value"),
        (["--padding_free", "--multipack", "0"],
         f"--multipack num_processes is 0, but takes {COUNT}; correct the value"),
        (["--padding_free", "--multipack", "max_tokens=0"],
         f"--multipack max_tokens is 0, but takes {COUNT}; correct the value"),
        (["--dataloader_prefetch_factor", "2"],
         "--dataloader_prefetch_factor is for worker processes, but --dataloader_num_workers is 0; give workers "
         "or drop "
         "it"),
        (["--validation_split", "0.5", "--eval_strategy", "steps", "--eval_steps", "0"],
         f"--eval_steps is 0.0, but takes {STEPS}; correct the value"),
    ],
)  # fmt: skip
def test_out_of_range_together_with_others(tmp_path, argv, problem):
    assert broken_rules(tmp_path, *argv) == [problem]


@pytest.mark.parametrize(
    "argv",
    [
        ["--learning_rate", "0"],
        ["--max_grad_norm", "inf"],
        ["--max_steps", "-1"],
        ["--max_steps", "3", "--num_train_epochs", "0"],
        ["--num_train_epochs", "0.5"],
        ["--logging_steps", "0.1", "--save_steps", "5"],
        ["--logging_strategy", "epoch", "--logging_steps", "0"],
        ["--warmup_steps", "0.1"],
        ["--dataloader_num_workers", "2", "--dataloader_prefetch_factor", "2"],
    ],
)
def test_in_range(tmp_path, argv):
    assert broken_rules(tmp_path, *argv) == []


def test_the_tables_name_flags():
    flags = list_flags()
    assert [name for name in (*number_rules._TRAIN, *number_rules._OURS) if name not in flags] == []
