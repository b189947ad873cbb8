"""Wrong answers that the checks of notebook 12b must catch."""

# %% 12.7 padding of 0, as large as a logit
float("-inf") => 0.0

# %% 12.7 the largest is not taken off
logits - tl.max(logits, axis=1)[:, None] => logits

# %% 12.7 the largest of all the program's rows is taken off
(logits, axis=1)[:, None] => (tl.max(logits, axis=1), axis=0)

# %% 12.7 rows of x side by side
* x_stride => * columns

# %% 12.7 the store without a mask
(result, y.dtype.element_ty), mask=inside => (result, y.dtype.element_ty)

# %% 12.7 a load with the columns' mask alone
column = tl.arange(0, BLOCK)[None, :]
=>
column = tl.arange(0, BLOCK)[None, :]
in_row = (row < rows + ROWS) & (column < columns)
---
inside, other => in_row, other

# %% 12.7 programs one row apart
(tl.int64) * ROWS + tl.arange => (tl.int64) + tl.arange

# %% 12.7 cut instead of rounded
cast(result, y.dtype.element_ty) => result.to(y.dtype.element_ty)

# %% 12.7 fake: PyTorch behind a kernel's brackets
class softmax_forward_kernel:
    def __class_getitem__(cls, grid):
        return lambda x, y, x_stride, rows, columns, ROWS, BLOCK: y.copy_(torch.softmax(x, -1))

# %% 12.8 without the second term
ds = r * (g - n * (tl.sum(g * n, axis=1) / hidden)[:, None])
=>
ds = r * g

# %% 12.8 the mean over BLOCK
(g * n, axis=1) / hidden => (g * n, axis=1) / BLOCK

# %% 12.8 dsum forgotten
ds += widen(tl.load(dsum + row[:, None] * dsum_stride + column, mask=inside, other=0.0))
=>
ds += 0.0

# %% 12.8 only program 0 stores its part of dw
(dw, axis=0), mask=column < hidden => (dw, axis=0), mask=(column < hidden) & (program == 0)

# %% 12.8 every program does all rows
program * ROWS, rows, tl.num_programs(0) * ROWS => 0, rows, ROWS

# %% 12.8 one block of rows a program
rows, tl.num_programs(0) * ROWS => program * ROWS + 1, ROWS

# %% 12.8 one stride for all
* dsum_stride => * dy_stride

# %% 12.8 cut instead of rounded
cast(ds, dx.dtype.element_ty) => ds.to(dx.dtype.element_ty)

# %% 12.8 fake: PyTorch behind a kernel's brackets
class norm_backward_kernel:
    def __class_getitem__(cls, grid):
        return cls.work

    @staticmethod
    def work(dy, dsum, summed, weight, rstd, dx, parts, *sizes, **constants):
        n = summed.float() * rstd[:, None]
        g = dy.float() * weight
        ds = rstd[:, None] * (g - n * (g * n).mean(1, keepdim=True))
        dx.copy_(ds if dsum is None else ds + dsum)
        parts.zero_()
        parts[0] = (dy.float() * n).sum(0)

# %% 12.9 the largest is not taken off
largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
=>
largest, total = 0.0, 0.0
---
tl.maximum(largest, tl.max(block, 0)) => largest * 0.0

# %% 12.9 the old sum is not scaled
total * tl.exp(before - largest) + tl.sum => total + tl.sum

# %% 12.9 the largest starts at -inf
largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
=>
largest, total = -float("inf"), 0.0

# %% 12.9 the target's logit is read after it was overwritten
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
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
gradient = tl.where(counted, gradient, 0.0) =>

# %% 12.9 the gradient divided by the number of rows
(counted, gradient, 0.0) => (counted, gradient, 0.0) / tl.num_programs(0)

# %% 12.9 the store without a mask
(gradient, logits.dtype.element_ty), mask=inside => (gradient, logits.dtype.element_ty)

# %% 12.9 a target that is no column is read unguarded
target, mask=is_column, other=0.0 => target

# %% 12.9 fake: PyTorch behind a kernel's brackets
class cross_entropy_kernel:
    def __class_getitem__(cls, grid):
        return cls.work

    @staticmethod
    def work(logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT, BLOCK):
        exact = logits.float().requires_grad_()
        each = nn.functional.cross_entropy(exact, targets, reduction="none", ignore_index=ignore_index)
        losses.copy_(each.detach())
        if GRADIENT:
            logits.copy_(torch.autograd.grad(each.sum(), exact)[0])

# %% 12.9 the maximum begins at 0
-3.4028234663852886e38 => 0.0

# %% 12.9 the maximum begins at -100
3.4028234663852886e38 => 100.0

# %% 12.9 takes -100 for ignore_index, whatever it is
counted = target != ignore_index => counted = target != -100

# %% 12.10 the decay is part of the gradient
correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
=>
correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
g += (1 - keep) / lr * w
---
w = keep * w => w = w

# %% 12.10 eps inside the root
(tl.sqrt(v) / tl.sqrt(correction2) + eps) => tl.sqrt(v / correction2 + eps)

# %% 12.10 no correction for the first steps
lr / correction1 * (m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)) => lr * (m / (tl.sqrt(v) + eps))

# %% 12.10 the corrections in float32
t = tl.load(step).to(tl.float64) => t = tl.load(step)

# %% 12.10 the moments are not stored
tl.store(exp_avg + offset, m, mask=inside)
tl.store(exp_avg_sq + offset, v, mask=inside)
=>

# %% 12.10 a copy of the old master
correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
=>
correction2 = (1 - tl.exp(t * logarithm(BETA2))).to(tl.float32)
before = w
---
w, weights.dtype.element_ty => before, weights.dtype.element_ty

# %% 12.10 the gradient is not widened
widen(tl.load(grad + offset, mask=inside)) => tl.load(grad + offset, mask=inside)

# %% 12.10 the store of the copy without a mask
(w, weights.dtype.element_ty), mask=inside => (w, weights.dtype.element_ty)

# %% 12.10 fake: PyTorch behind a kernel's brackets
class adamw_kernel:
    def __class_getitem__(cls, grid):
        return cls.work

    @staticmethod
    def work(master, grad, exp_avg, exp_avg_sq, weights, step, numel, lr, keep, eps, BETA1, BETA2, BLOCK):
        exp_avg.lerp_(grad.float(), 1 - BETA1)
        exp_avg_sq.mul_(BETA2).addcmul_(grad.float(), grad.float(), value=1 - BETA2)
        corrected = exp_avg / (1 - BETA1**step), exp_avg_sq / (1 - BETA2**step)
        master.mul_(keep).sub_(lr * corrected[0] / (corrected[1].sqrt() + eps))
        if weights is not None:
            weights.copy_(master)

# %% 12.7 offsets in 32 bits
tl.program_id(0).to(tl.int64) * ROWS => tl.program_id(0) * ROWS

# %% 12.7 padding is whatever a GPU loads
mask=inside, other=float("-inf") => mask=inside

# %% 12.7 padding of -1,000
other=float("-inf") => other=-1e3

# %% 12.8 offsets in 32 bits
tl.program_id(0).to(tl.int64) => tl.program_id(0)

# %% 12.8 rows past the end are whatever a GPU loads
rstd + row, mask=row < rows, other=0.0 => rstd + row, mask=row < rows

# %% 12.8 columns past the end are whatever a GPU loads
weight + column, mask=column < hidden, other=0.0 => weight + column, mask=column < hidden

# %% 12.9 offsets in 32 bits
row = tl.program_id(0).to(tl.int64) => row = tl.program_id(0)

# %% 12.9 the maximum begins at -10,000
largest, total = -3.4028234663852886e38, 0.0 => largest, total = -1e4, 0.0

# %% 12.9 the maximum in a loop of its own
    before, largest = largest, tl.maximum(largest, tl.max(block, 0))
    total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
=>
    largest = tl.maximum(largest, tl.max(block, 0))
for start in range(0, vocab, BLOCK):
    inside = start + columns < vocab
    block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
    total += tl.sum(tl.exp(block - largest), 0)

# %% 12.10 offsets in 32 bits
tl.program_id(0).to(tl.int64) => tl.program_id(0)

# %% 12.10 a copy in bfloat16, whatever its dtype
cast(w, weights.dtype.element_ty), mask=inside => cast(w, tl.bfloat16), mask=inside

# %% 12.9 a target that is no column has a loss
tl.where(is_column, largest + tl.log(total), float("nan")) => largest + tl.log(total)
