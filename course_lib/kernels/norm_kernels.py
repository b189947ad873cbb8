"""The kernels of RMSNorm: rows that fit in a program's registers, rows that do not, and the sum of the parts of dw.

    s = x + residual        r = 1 / sqrt(mean(s²) + eps)        y_i = s_i r w_i

    with n = s r and g = dy w:      ds_i = r (g_i - n_i mean(g n)) + (the gradient of s itself)        dw = Σ_rows dy n

Forward, a program loads its rows, and everything up to the last store happens in registers. Backward, the gradient of a
row needs a sum over the row, and the weight's a sum over all rows. So few programs run, each over many rows: a program
sums its share of dw in registers and stores it once, and while it works on one row the next one is copied to shared
memory (num_stages=2).

A long row (see `rows`) is processed in blocks, twice: once for the sum, once for the result, the second time from L2.
dw would not fit in registers either: a program accumulates its share in memory, row by row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from course_lib.kernels.rounding import cast, widen


@triton.jit
def load_sum(x, residual, x_index, residual_index, inside, dtype: tl.constexpr):
    """Load x + residual as float32, rounded to `dtype` on the way; x alone if residual is None."""
    s = widen(tl.load(x + x_index, mask=inside, other=0.0))
    if residual is not None:
        s = widen(cast(s + widen(tl.load(residual + residual_index, mask=inside, other=0.0)), dtype))
    return s


@triton.jit
def norm_forward_kernel(
    x, residual, weight, y, summed, rstd, x_stride, residual_stride, rows, hidden, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS full rows. x, residual: rows a stride apart; y, summed: contiguous. residual and summed may be
    None.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # times a stride it may exceed 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < hidden)
    index = row[:, None] * hidden + column
    sum_dtype: tl.constexpr = x.dtype.element_ty if summed is None else summed.dtype.element_ty
    x_index, residual_index = row[:, None] * x_stride + column, row[:, None] * residual_stride + column
    s = load_sum(x, residual, x_index, residual_index, inside, sum_dtype)
    if summed is not None:
        tl.store(summed + index, cast(s, sum_dtype), mask=inside)
    w = widen(tl.load(weight + column, mask=column < hidden, other=0.0))  # loaded while the rows are summed
    r = tl.rsqrt(tl.sum(s * s, axis=1) / hidden + eps)
    tl.store(rstd + row, r, mask=row < rows)
    tl.store(y + index, cast(s * r[:, None] * w, y.dtype.element_ty), mask=inside)


# exercise 12.8
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write this program's blocks of ROWS rows of dx, and its row of parts: their share of dw.

    dy, dsum (or None), summed: [rows, hidden], rows a stride apart; rstd: [rows], float32; dx: [rows, hidden] and
    parts: [programs, hidden], contiguous. A program without rows writes zeros to its row of parts.
    """
    column = tl.arange(0, BLOCK)[None, :]
    w = widen(tl.load(weight + column, mask=column < hidden, other=0.0))
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < hidden)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        n = widen(tl.load(summed + row[:, None] * summed_stride + column, mask=inside, other=0.0)) * r
        upper = widen(tl.load(dy + row[:, None] * dy_stride + column, mask=inside, other=0.0))
        g = upper * w
        ds = r * (g - n * (tl.sum(g * n, axis=1) / hidden)[:, None])
        if dsum is not None:
            ds += widen(tl.load(dsum + row[:, None] * dsum_stride + column, mask=inside, other=0.0))
        tl.store(dx + row[:, None] * hidden + column, cast(ds, dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=column < hidden)


@triton.jit
def long_norm_forward_kernel(
    x, residual, weight, y, summed, rstd, x_stride, residual_stride, hidden, eps, BLOCK: tl.constexpr
):
    """Normalize one row, in blocks: first the mean of the squares, then y. Arguments as norm_forward_kernel's."""
    row = tl.program_id(0).to(tl.int64)
    sum_dtype: tl.constexpr = x.dtype.element_ty if summed is None else summed.dtype.element_ty
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden
        s = load_sum(x, residual, row * x_stride + column, row * residual_stride + column, inside, sum_dtype)
        squares += s * s
    r = tl.rsqrt(tl.sum(squares, axis=0) / hidden + eps)
    tl.store(rstd + row, r)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden
        s = load_sum(x, residual, row * x_stride + column, row * residual_stride + column, inside, sum_dtype)
        if summed is not None:
            tl.store(summed + row * hidden + column, cast(s, sum_dtype), mask=inside)
        w = widen(tl.load(weight + column, mask=inside, other=0.0))
        tl.store(y + row * hidden + column, cast(s * r * w, y.dtype.element_ty), mask=inside)


@triton.jit
def long_norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden, BLOCK: tl.constexpr
):
    """Run norm_backward_kernel with a row in blocks: dw does not fit in registers, so it is summed in memory."""
    program = tl.program_id(0).to(tl.int64)
    for row in range(program, rows, tl.num_programs(0)):
        r = tl.load(rstd + row)
        partial_sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, hidden, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < hidden
            n = widen(tl.load(summed + row * summed_stride + column, mask=inside, other=0.0)) * r
            w = widen(tl.load(weight + column, mask=inside, other=0.0))
            partial_sums += widen(tl.load(dy + row * dy_stride + column, mask=inside, other=0.0)) * w * n
        mean = tl.sum(partial_sums, axis=0) / hidden
        for start in range(0, hidden, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < hidden
            n = widen(tl.load(summed + row * summed_stride + column, mask=inside, other=0.0)) * r
            w = widen(tl.load(weight + column, mask=inside, other=0.0))
            upper = widen(tl.load(dy + row * dy_stride + column, mask=inside, other=0.0))
            ds = r * (upper * w - n * mean)
            if dsum is not None:
                ds += widen(tl.load(dsum + row * dsum_stride + column, mask=inside, other=0.0))
            tl.store(dx + row * hidden + column, cast(ds, dx.dtype.element_ty), mask=inside)
            part = parts + program * hidden + column
            tl.store(part, tl.load(part, mask=inside, other=0.0) + upper * n, mask=inside)
        tl.debug_barrier()  # the next row adds to values that other threads of this program may have stored


@triton.jit
def add_parts_kernel(parts, dweight, programs, hidden, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK elements of dw: the sum of `programs` rows. parts: [programs, h] float32; dweight: [h]."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(parts + row * hidden + column, mask=(row < programs) & (column < hidden), other=0.0)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dweight + column, cast(tl.sum(total, axis=0), dweight.dtype.element_ty), mask=column < hidden)
