import pytest
import torch

from tuning.kernels._launch import as_rows, can_launch, device_guard, like_rows, num_programs, num_warps, row_order

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "sliced": lambda x: x[..., 1:5],
    "strided": lambda x: x[..., ::2],
    "last dimension first in memory": lambda x: x.transpose(0, 2),
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "one row": lambda x: x[0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_and_back(layout):
    x = layout(torch.arange(4 * 3 * 6).reshape(4, 3, 6).float())
    order = row_order(x)
    rows = as_rows(x, order)
    assert rows.dim() == 2
    assert rows.stride(1) == 1 or rows.shape[1] == 1
    assert torch.equal(like_rows(rows.contiguous(), x.shape, order), x)


@pytest.mark.parametrize(("layout", "copied"), [("contiguous", False), ("transposed", False), ("sliced", False),
                                               ("strided", True)])  # fmt: skip
def test_no_copy_where_a_view_exists(layout, copied):
    x = LAYOUTS[layout](torch.arange(4 * 3 * 6).reshape(4, 3, 6).float())
    assert (as_rows(x, row_order(x)).data_ptr() != x.data_ptr()) == copied


def test_rows_in_the_order_of_another_tensor():
    x, grad = torch.randn(3, 4, 6).transpose(0, 1), torch.randn(4, 3, 6)
    order = row_order(x)
    assert torch.equal(as_rows(x, order)[1], x[1, 0])
    assert torch.equal(as_rows(grad, order)[1], grad[1, 0])


def test_warps_are_a_power_of_two_within_the_hardwares_limits():
    assert [num_warps(n, 16) for n in (1, 512, 4096, 5000, 10**6)] == [1, 1, 8, 16, 32]


def test_where_kernels_run(device):
    assert can_launch(torch.ones(1, device=device))
    assert not can_launch(torch.ones(1, device=device, dtype=torch.float64))
    with device_guard(torch.ones(1, device=device)):
        assert num_programs(torch.ones(1, device=device), 1) > 1
