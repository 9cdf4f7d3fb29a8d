import dataclasses

import pytest

from tests.config.inputs import launch, read, write_json
from tuning.config.acceleration_configs import FastKernelsConfig
from tuning.config.catalog import list_flags
from tuning.config.synonyms import SYNONYMS, find_conflicts, same_thing
from tuning.config.validation import resolve


def resolved(*argv):
    return resolve(read(*argv), launch())


def test_every_name_in_the_table_is_a_flag():
    flags = list_flags()
    for item in SYNONYMS:
        assert item.kept in flags
        assert item.other.partition(".")[0] in flags or item.other.startswith("activation_checkpointing")


def test_a_plain_config_is_returned_as_it_is():
    config = read("--max_steps", "2", "--max_seq_length", "9")
    assert resolve(config, launch()) == config


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--max_length", "512"], "max_seq_length", 512),
        (["--max_length", "512", "--max_seq_length", "512"], "max_seq_length", 512),
        (["--completion_only_loss", "false"], "train_on_input", True),
        (["--completion_only_loss", "true"], "train_on_input", False),
        (["--assistant_only_loss"], "train_on_input", False),
        (["--completion_only_loss", "true", "--assistant_only_loss", "false"], "train_on_input", False),
        (["--dataset_num_proc", "3"], "preprocessing_num_workers", 3),
        (["--chat_template_path", "t.jinja"], "chat_template", "t.jinja"),
    ],
)
def test_kept_in_the_data_arguments(argv, name, value):
    config = resolved(*argv)
    assert getattr(config.data, name) == value
    assert config.train == {}
    assert config.given == {name}


@pytest.mark.parametrize(
    ("argv", "model"),
    [
        (["--model_init_kwargs", '{"dtype": "bfloat16"}'], {"torch_dtype": "bfloat16"}),
        (["--model_init_kwargs", '{"torch_dtype": "torch.float16"}'], {"torch_dtype": "float16"}),
        (["--model_init_kwargs", '{"dtype": "fp32"}', "--torch_dtype", "float32"], {"torch_dtype": "float32"}),
        (["--model_init_kwargs", '{"revision": "v1"}'], {"model_revision": "v1"}),
        (["--torch_dtype", "torch.bfloat16"], {"torch_dtype": "bfloat16"}),
        (["--torch_dtype", "bf16"], {"torch_dtype": "bfloat16"}),
    ],
)
def test_kept_in_the_model_arguments(argv, model):
    config = resolved(*argv)
    assert {name: getattr(config.model, name) for name in model} == model
    assert "model_init_kwargs" not in config.train


def test_what_has_no_synonym_stays_in_model_init_kwargs():
    config = resolved("--model_init_kwargs", '{"dtype": "float32", "device_map": "auto", "trust_remote_code": true}')
    assert config.train == {"model_init_kwargs": {"device_map": "auto"}, "trust_remote_code": True}
    assert config.given == {"torch_dtype", "trust_remote_code", "model_init_kwargs"}


def test_liger_is_fast_kernels_auto():
    config = resolved("--use_liger_kernel")
    assert config.acceleration.kernels.fast_kernels == FastKernelsConfig(auto=True)
    assert config.train == {}
    assert resolved("--use_liger_kernel", "false").train == {}
    assert resolved("--use_liger_kernel", "false", "--fast_kernels", "rope").acceleration.active() == {
        "fast_kernels": FastKernelsConfig(kernels=("rope",))
    }


def test_both_names_of_checkpointing():
    flags = list_flags()
    if "activation_checkpointing" not in flags:
        pytest.skip("this version of transformers has one name")
    assert resolved("--activation_checkpointing").train == {"gradient_checkpointing": "true"}
    config = resolved("--activation_checkpointing_kwargs", '{"use_reentrant": false}')
    assert config.train == {"gradient_checkpointing_kwargs": {"use_reentrant": False}}


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--max_length", "512", "--max_seq_length", "256"],
         "--max_seq_length 256 and --max_length 512 say different things about one setting; keep one"),
        (["--torch_dtype", "float32", "--model_init_kwargs", '{"dtype": "bfloat16"}'],
         "--torch_dtype float32 and --model_init_kwargs.dtype bfloat16 say different things about one setting; "
         "keep one"),
        (["--use_liger_kernel", "--fast_kernels", "rope", "rms_norm"],
         "--fast_kernels rms_norm rope and --use_liger_kernel true say different things about one setting; keep one"),
        (["--completion_only_loss", "true", "--train_on_input"],
         "--train_on_input true and --completion_only_loss true say different things about one setting; keep one"),
        (["--assistant_only_loss", "--train_on_input", "true"],
         "--train_on_input true and --assistant_only_loss true say different things about one setting; keep one"),
        (["--dataset_num_proc", "2", "--preprocessing_num_workers", "3"],
         "--preprocessing_num_workers 3 and --dataset_num_proc 2 say different things about one setting; keep one"),
        (["--chat_template", "a", "--chat_template_path", "b"],
         "--chat_template a and --chat_template_path b say different things about one setting; keep one"),
    ],
)  # fmt: skip
def test_two_values_of_one_thing(argv, problem):
    assert find_conflicts(read(*argv)) == [problem]
    assert find_conflicts(resolved(*argv)) == [problem]


def test_a_third_name_that_disagrees():
    config = resolved("--completion_only_loss", "false", "--assistant_only_loss", "true")
    assert find_conflicts(config) == [
        "--train_on_input true and --assistant_only_loss true say different things about one setting; keep one"
    ]


def test_defaults_of_a_python_program_are_no_request():
    config = read("--max_seq_length", "9")
    full = dataclasses.replace(
        config,
        train={
            "max_length": None, "completion_only_loss": None, "assistant_only_loss": False, "use_liger_kernel": False,
            "dataset_num_proc": None, "chat_template_path": None, "model_init_kwargs": None, "trust_remote_code": False,
        },
        given=frozenset(),
    )  # fmt: skip
    assert find_conflicts(full) == []
    done = resolve(full, launch())
    assert (done.data, done.model, done.acceleration) == (config.data, config.model, config.acceleration)


def test_same_thing():
    assert same_thing("max_length") == same_thing("max_seq_length") == {"max_length", "max_seq_length"}
    assert same_thing("assistant_only_loss") == {"train_on_input", "completion_only_loss", "assistant_only_loss"}
    assert same_thing("seed") == {"seed"}
    assert same_thing("trackers") == {"report_to", "trackers"}


def test_synonyms_in_a_file(tmp_path):
    path = write_json(tmp_path / "run.json", {"max_length": 64, "max_seq_length": "64"})
    assert resolved(path).data.max_seq_length == 64
