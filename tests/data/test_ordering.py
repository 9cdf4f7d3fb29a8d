"""The stable sort of whole numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.data.ordering import stable_order


@given(st.lists(st.integers(0, 2**32 - 1)) | st.lists(st.integers(0, 5)) | st.lists(st.integers(65_530, 65_550)))
def test_equal_keys_keep_their_order(keys):
    expected = sorted(range(len(keys)), key=keys.__getitem__)
    assert stable_order(np.array(keys, dtype=np.int64)).tolist() == expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_any_dtype(dtype):
    assert stable_order(np.array([70_000, 1, 70_000, 0], dtype=dtype)).tolist() == [3, 1, 0, 2]
