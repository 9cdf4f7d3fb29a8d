"""What the machine and the launch are, from environment variables and from torch."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tuning.environment import Launch, detect, detect_launch, installed_version
from tuning.errors import ConfigError


def test_a_plain_process_is_rank_0_of_1():
    assert detect_launch({}) == Launch(rank=0, local_rank=0, world_size=1, termination_log=None, config_path=None)


def test_variables_of_a_launcher():
    launch = detect_launch(
        {
            "RANK": "5",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "8",
            "TERMINATION_LOG_FILE": "/tmp/last",
            "SFT_TRAINER_CONFIG_JSON_PATH": "run.json",
        }
    )
    assert launch == Launch(rank=5, local_rank=1, world_size=8, termination_log="/tmp/last", config_path="run.json")


def test_empty_variables_are_not_set():
    launch = detect_launch({"TERMINATION_LOG_FILE": "", "SFT_TRAINER_CONFIG_JSON_PATH": "", "RANK": ""})
    assert (launch.termination_log, launch.config_path, launch.rank) == (None, None, 0)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
def test_a_variable_that_is_no_number(name):
    with pytest.raises(ConfigError) as caught:
        detect_launch({name: "two"})
    assert str(caught.value) == (
        f"The environment variable {name} is 'two', but it must be a whole number, as torchrun and accelerate set it; "
        "correct or unset it"
    )


def test_the_launch_is_that_of_the_process_by_default(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert detect_launch().rank == 3


def test_use_cpu_wins_over_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    env = detect(detect_launch({}), use_cpu=True)
    assert (env.device_type, env.num_gpus, env.compute_capability, env.device_name) == ("cpu", 0, None, "cpu")
    assert env.device_bytes == 0


def test_a_machine_without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect(detect_launch({})).device_type == "cpu"


def test_a_machine_with_gpus_reports_that_of_the_local_rank(monkeypatch):
    asked = []
    card = SimpleNamespace(major=9, minor=0, name="H", total_memory=7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: asked.append(index) or card)
    env = detect(detect_launch({"LOCAL_RANK": "1"}))
    assert (env.device_type, env.num_gpus, env.compute_capability) == ("cuda", 2, (9, 0))
    assert (env.device_name, env.device_bytes, env.launch.local_rank) == ("H", 7, 1)
    detect(detect_launch({"LOCAL_RANK": "6"}))  # one visible device a process
    assert asked == [1, 1]


def test_versions_are_asked_for_without_importing():
    assert installed_version("torch") == torch.__version__
    assert installed_version("no-such-distribution") is None


def test_the_launch_is_known_without_importing_torch():
    code = "import sys; from tuning.environment import detect_launch; detect_launch(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
