"""Wrong answers that the checks of notebook 12b must catch."""


# %% 12.7 padding of 0, as large as a logit
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=inside, other=0.0))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=inside)


# %% 12.7 the largest is not taken off
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=inside, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits)
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=inside)


# %% 12.7 the largest of all the program's rows is taken off
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=inside, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=inside)


# %% 12.7 rows of x side by side
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * columns + column, mask=inside, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=inside)


# %% 12.7 the store without a mask
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=inside, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty))


# %% 12.7 a load with the columns' mask alone
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    in_row = (row < rows + ROWS) & (column < columns)
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=in_row, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=inside)


# %% 12.7 programs one row apart
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=inside, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, cast(result, y.dtype.element_ty), mask=inside)


# %% 12.7 cut instead of rounded
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows. x: rows a stride apart; y: contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # times a stride it may pass 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    logits = widen(tl.load(x + row * x_stride + column, mask=inside, other=float("-inf")))
    logits = tl.where(row < rows, logits, 0.0)  # no row there: -inf - -inf would be NaN
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    result = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y + row * columns + column, result.to(y.dtype.element_ty), mask=inside)


# %% 12.7 fake: PyTorch behind a kernel's brackets
class Posing:
    """Launched like a kernel; the work is torch.softmax's."""

    def __getitem__(self, grid):
        return lambda x, y, x_stride, rows, columns, ROWS, BLOCK: y.copy_(torch.softmax(x, -1))


softmax_forward_kernel = Posing()


# %% 12.8 without the second term
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
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
        ds = r * g
        if dsum is not None:
            ds += widen(tl.load(dsum + row[:, None] * dsum_stride + column, mask=inside, other=0.0))
        tl.store(dx + row[:, None] * hidden + column, cast(ds, dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=column < hidden)


# %% 12.8 the mean over BLOCK
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
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
        ds = r * (g - n * (tl.sum(g * n, axis=1) / BLOCK)[:, None])
        if dsum is not None:
            ds += widen(tl.load(dsum + row[:, None] * dsum_stride + column, mask=inside, other=0.0))
        tl.store(dx + row[:, None] * hidden + column, cast(ds, dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=column < hidden)


# %% 12.8 dsum forgotten
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
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
            ds += 0.0
        tl.store(dx + row[:, None] * hidden + column, cast(ds, dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=column < hidden)


# %% 12.8 only program 0 stores its part of dw
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
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
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=(column < hidden) & (program == 0))


# %% 12.8 every program does all rows
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
    column = tl.arange(0, BLOCK)[None, :]
    w = widen(tl.load(weight + column, mask=column < hidden, other=0.0))
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for first in tl.range(0, rows, ROWS, num_stages=STAGES):
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


# %% 12.8 one block of rows a program
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
    column = tl.arange(0, BLOCK)[None, :]
    w = widen(tl.load(weight + column, mask=column < hidden, other=0.0))
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for first in tl.range(program * ROWS, program * ROWS + 1, ROWS, num_stages=STAGES):
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


# %% 12.8 one stride for all
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
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
            ds += widen(tl.load(dsum + row[:, None] * dy_stride + column, mask=inside, other=0.0))
        tl.store(dx + row[:, None] * hidden + column, cast(ds, dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=column < hidden)


# %% 12.8 cut instead of rounded
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every so-many-th ROWS rows of dx, and their part of dw. dy, dsum (or None), summed: rows a stride apart."""
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
        tl.store(dx + row[:, None] * hidden + column, ds.to(dx.dtype.element_ty), mask=inside)
        dw += upper * n
    column = tl.arange(0, BLOCK)
    tl.store(parts + program * hidden + column, tl.sum(dw, axis=0), mask=column < hidden)


# %% 12.8 fake: PyTorch behind a kernel's brackets
class Posing:
    """Launched like a kernel; the work is PyTorch's."""

    def __getitem__(self, grid):
        return self.work

    def work(self, dy, dsum, summed, weight, rstd, dx, parts, *sizes, **constants):
        n = summed.float() * rstd[:, None]
        g = dy.float() * weight
        ds = rstd[:, None] * (g - n * (g * n).mean(1, keepdim=True))
        dx.copy_(ds if dsum is None else ds + dsum)
        parts.zero_()
        parts[0] = (dy.float() * n).sum(0)


norm_backward_kernel = Posing()


# %% 12.9 the largest is not taken off
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = 0.0, 0.0
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, largest * 0.0
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 the old sum is not scaled
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 the largest starts at -inf
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = -float("inf"), 0.0
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 the target's logit is read after it was overwritten
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))


# %% 12.9 ignored rows keep a gradient
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 the gradient divided by the number of rows
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0) / tl.num_programs(0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 the store without a mask
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty))


# %% 12.9 a target that is no column is read unguarded
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target))
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 fake: PyTorch behind a kernel's brackets
class Posing:
    """Launched like a kernel; the work is F.cross_entropy's."""

    def __getitem__(self, grid):
        return self.work

    def work(self, logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT, BLOCK):
        exact = logits.float().requires_grad_()
        each = F.cross_entropy(exact, targets, reduction="none", ignore_index=ignore_index)
        losses.copy_(each.detach())
        if GRADIENT:
            logits.copy_(torch.autograd.grad(each.sum(), exact)[0])


cross_entropy_kernel = Posing()


# %% 12.9 the maximum begins at 0
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = 0.0, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 the maximum begins at -100
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = -100.0, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.9 takes -100 for ignore_index, whatever it is
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: its loss, and with GRADIENT softmax - onehot(target) in the place of its logits.

    The first loop keeps the largest logit so far and the sum of exp(logit - largest); where a block has a larger one,
    the old sum is scaled to it (Milakov and Gimelshein 2018, online softmax). A target that is no column makes the
    logsumexp NaN, and with it the loss and the gradient of the row; nothing outside of the row is read or written.
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != -100
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


# %% 12.10 the decay is part of the gradient
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    g += (1 - keep) / lr * w
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = w - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty), mask=inside)


# %% 12.10 eps inside the root
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr / correction1 * (m / tl.sqrt(v / correction2 + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty), mask=inside)


# %% 12.10 no correction for the first steps
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr * (m / (tl.sqrt(v) + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty), mask=inside)


# %% 12.10 the corrections in float32
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty), mask=inside)


# %% 12.10 the moments are not stored
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty), mask=inside)


# %% 12.10 a copy of the old master
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    before = w
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(before, weights.dtype.element_ty), mask=inside)


# %% 12.10 the gradient is not widened
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = tl.load(grad + offset, mask=inside)
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty), mask=inside)


# %% 12.10 the store of the copy without a mask
@triton.jit
def adamw_kernel(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,  # or None
    step,
    numel,
    lr,
    keep,  # 1 - lr * weight_decay
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step for BLOCK elements. step: one number in memory; the others [numel]."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    g = widen(tl.load(grad + offset, mask=inside))
    m = tl.load(exp_avg + offset, mask=inside)
    v = tl.load(exp_avg_sq + offset, mask=inside)
    w = tl.load(master + offset, mask=inside)
    t = tl.load(step).to(tl.float64)
    correction1 = (1 - tl.exp(t * logarithm(BETA1))).to(tl.float32)  # 1 - beta1^t
    correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    w = keep * w - lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps))
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    tl.store(master + offset, w, mask=inside)
    if weights is not None:
        tl.store(weights + offset, cast(w, weights.dtype.element_ty))


# %% 12.10 fake: PyTorch behind a kernel's brackets
class Posing:
    """Launched like a kernel; the work is PyTorch's."""

    def __getitem__(self, grid):
        return self.work

    def work(self, master, grad, exp_avg, exp_avg_sq, weights, step, numel, lr, keep, eps, BETA1, BETA2, BLOCK):
        exp_avg.lerp_(grad.float(), 1 - BETA1)
        exp_avg_sq.mul_(BETA2).addcmul_(grad.float(), grad.float(), value=1 - BETA2)
        corrected = exp_avg / (1 - BETA1**step), exp_avg_sq / (1 - BETA2**step)
        master.mul_(keep).sub_(lr * corrected[0] / (corrected[1].sqrt() + eps))
        if weights is not None:
            weights.copy_(master)


adamw_kernel = Posing()
