"""course_lib.kernels.rows: a program's share of rows fits its registers and is wide enough to load. CPU."""

import pytest
import torch

from course_lib.kernels.rows import BLOCK_OF_LONG_ROW, LONGEST_BLOCK, as_rows, shape_of_work

COLUMNS = [*range(1, 70), 127, 128, 129, 511, 512, 513, 1023, 1024, 1025, 4096, 5000, 8192, 16383, 16384, 16385, 10**6]


def test_a_program_has_whole_rows_or_a_block_of_one():
    for columns in COLUMNS:
        rows, block, num_warps = shape_of_work(columns)
        elements, threads = rows * block, 32 * num_warps
        assert all(number & (number - 1) == 0 for number in (rows, block, num_warps)), columns  # as Triton wants them
        assert 4 <= num_warps <= 32 and 8 <= elements // threads <= 32, columns
        if columns <= LONGEST_BLOCK:
            assert columns <= block < 2 * columns and (rows == 1 or elements == 1024), columns
        else:
            assert (rows, block) == (1, BLOCK_OF_LONG_ROW)


def test_longer_rows_get_no_fewer_warps():
    warps = [shape_of_work(columns)[2] for columns in COLUMNS if columns <= LONGEST_BLOCK]
    assert warps == sorted(warps) and warps[-1] == 32


@pytest.mark.parametrize(
    "view, copied",
    [
        (lambda x: x, False),
        (lambda x: x[:, 1:3], True),  # two strides between rows
        (lambda x: x[1], False),
        (lambda x: x[..., 1:4], False),
        (lambda x: x[0, :, :5], False),
        (lambda x: x[..., ::2], True),
        (lambda x: x.transpose(0, 1), True),
        (lambda x: x.transpose(1, 2), True),
        (lambda x: x[1, 2], False),
        (lambda x: x[:1, :1].expand(3, 4, 6), False),  # all rows are one
    ],
)
def test_rows_are_views_where_strides_allow(view, copied):
    x = view(torch.arange(72.0).view(3, 4, 6))
    rows = as_rows(x)
    assert rows.shape == (x.numel() // x.shape[-1], x.shape[-1]) and rows.stride(1) == 1
    assert torch.equal(rows.reshape(-1), x.reshape(-1))
    assert (rows.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()) == copied
