import pytest

from tests.config.inputs import problems_of, read, write_json
from tuning.config.catalog import list_flags
from tuning.config.old_names import ALWAYS, REFUSED, RENAMED


def test_no_old_name_is_a_flag():
    flags = list_flags()
    assert [name for name in (*RENAMED, *REFUSED) if name in flags] == []
    assert [name for name in ALWAYS if name in flags] == ["loss_across_gpus"]
    assert [new for new in RENAMED.values() if new not in flags] == []


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--evaluation_strategy", "steps"], "eval_strategy", "steps"),
        (["--no_cuda"], "use_cpu", True),
        (["--no_cuda", "false"], "use_cpu", False),
        (["--warmup_ratio", "0.1"], "warmup_steps", 0.1),
        (["--group_by_length", "true"], "train_sampling_strategy", "group_by_length"),
        (["--per_gpu_train_batch_size", "4"], "per_device_train_batch_size", 4),
    ],
)
def test_renamed(argv, name, value):
    assert read(*argv).train == {name: value}


def test_renamed_to_a_field_of_ours():
    assert read("--dtype", "float32").model.torch_dtype == "float32"


def test_group_by_length_false_asks_for_nothing():
    config = read("--group_by_length", "false")
    assert config.train == {}
    assert "train_sampling_strategy" not in config.given


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        (
            ["--loss_across_gpus", "mean", "token"],
            "--loss_across_gpus mean token changes nothing: the loss is always a mean over the supervised tokens "
            "of all "
            "GPUs",
        ),
        (
            ["--loss_across_gpus", "mean token"],
            "--loss_across_gpus mean token changes nothing: the loss is always a mean over the supervised tokens "
            "of all "
            "GPUs",
        ),
        (
            ["--include_tokens_per_second"],
            "--include_tokens_per_second true changes nothing: real tokens a second are always in the log",
        ),
        (
            ["--enable_reduce_loss_sum", "True"],
            "--enable_reduce_loss_sum true changes nothing: the loss is always a mean over the supervised tokens "
            "of the "
            "whole step",
        ),
        (["--save_safetensors", "yes"], "--save_safetensors true changes nothing: checkpoints are always safetensors"),
    ],
)
def test_always_done(argv, note):
    config = read(*argv)
    assert config.notes == (note,)
    assert config.given == frozenset()


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (
            ["--loss_across_gpus", "sum"],
            "--loss_across_gpus was given sum, but the loss is always a mean over the supervised tokens of all GPUs; "
            "give mean token or drop the flag",
        ),
        (
            ["--save_safetensors", "false"],
            "--save_safetensors was given false, but checkpoints are always safetensors; give true or drop the flag",
        ),
        (
            ["--fast_moe", "1"],
            "--fast_moe has no counterpart here, experts run as the model has them; drop the flag",
        ),
        (
            ["--aim_repo", "x"],
            "--aim_repo needs the Aim tracker, which transformers does not support; use --report_to with another one",
        ),
        (
            ["--trainer_controller_config_file", "x"],
            "--trainer_controller_config_file is not supported; pass a trainer callback to tuning.run.train instead",
        ),
        (
            ["--warmup_ratio", "2"],
            '--warmup_ratio was given "2", but it takes a number from 0 to below 1; correct the value',
        ),
        (
            ["--group_by_length", "maybe"],
            '--group_by_length was given "maybe", but it takes true or false; correct the value',
        ),
    ],
)
def test_refused_by_name(argv, problem):
    assert problems_of(*argv) == [problem]


def test_refused_keys_of_a_file_that_ask_for_nothing_pass(tmp_path):
    path = write_json(tmp_path / "run.json", {"accelerate_launch_args": {}, "aim_repo": None, "logging_dir": None})
    assert read(path).given == frozenset()
    path = write_json(tmp_path / "run.json", {"accelerate_launch_args": {"num_processes": 2}})
    assert problems_of(path) == [
        f"{path}: accelerate_launch_args belongs to the launcher; give its entries to accelerate launch and drop "
        f"the key"
    ]


@pytest.mark.parametrize(
    ("argv", "report_to"),
    [
        (["--tracker", "mlflow"], ["mlflow"]),
        (["--trackers", "file_logger", "wandb"], ["wandb"]),
        (["--trackers", "file_logger"], None),
        (["--trackers", "none"], None),
    ],
)
def test_trackers_are_report_to(argv, report_to):
    assert read(*argv).train.get("report_to") == report_to


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (
            ["--tracker", "aim"],
            "--tracker was given aim, which is not supported; name a tracker that --report_to takes",
        ),
        (["{file}"], "{file}: trackers was given true, but it takes a list of texts or text; correct the value"),
        (
            ["--trackers", "none", "wandb"],
            "--trackers was given none together with other trackers; keep none or the others",
        ),
    ],
)
def test_trackers_refused(tmp_path, argv, problem):
    path = write_json(tmp_path / "run.json", {"trackers": True})
    assert problems_of(*[token.replace("{file}", path) for token in argv]) == [problem.replace("{file}", path)]
