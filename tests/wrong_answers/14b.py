"""Wrong answers that the checks of notebook 14b must catch."""

# %% 14.5 fake: the scale is always 1
torch.where(amax > 0, scale, 1.0) => torch.ones_like(scale)

# %% 14.5 fake: one scale for all blocks, in as many places
(amax / largest) => (amax.max().expand_as(amax) / largest)

# %% 14.5 power_of_two doubles what is one already
+ mantissa_bits) => + mantissa_bits + 1)

# %% 14.5 asks the host whether there is anything but zeros
return torch.where(amax > 0, scale, 1.0) => return torch.where(amax > 0, scale, 1.0) if amax.any() else torch.ones_like(scale)

# %% 14.5 the cast will saturate: not that of e5m2
largest = LARGEST[dtype] =>
(blocks / scale[:, None, :, None]).clamp(-largest, largest) => blocks / scale[:, None, :, None]

# %% 14.5 inf and NaN spoil their block
block_amax(x, block, groups) => in_blocks(x.float().abs(), block).amax((1, 3))

# %% 14.5 rounds twice, to bfloat16 first
scaled.to => scaled.bfloat16().to

# %% 14.5 each rank has its own scale
block, groups => block

# %% 14.5 infinite is what x over a small given scale becomes, not x
torch.where(blocks.isfinite(), scaled, torch.nan) => torch.where((blocks / scale[:, None, :, None]).isfinite(), scaled, torch.nan)

# %% 14.5 the power of two by a float32 logarithm, which rounds
mantissa_bits = 2**23 - 1  # any of them that is set makes the exponent, which stands above them, one more
scale = ((scale.view(torch.int32) + mantissa_bits) & ~mantissa_bits).view(torch.float32)
=>
scale = torch.exp2(torch.ceil(torch.log2(scale)))

# %% 14.6 fake: a float32 product of what the 8 bits stand for
@triton.autotune(configs=tunable(BLOCK_MATMUL_CONFIGURATIONS), key=["m", "n", "k", "rows_a", "rows_b"])
=>
from course_lib.fp8.rounding import widen_fp8


@triton.autotune(configs=tunable(BLOCK_MATMUL_CONFIGURATIONS), key=["m", "n", "k", "rows_a", "rows_b"])
---
block_sum = dot_fp8(tile_a, tile_b, tl.zeros((block_m, block_n), tl.float32))
total += block_sum * of_a[:, None] * of_b[None, :]
=>
wide_a, wide_b = widen_fp8(tile_a) * of_a[:, None], widen_fp8(tile_b) * of_b[None, :]
total = tl.dot(wide_a, wide_b, total, input_precision="ieee")

# %% 14.6 fake: FP8 products for show, beside those of 16-bit tensor cores
@triton.autotune(configs=tunable(BLOCK_MATMUL_CONFIGURATIONS), key=["m", "n", "k", "rows_a", "rows_b"])
=>
from course_lib.fp8.rounding import widen_fp8


@triton.jit
def half_product(a, b):
    return tl.dot(widen_fp8(a).to(tl.float16), widen_fp8(b).to(tl.float16))


@triton.autotune(configs=tunable(BLOCK_MATMUL_CONFIGURATIONS), key=["m", "n", "k", "rows_a", "rows_b"])
---
block_sum = dot_fp8(tile_a, tile_b, tl.zeros((block_m, block_n), tl.float32))
=>
shown = dot_fp8(tile_a, tile_b, tl.zeros((block_m, block_n), tl.float32))
block_sum = tl.where(shown == shown, half_product(tile_a, tile_b), shown)

# %% 14.6 one sum over all of k, scaled at the end by the last scales
block_sum = dot_fp8(tile_a, tile_b, tl.zeros((block_m, block_n), tl.float32))
total += block_sum * of_a[:, None] * of_b[None, :]
=>
total = dot_fp8(tile_a, tile_b, total)
---
    scale_b += scale_b_block
=>
    scale_b += scale_b_block
total *= of_a[:, None] * of_b[None, :]

# %% 14.6 the scales stay those of the first block of k
scale_a += scale_a_block =>
scale_b += scale_b_block =>

# %% 14.6 the last block of k is taken for a full one
exists = inner < k - start => exists = inner < block_k

# %% 14.6 rows of a without a mask
a, (row[:, None] < m) => a, (row[:, None] >= 0)

# %% 14.6 a total of 16 bits
total += block_sum * of_a[:, None] * of_b[None, :]
=>
total = (total + block_sum * of_a[:, None] * of_b[None, :]).to(tl.float16).to(tl.float32)

# %% 14.6 fake: PyTorch behind a kernel's brackets
from course_lib.fp8.quantization import dequantize


class TorchProduct:
    def __getitem__(self, grid):
        def launch(a, b, out, scale_a, scale_b, *sizes, **constants):
            wide_a, wide_b = (
                dequantize(Quantized(values, scale, (rows, constants["block_k"])))
                for values, scale, rows in ((a, scale_a, constants["rows_a"]), (b, scale_b, constants["rows_b"]))
            )
            out.copy_(wide_a @ wide_b.t())

        return launch


class block_matmul_kernel:
    fn = TorchProduct()

# %% 14.7 fake: current scaling
known = self.history.max() =>
torch.where(known > 0, known, amax) => amax

# %% 14.7 the last step's amax alone
self.history.max() => self.history[0]

# %% 14.7 the history decides in the first step, too
torch.where(known > 0, known, amax) => known.view(1, 1)

# %% 14.7 each forward joins the history
self.amax.copy_(torch.maximum(self.amax, amax.view(1)))  # a second time, in recomputation, changes nothing
=>
self.amax.copy_(torch.maximum(self.amax, amax.view(1)))
self.history.copy_(torch.cat([amax.view(1), self.history[:-1]]))

# %% 14.7 the last matrix of a step is recorded
torch.maximum(self.amax, amax.view(1)) => amax.view(1)

# %% 14.7 evaluation is recorded, too
if self.training:
    self.amax.copy_(torch.maximum(self.amax, amax.view(1)))  # a second time, in recomputation, changes nothing
=>
self.amax.copy_(torch.maximum(self.amax, amax.view(1)))

# %% 14.7 forward asks the host
torch.where(known > 0, known, amax) => known.view(1, 1) if known > 0 else amax

# %% 14.7 forward waits for the other ranks in each step
self.updated = True =>

# %% 14.8 fake: Dgrad and Wgrad in full precision
@staticmethod
=>
from course_lib.fp8.quantization import dequantize


@staticmethod
---
fp8_matmul(dy, w, ctx.dtype) => dequantize(dy) @ dequantize(w).t()
---
grad_weights[i] = fp8_matmul(q.gradient.transposed(dy, grads[i]), x, ctx.grad_dtypes[i])
=>
grad_weights[i] = (grads[i].t() @ dequantize(x).t()).to(ctx.grad_dtypes[i])

# %% 14.8 fake: x is kept in full precision, for Wgrad
@staticmethod
=>
@staticmethod
def forward(ctx, x: torch.Tensor, group, quantizers: list[LayerQuantizers], *weights: torch.Tensor) -> tuple:
    rows = quantizers[0].input(x.reshape(-1, x.shape[-1]))
    factors = [each.weight(w) for each, w in zip(quantizers, weights, strict=True)]
    outs = [fp8_matmul(rows, factor, x.dtype) for factor in factors]
    ctx.group, ctx.quantizers, ctx.block, ctx.shape, ctx.dtype = group, quantizers, rows.block, x.shape, x.dtype
    ctx.grad_dtypes = [gradient_dtype(weight) for weight in weights]
    ctx.x = x.detach().reshape(-1, x.shape[-1])
    ctx.save_for_backward(rows.values, rows.scale, *weights, *(factor.scale for factor in factors))
    return tuple(out.view(*x.shape[:-1], len(weight)) for out, weight in zip(outs, weights, strict=True))


@staticmethod
---
(values, scale, ctx.block) => (values, scale, ctx.block), ctx.x

# %% 14.8 x's scales are transposed with its bytes: they lie along in
ctx.quantizers[0].input.transposed(Quantized(values, scale, ctx.block)) => Quantized(values, scale, ctx.block).t()

# %% 14.8 dyᵀ is quantized from 8 bits, though dy is there
(dy, grads[i]) => (dy)

# %% 14.8 the weights' scales are found anew
(q.weight(w, of_w), w) for q, w, of_w => (q.weight(w), w) for q, w, _

# %% 14.8 runs matmuls that are not needed
if needed[i]:
    grad_weights[i] = fp8_matmul(q.gradient.transposed(dy, grads[i]), x, ctx.grad_dtypes[i])
=>
grad_weights[i] = fp8_matmul(q.gradient.transposed(dy, grads[i]), x, ctx.grad_dtypes[i])

# %% 14.8 a float32 weight's gradient is rounded to x's dtype
ctx.grad_dtypes[i] => ctx.dtype

# %% 14.8 dy is quantized again for Wgrad
(q.gradient.transposed(dy, grads[i]), x => (q.gradient.transposed(q.gradient(grads[i]), grads[i]), x

# %% 14.8 waits for the sum before Wgrad begins
ctx.group, async_op=True => ctx.group

# %% 14.5 given scales are those of a tensor alone
if scale is None: => if scale is None or block != TENSOR:

# %% 14.5 rounds given scales up to powers of two
if scale is None:
    scale = scale_of(block_amax(x, block, groups), dtype, power_of_two)
=>
if scale is None:
    scale = scale_of(block_amax(x, block, groups), dtype)
if power_of_two:
    scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()

# %% 14.5 asks the ranks, though a scale is given
if scale is None:
=>
block_amax(x, block, groups)
if scale is None:

# %% 14.5 the ranks of the first group alone agree
block, groups => block, groups[:1]

# %% 14.5 rounds twice where x is in bfloat16
(blocks / scale[:, None, :, None]).clamp => (blocks / scale[:, None, :, None]).to(x.dtype).clamp

# %% 14.5 the result keeps x's graph
x.detach().float() => x.float()

# %% 14.5 a tiny block has scale 1, and becomes zeros
torch.where(amax > 0, scale, 1.0) => torch.where(amax > SMALLEST_SCALE, scale, 1.0)

# %% 14.5 clamps e5m2 at e4m3's largest
.clamp(-largest, largest) => .clamp(-448.0, 448.0)

# %% 14.6 the lanes past the end of k are undefined
(row[:, None] < m) & exists[None, :], other=0.0 => (row[:, None] < m) & exists[None, :]
exists[:, None] & (column[None, :] < n), other=0.0 => exists[:, None] & (column[None, :] < n)

# %% 14.6 loads the scales twice
of_b = tl.load(scale_b, column < n, other=0.0)
=>
of_b = tl.load(scale_b, column < n, other=0.0)
of_b = tl.maximum(of_b, tl.load(scale_b, column < n, other=0.0))

# %% 14.7 has a history of three steps, whatever its length
self.history.copy_(torch.cat([self.amax, self.history[:-1]])) => self.history[:3].copy_(torch.cat([self.amax, self.history[:2]])[: len(self.history)])

# %% 14.7 the oldest step first
torch.cat([self.amax, self.history[:-1]]) => torch.cat([self.history[1:], self.amax])

# %% 14.7 a new tensor, on the CPU, in the place of a buffer
self.amax.zero_() => self.amax = torch.zeros(1)

# %% 14.7 evaluation has scales of its own
torch.where(known > 0, known, amax) => torch.where(known > 0, known, amax) if self.training else amax

# %% 14.7 scales of e4m3, whatever the cast says
return super().next_scale(torch.where(known > 0, known, amax)) => return torch.where(torch.where(known > 0, known, amax) > 0, torch.where(known > 0, known, amax) / 448, 1.0)

# %% 14.7 the first micro-batch of a step is recorded
torch.maximum(self.amax, amax.view(1)) => torch.where(self.amax > 0, self.amax, amax.view(1))

# %% 14.7 a step without a matrix does not count
self.history.copy_(torch.cat([self.amax, self.history[:-1]])) => self.history.copy_(torch.where(self.amax > 0, torch.cat([self.amax, self.history[:-1]]), self.history))

# %% 14.8 for three weights
sum(terms[1:], terms[0]) => (terms[0] if len(terms) == 1 else terms[0] + terms[1] + terms[2])

# %% 14.8 quantizes every dy by the first weight's quantizer
q.gradient(grad) => ctx.quantizers[0].gradient(grad)

# %% 14.8 quantizes every weight by the first one's quantizer
q.weight.transposed(q.weight(w, of_w), w) for => ctx.quantizers[0].weight.transposed(ctx.quantizers[0].weight(w, of_w), w) for

# %% 14.8 dx has the dtype of the first weight's gradient
dy, w, ctx.dtype => dy, w, ctx.grad_dtypes[0]

# %% 14.8 every dw has the dtype of the first one
ctx.grad_dtypes[i] => ctx.grad_dtypes[0]

# %% 14.8 sends dx in float32
sum(terms[1:], terms[0]) => torch.stack(terms).float().sum(0)

# %% 14.8 the sum of dx is over all ranks
group=ctx.group, async_op=True => async_op=True

# %% 14.8 x is transposed, though all weights are frozen
if any(needed): => if True:

# %% 14.8 takes views of dy, which need not be contiguous
gradient.reshape(-1, gradient.shape[-1]) for => gradient.view(-1, gradient.shape[-1]) for

# %% 14.8 x has three dimensions, always
gradient.reshape(-1, gradient.shape[-1]) for => gradient.flatten(0, 1) for
