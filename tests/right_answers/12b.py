"""Right answers in another style than the solutions, that the checks of notebook 12b must accept."""

# %% 12.7 two masks
@triton.jit
def softmax_forward_kernel(x, y, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows_here = tl.program_id(axis=0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = (rows_here < rows)[:, None]
    columns_here = tl.arange(0, BLOCK)[None, :]
    mask = exists & (columns_here < columns)
    values = widen(tl.load(x + rows_here[:, None] * x_stride + columns_here, mask, other=float("-inf")))
    values = tl.where(exists, values, 0.0)
    values = values - tl.max(values, 1)[:, None]
    exponentials = tl.exp(values)
    share = exponentials / tl.sum(exponentials, 1)[:, None]
    tl.store(y + rows_here[:, None] * columns + columns_here, cast(share, y.dtype.element_ty), mask)

# %% 12.8 pointers that are named
@triton.jit
def norm_backward_kernel(
    dy, dsum, summed, weight, rstd, dx, parts, dy_stride, dsum_stride, summed_stride, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    there = columns < hidden
    scale = widen(tl.load(weight + columns, mask=there, other=0.0))[None, :]
    number = tl.program_id(0).to(tl.int64)
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in tl.range(number * ROWS, rows, ROWS * tl.num_programs(0), num_stages=STAGES):
        row = begin + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & there[None, :]
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)
        normed = inverse * widen(tl.load(summed + row * summed_stride + columns[None, :], mask=mask, other=0.0))
        gradient = widen(tl.load(dy + row * dy_stride + columns[None, :], mask=mask, other=0.0))
        weight_sum += gradient * normed
        scaled = gradient * scale
        mean = tl.sum(scaled * normed, axis=1)[:, None] / hidden
        result = inverse * (scaled - normed * mean)
        if dsum is not None:
            result += widen(tl.load(dsum + row * dsum_stride + columns[None, :], mask=mask, other=0.0))
        tl.store(dx + row * hidden + columns[None, :], cast(result, dx.dtype.element_ty), mask=mask)
    tl.store(parts + number * hidden + columns, tl.sum(weight_sum, axis=0), mask=there)

# %% 12.9 a maximum and a sum by their own names
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(axis=0).to(tl.int64)
    start_of_row = logits + row_stride * row
    wanted = tl.load(targets + row)
    valid = (wanted < vocab) & (wanted >= 0)
    wanted_logit = widen(tl.load(start_of_row + wanted, mask=valid, other=0.0))
    offsets = tl.arange(0, BLOCK)
    top, power_sum = -3.4028234663852886e38, 0.0
    for begin in range(0, vocab, BLOCK):
        tile = widen(tl.load(start_of_row + begin + offsets, mask=begin + offsets < vocab, other=float("-inf")))
        new_top = tl.maximum(tl.max(tile, 0), top)
        power_sum = power_sum * tl.exp(top - new_top) + tl.sum(tl.exp(tile - new_top), 0)
        top = new_top
    lse = tl.where(valid, tl.log(power_sum) + top, float("nan"))
    tl.store(losses + row, tl.where(wanted == ignore_index, 0.0, lse - wanted_logit))
    if GRADIENT:
        for begin in range(0, vocab, BLOCK):
            place = begin + offsets
            tile = widen(tl.load(start_of_row + place, mask=place < vocab, other=0.0))
            softmax = tl.exp(tile - lse)
            slope = tl.where(place == wanted, softmax - 1.0, softmax)
            slope = tl.where(wanted == ignore_index, 0.0, slope)
            tl.store(start_of_row + place, cast(slope, logits.dtype.element_ty), mask=place < vocab)

# %% 12.10 the corrections first
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
    done = tl.load(step).to(tl.float64)
    first_bias = (1.0 - tl.exp(logarithm(BETA1) * done)).to(tl.float32)
    second_bias = (1.0 - tl.exp(logarithm(BETA2) * done)).to(tl.float32)
    place = tl.program_id(axis=0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < numel
    gradient = widen(tl.load(grad + place, there))
    first = tl.load(exp_avg + place, there) * BETA1 + gradient * (1 - BETA1)
    second = tl.load(exp_avg_sq + place, there) * BETA2 + gradient * gradient * (1 - BETA2)
    tl.store(exp_avg + place, first, there)
    tl.store(exp_avg_sq + place, second, there)
    denominator = tl.sqrt(second) / tl.sqrt(second_bias) + eps
    value = tl.load(master + place, there) * keep - (lr / first_bias) * (first / denominator)
    tl.store(master + place, value, there)
    if weights is not None:
        tl.store(weights + place, cast(value, weights.dtype.element_ty), there)
