"""Errors of upstream's readers in one line that says something."""

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError

from tuning.models.load_errors import LOAD_ERRORS, describe


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("not this.\nbut that"), "not this"),
        (KeyError("gelu2"), "KeyError: 'gelu2'"),
        (ZeroDivisionError("integer modulo by zero"), "ZeroDivisionError: integer modulo by zero"),
        (AssertionError(), "AssertionError"),
        (OSError(), "OSError"),
    ],
)
def test_describe(error, text):
    assert describe(error) == text
    assert isinstance(error, LOAD_ERRORS)


def test_the_check_of_a_field_is_told_with_its_reason():
    error = StrictDataclassFieldValidationError(field="hidden_size", cause=TypeError("expected int, got str"))
    assert describe(error) == "Validation error for field 'hidden_size': TypeError: expected int, got str"
    assert isinstance(error, LOAD_ERRORS)


def test_a_stop_by_the_user_is_no_load_error():
    assert not isinstance(KeyboardInterrupt(), LOAD_ERRORS)
    assert not isinstance(MemoryError(), LOAD_ERRORS)
