"""course_kit.gpu.operation_bytes: each operation's inputs and results are counted once, views are not. CPU or GPU."""

import torch

from course_kit.gpu.operation_bytes import BytesMoved, bytes_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


def test_operations_are_counted_in_order_by_what_they_read_and_write():
    x, w = ones(4, 8, dtype=torch.bfloat16), ones(8, 16, dtype=torch.bfloat16)
    with BytesMoved() as moved:
        y = torch.mm(x, w)
        y += 1
        y.float()
        torch.stack([y, y + y])
    n = y.nbytes
    assert (
        moved.rows
        == [
            ("aten::mm", x.nbytes + w.nbytes, n),
            ("aten::add_.Tensor", n, n),
            ("aten::_to_copy", n, 2 * n),
            ("aten::add.Tensor", n, n),  # what goes in twice is read once
            ("aten::stack", 2 * n, 2 * n),
        ]
        or moved.rows[4:] == [("aten::cat", 2 * n, 2 * n)]
    )
    assert moved.total == sum(read + written for _, read, written in moved.rows)


def test_views_move_nothing_and_nothing_outside_is_seen():
    x = ones(4, 6)
    x + 1
    with BytesMoved() as moved:
        x.t()[1:3].unsqueeze(0).expand(5, 2, 4).transpose(0, 1)
        x.view(2, 12).unflatten(1, (3, 4)).unbind(0)
        x.detach()
    x + 1
    assert moved.rows == [] and moved.total == 0
    with BytesMoved() as moved:
        x.t().contiguous()
    assert moved.total == 2 * x.nbytes


def test_of_an_expanded_tensor_what_is_there_is_counted():
    x = ones(1, 6)
    assert bytes_of(x.expand(100, 6)) == x.nbytes and bytes_of(x[:, :2]) == 8
    assert bytes_of({"a": [x, 3, None], "b": (x, ones(2))}) == x.nbytes + 8
    with BytesMoved() as moved:
        x.expand(100, 6) + 1
    assert moved.rows == [("aten::add.Tensor", x.nbytes, 100 * x.nbytes)]


def test_results_of_several_tensors_count_whole():
    x = ones(3, 5)
    with BytesMoved() as moved:
        values, places = x.max(1)
    assert moved.total == x.nbytes + values.nbytes + places.nbytes == 60 + 12 + 24


def test_backward_is_seen():
    x, w = ones(4, 8), ones(8, 2).requires_grad_()
    out = x @ w
    with BytesMoved() as moved:
        out.backward(ones(4, 2))
    products = [row for row in moved.rows if row[0] == "aten::mm"]
    assert products == [("aten::mm", x.nbytes + out.nbytes, w.nbytes)]
