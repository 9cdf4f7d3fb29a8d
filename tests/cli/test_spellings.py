"""Every documented command line is parsed, and every documented name is a flag."""

import json
import re
import shlex

import pytest

from tests.cli.commands import ROOT
from tests.config.inputs import launch, read
from tuning.config.acceleration_configs import (
    AutoGPTQLoraConfig,
    BNBQLoraConfig,
    FastKernelsConfig,
    FusedLoraConfig,
    MultiPack,
    PaddingFree,
)
from tuning.config.arguments import read_arguments
from tuning.config.catalog import list_flags
from tuning.config.old_names import ALWAYS, REFUSED, RENAMED
from tuning.config.synonyms import SYNONYMS
from tuning.config.validation import resolve

PAGE = ROOT / "docs" / "command_line.md"
THREE = FastKernelsConfig(kernels=("cross_entropy", "rms_norm", "rope"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--padding_free huggingface", {"padding_free": PaddingFree()}),
        ("--multipack 16", {"multipack": MultiPack(num_processes=16)}),
        ("--multipack num_processes=16 mode=budget", {"multipack": MultiPack(num_processes=16, mode="budget")}),
        ("--multipack mode=budget num_processes=16", {"multipack": MultiPack(num_processes=16, mode="budget")}),
        ("--multipack 8 mode=budget max_tokens=12288", {
            "multipack": MultiPack(num_processes=8, mode="budget", max_tokens=12288)}),
        ("--fast_kernels True True True", {"fast_kernels": THREE}),
        ("--fast_kernels FastCrossEntropyLoss FastRoPE FastRMSLayerNorm", {"fast_kernels": THREE}),
        ("--fast_kernels rope rms_norm", {"fast_kernels": FastKernelsConfig(kernels=("rms_norm", "rope"))}),
        ("--fast_kernels rope=True rms_norm", {"fast_kernels": FastKernelsConfig(kernels=("rms_norm", "rope"))}),
        ("--fast_kernels fused_ce_liger True True", {
            "fast_kernels": FastKernelsConfig(kernels=("linear_cross_entropy", "rms_norm", "rope"))}),
        ("--fast_kernels auto", {"fast_kernels": FastKernelsConfig(auto=True)}),
        ("--fast_kernels False False False", {}),
        ("--fast_kernels none", {}),
        ("--fused_lora auto_gptq True", {"fused_lora": FusedLoraConfig(base_layer="auto_gptq")}),
        ("--fused_lora bitsandbytes True", {"fused_lora": FusedLoraConfig(base_layer="bitsandbytes")}),
        ("--fused_lora True bitsandbytes", {"fused_lora": FusedLoraConfig(base_layer="bitsandbytes")}),
        ("--fused_lora auto", {"fused_lora": FusedLoraConfig()}),
        ("--auto_gptq triton_v2", {"auto_gptq": AutoGPTQLoraConfig()}),
        ("--bitsandbytes nf4", {"bnb_qlora": BNBQLoraConfig()}),
        ("--bnb_qlora nf4", {"bnb_qlora": BNBQLoraConfig()}),
        ("--bnb-qlora fp4", {"bnb_qlora": BNBQLoraConfig(quant_type="fp4")}),
        ("--loss_across_gpus mean token", {}),
    ],
)  # fmt: skip
def test_acceleration_flags(line, expected):
    assert read(*shlex.split(line)).acceleration.active() == expected


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if "tuning.sft_trainer" in line]


def test_documented_commands_are_parsed():
    flags = list_flags()
    assert len(commands()) > 2
    for command in commands():
        tokens = shlex.split(command, comments=True)
        read_arguments(tokens[tokens.index("tuning.sft_trainer") + 1 :], flags)


def test_documented_files_mean_what_the_command_line_means():
    json_text, yaml_text = re.findall(r"```(?:json|yaml)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    from tuning.config.files import read_yaml
    from tuning.config.parsing import parse_mapping

    first, second = (parse_mapping(value) for value in (json.loads(json_text), read_yaml(yaml_text, "page")))
    tokens = shlex.split(next(line for line in commands() if "--config" not in line), comments=True)
    third = read(*tokens[tokens.index("tuning.sft_trainer") + 1 :])
    assert resolve(first, launch()) == resolve(second, launch()) == resolve(third, launch())


def table(heading: str) -> list[list[str]]:
    text = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in row] for row in rows[2:]]


def test_the_table_of_synonyms_is_that_of_the_code():
    assert table("Two names of one thing") == [[item.other, item.kept, item.meaning] for item in SYNONYMS]


def test_the_tables_of_old_names_are_those_of_the_code():
    assert [row[:2] for row in table("Old names")] == [[old, new] for old, new in RENAMED.items()]
    assert [row[0] for row in table("Always done")] == list(ALWAYS)
    assert [row[0] for row in table("Refused by name")] == list(REFUSED)


def test_names_on_the_page_are_flags():
    known = {*list_flags(), *RENAMED, *ALWAYS, *REFUSED, "help", "bitsandbytes", "tracker"}
    names = {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][\w-]*)", PAGE.read_text())}
    # the words of a syntax, and a flag of accelerate launch
    names -= {"flag", "no_flag", "answer", "num_processes"}
    assert len(names) > 20
    assert sorted(name for name in names if name.removeprefix("no_") not in known) == []
