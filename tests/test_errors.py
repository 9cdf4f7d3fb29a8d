import pytest

from tuning import errors
from tuning.errors import ConfigError, UserError


def test_exit_codes_are_those_of_fms_hf_tuning():
    assert (errors.USER_ERROR_EXIT, errors.INTERNAL_ERROR_EXIT) == (1, 203)


@pytest.mark.parametrize(
    "name", ["CheckpointError", "ConfigError", "DataError", "ModelError", "PluginError", "UnsupportedError"]
)
def test_every_user_error_is_a_value_error(name):
    error = getattr(errors, name)
    assert issubclass(error, UserError)
    assert issubclass(error, ValueError)


def test_config_error_holds_every_problem():
    assert str(ConfigError("one")) == "one"
    assert ConfigError("one").problems == ("one",)
    error = ConfigError(["one", "two"])
    assert str(error) == "one\ntwo"
    assert error.problems == ("one", "two")
