import pytest

from tuning.errors import UnsupportedError
from tuning.relaunch import find_missing_processes

ALONE = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "words",
    [
        ["accelerate", "launch", "--cpu", "--num_processes", "3", "-m", "tuning.sft_trainer"],
        ["python", "-m", "accelerate.commands.launch", "--cpu", "--num-processes=3", "-m", "tuning.sft_trainer"],
    ],
)
def test_the_number_is_read_from_the_launcher(words):
    assert find_missing_processes(ALONE, words) == 3


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"ACCELERATE_USE_CPU": "True"},
        {"ACCELERATE_USE_CPU": "False", "MASTER_ADDR": "127.0.0.1"},
        {**ALONE, "RANK": "0", "WORLD_SIZE": "2"},
        {**ALONE, "OMPI_COMM_WORLD_SIZE": "2"},
    ],
)
def test_a_launch_that_is_as_asked_is_left_alone(environ):
    assert find_missing_processes(environ, ["accelerate", "launch", "--num_processes", "2"]) is None


def test_a_number_that_cannot_be_read_is_an_error():
    with pytest.raises(UnsupportedError) as error:
        find_missing_processes(ALONE, ["accelerate", "launch", "--config_file", "two.yaml"])
    assert str(error.value) == (
        "accelerate was asked for several CPU processes and started one, because it starts more through mpirun only; "
        "use torchrun --nproc_per_node N -m tuning.sft_trainer ... instead"
    )
