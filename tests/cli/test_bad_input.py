"""Bad input in a process of its own: one message, exit 1, no traceback, nothing written.

A misspelt key that trains with the default: https://github.com/huggingface/transformers/pull/18692. Flags that
contradict each other and are accepted: https://github.com/axolotl-ai-cloud/axolotl/issues/449 and
https://github.com/foundation-model-stack/fms-hf-tuning/pull/280.
"""

import json

import pytest

from tests.cli.commands import run
from tests.config.inputs import argv_of, valid_flags


def train(tmp_path, flags):
    path = tmp_path / "run.json"
    path.write_text(flags if isinstance(flags, str) else json.dumps(valid_flags(tmp_path) | flags))
    ended = run(["--config", path])
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert ended.out == ""
    assert not (tmp_path / "out").exists()
    return ended.err.removesuffix("\n").replace(str(path), "run.json")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"per_device_batch_size": 2, "max_steps": 1},
         "run.json: per_device_batch_size is no flag; did you mean per_device_eval_batch_size or "
         "per_device_train_batch_size?"),
        ('{\n "max_steps": 1,\n}', "run.json, line 2, column 16: trailing comma, which JSON does not allow; remove it"),
        ('{"max_steps": 1', "run.json, line 1, column 16: no valid JSON (Expecting ',' delimiter); correct it"),
        ("", "run.json is empty; write a JSON or YAML object of flags into it"),
        ("[]", "run.json holds a list at its top level, but flags need an object; write {...} around them"),
        ('{"max_steps": 1,\n "max_steps": 2}',
         "run.json, line 2, column 2: the key max_steps is given a second time; keep one"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_meant(tmp_path, flags, message):
    assert train(tmp_path, flags) == message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"padding_free": ["huggingface"], "packing": True, "max_steps": 1},
         "--packing and --padding_free cannot be used together, since packing joins samples that padding_free keeps "
         "apart; drop --packing (--multipack mode=budget makes full packs)"),
        ({"multipack": [16], "max_steps": 1},
         "--multipack needs --padding_free, since its batches hold samples of any length; add --padding_free "
         "huggingface or drop --multipack"),
        ({"peft_method": None, "bnb_qlora": ["nf4"]},
         "--bitsandbytes (--bnb_qlora) loads a quantised base, which cannot be trained itself, but --peft_method is "
         "none; add --peft_method lora or drop --bitsandbytes (--bnb_qlora)"),
        ({"padding_free": "huggingface", "use_flash_attn": False},
         "--padding_free needs variable-length attention, but --use_flash_attn is false; set it to true or drop "
         "--padding_free"),
        ({"padding_free": "huggingfac"},
         'run.json: padding_free was given "huggingfac", but it takes only huggingface; correct the value'),
        ({"peft_method": "lora", "fused_lora": ["auto_gptq", True]},
         "--fused_lora auto_gptq needs a quantised base, but none is loaded; add --auto_gptq triton_v2, or use "
         "--fused_lora auto, which fuses ordinary LoRA too"),
    ],
)  # fmt: skip
def test_flags_that_contradict_each_other(tmp_path, flags, message):
    assert train(tmp_path, flags) == message


def test_an_output_dir_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("kept")
    ended = run(argv_of(valid_flags(tmp_path) | {"output_dir": str(path)}))
    assert (ended.code, ended.err) == (1, f"--output_dir {path} is a file, not a folder; name a folder\n")
    assert path.read_text() == "kept"


def test_a_file_that_does_not_exist():
    ended = run(["gone.json"])
    assert (ended.code, ended.err) == (1, "the configuration file gone.json does not exist; correct the path\n")


def test_every_rank_ends_and_one_speaks(tmp_path):
    argv = [*argv_of(valid_flags(tmp_path)), "--multipack"]
    ended = [run(argv, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    assert [item.code for item in ended] == [1, 1]
    assert ended[0].err.startswith("--multipack needs --padding_free")
    assert ended[1].err == ""
    assert max(item.seconds for item in ended) < 5


def test_the_termination_log(tmp_path):
    log = tmp_path / "termination.log"
    ended = run(["--max_step", "3"], TERMINATION_LOG_FILE=str(log))
    assert log.read_text() == ended.err
