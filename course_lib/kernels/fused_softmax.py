"""Softmax over rows, in one kernel each way.

    m = max_j x_j        y_i = exp(x_i - m) / Σ_j exp(x_j - m)            dx_i = y_i (dy_i - Σ_j dy_j y_j)

Written with PyTorch's operators it takes five passes over n = rows x columns elements: the maximum (n read), the
difference (n read, n written), its exponential (2 n), their sum (n), the quotient (2 n), in all 8 n. A row that fits in
the registers of one program is read once and written once: 2 n forward, and 3 n backward (y, dy -> dx). Kept for
backward: y alone.

A longer row needs two passes, not three. While blocks are read, the running maximum m may grow to m'; the running sum
is then rescaled (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"):

    sum' = sum exp(m - m') + Σ_(j in block) exp(x_j - m')

The second pass reads the row again, from L2 if it fits, and writes y. FlashAttention is this sum, followed by a matmul.
The arithmetic is float32, rounded at the store.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from course_lib.kernels.rounding import cast, widen
from course_lib.kernels.rows import as_rows, shape_of_work

SOFTMAX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the last dimension. x: [..., columns], any strides; the result is contiguous.

    The result has x's dtype, or float32 under a GPU's autocast, both as in F.softmax: the kernel stores that dtype
    directly, without a pass for the cast. A row of -inf, or one with inf or NaN, becomes NaN. If rows are not
    contiguous or not one stride apart, a copy is made first. Raises ValueError unless x has a dimension and is float32,
    bfloat16 or float16.
    """
    if x.dim() == 0 or x.dtype not in SOFTMAX_DTYPES:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}: expected float32, bfloat16 or float16 [..., columns]")
    autocast = x.is_cuda and torch.is_autocast_enabled("cuda")
    return softmax_forward(x, torch.float32 if autocast else x.dtype)


# exercise 12.7
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the softmax of ROWS full rows per program to y, computed in float32.

    x: [rows, columns], rows `x_stride` apart; y: [rows, columns], contiguous. BLOCK is at least `columns`, and a power
    of 2; the last program may have fewer than ROWS rows.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=inside, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=inside)


@triton.jit
def softmax_long_forward_kernel(x, y, x_stride, columns, BLOCK: tl.constexpr):
    """Compute one row, in blocks: first its maximum and its sum, then y."""
    row = tl.program_id(0).to(tl.int64)
    highest = tl.max(tl.full([BLOCK], float("-inf"), tl.float32), axis=0)
    total = tl.zeros([BLOCK], tl.float32)  # a sum for each lane, so that a block costs one reduction and not two
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logits = widen(tl.load(x + row * x_stride + column, mask=column < columns, other=float("-inf")))
        higher = tl.maximum(highest, tl.max(logits, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # only -inf so far: exp(-inf - 0) is 0, not NaN
        total = total * tl.exp(highest - base) + tl.exp(logits - base)
        highest = higher
    scale = 1 / tl.sum(total, axis=0)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logits = widen(tl.load(x + row * x_stride + column, mask=column < columns, other=float("-inf")))
        result = tl.exp(logits - highest) * scale
        tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=column < columns)


@triton.jit
def softmax_backward_kernel(dy, y, dx, dy_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute dx of ROWS full rows. dy: rows a stride apart; y, dx: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    probabilities = widen(tl.load(y + row * columns + column, mask=inside, other=0.0))
    upper = widen(tl.load(dy + row * dy_stride + column, mask=inside, other=0.0))
    gradient = probabilities * (upper - tl.sum(upper * probabilities, axis=1)[:, None])
    tl.store(dx + row * columns + column, cast(gradient, dx.dtype.element_ty), mask=inside)


@triton.jit
def softmax_long_backward_kernel(dy, y, dx, dy_stride, columns, BLOCK: tl.constexpr):
    """Compute dx of one row, in blocks: first the sum of dy y, then dx."""
    row = tl.program_id(0).to(tl.int64)
    partial_sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        probabilities = widen(tl.load(y + row * columns + column, mask=column < columns, other=0.0))
        partial_sums += probabilities * widen(tl.load(dy + row * dy_stride + column, mask=column < columns, other=0.0))
    total = tl.sum(partial_sums, axis=0)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        probabilities = widen(tl.load(y + row * columns + column, mask=column < columns, other=0.0))
        upper = widen(tl.load(dy + row * dy_stride + column, mask=column < columns, other=0.0))
        gradient = cast(probabilities * (upper - total), dx.dtype.element_ty)
        tl.store(dx + row * columns + column, gradient, mask=column < columns)


@torch.library.custom_op("course::softmax", mutates_args=())
def softmax_forward(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the softmax of x: [..., columns], as `dtype`."""
    y = x.new_empty(x.shape, dtype=dtype)
    if y.numel() == 0:
        return y
    x = as_rows(x)
    rows, columns = x.shape
    tile, block, num_warps = shape_of_work(columns)
    if block < columns:
        with torch.cuda.device_of(x):
            softmax_long_forward_kernel[(rows,)](x, y, x.stride(0), columns, BLOCK=block, num_warps=num_warps)
    else:
        sizes = {"ROWS": tile, "BLOCK": block, "num_warps": num_warps}
        with torch.cuda.device_of(x):
            softmax_forward_kernel[(triton.cdiv(rows, tile),)](x, y, x.stride(0), rows, columns, **sizes)
    return y


@torch.library.custom_op("course::softmax_backward", mutates_args=())
def softmax_backward(dy: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return dx as `dtype`, the dtype of x."""
    dx = y.new_empty(y.shape, dtype=dtype)
    if dx.numel() == 0:
        return dx
    dy, y = as_rows(dy), as_rows(y)
    rows, columns = y.shape
    tile, block, num_warps = shape_of_work(columns)
    if block < columns:
        with torch.cuda.device_of(y):
            softmax_long_backward_kernel[(rows,)](dy, y, dx, dy.stride(0), columns, BLOCK=block, num_warps=num_warps)
    else:
        sizes = {"ROWS": tile, "BLOCK": block, "num_warps": num_warps}
        with torch.cuda.device_of(y):
            softmax_backward_kernel[(triton.cdiv(rows, tile),)](dy, y, dx, dy.stride(0), rows, columns, **sizes)
    return dx


@softmax_forward.register_fake
def _(x, dtype):
    return x.new_empty(x.shape, dtype=dtype)


@softmax_backward.register_fake
def _(dy, y, dtype):
    return y.new_empty(y.shape, dtype=dtype)


def keep_softmax(ctx, inputs, output):
    """Save for backward: the result, and the dtype of x."""
    x, dtype = inputs
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(output)


def softmax_gradient(ctx, dy):
    return softmax_backward(dy, *ctx.saved_tensors, ctx.x_dtype), None


softmax_forward.register_autograd(softmax_gradient, setup_context=keep_softmax)
