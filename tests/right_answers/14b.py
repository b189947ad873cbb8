"""Right answers in another style than the solutions, that the checks of notebook 14b must accept."""

# %% 14.5 by frexp, and with scales spread over the blocks
import math


def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False) -> torch.Tensor:
    largest = torch.tensor(LARGEST[dtype], dtype=torch.float32, device=amax.device)
    scale = torch.clamp(amax / largest, min=SMALLEST_SCALE)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # 0.5 <= mantissa < 1
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] = TENSOR,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    groups: tuple[dist.ProcessGroup, ...] = (),
) -> Quantized:
    check_scales(x, dtype, block, scale)
    if scale is None:
        scale = scale_of(block_amax(x, block, groups), dtype, power_of_two=power_of_two)
    blocks = in_blocks(x.detach().to(torch.float32), block)
    quotient = blocks / scale.unsqueeze(1).unsqueeze(-1)
    bounded = torch.minimum(torch.maximum(quotient, quotient.new_tensor(-LARGEST[dtype])), quotient.new_tensor(LARGEST[dtype]))
    bounded = bounded.masked_fill(~torch.isfinite(blocks), math.nan)
    return Quantized(out_of_blocks(bounded.to(dtype), x.shape), scale, block)

# %% 14.6 counts blocks of k
@triton.autotune(configs=tunable(BLOCK_MATMUL_CONFIGURATIONS), key=["m", "n", "k", "rows_a", "rows_b"])
@triton.jit
def block_matmul_kernel(
    a, b, out, scale_a, scale_b, m, n, k, scale_a_row, scale_a_block, scale_b_row, scale_b_block,
    rows_a: tl.constexpr, rows_b: tl.constexpr, block_k: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, block_m), tl.cdiv(n, block_n), group)
    row = tile_m * block_m + tl.arange(0, block_m)
    column = tile_n * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, block_k)
    a += row[:, None].to(tl.int64) * k + inner[None, :]
    b += column[None, :].to(tl.int64) * k + inner[:, None]
    scale_a += (row // rows_a).to(tl.int64) * scale_a_row
    scale_b += (column // rows_b).to(tl.int64) * scale_b_row
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    a_rows, b_columns = row[:, None] < m, column[None, :] < n
    for number in range(0, tl.cdiv(k, block_k)):
        left = k - number * block_k
        of_a = tl.load(a, a_rows & (inner[None, :] < left), other=0.0)
        of_b = tl.load(b, (inner[:, None] < left) & b_columns, other=0.0)
        product = dot_fp8(of_a, of_b, tl.zeros((block_m, block_n), tl.float32))
        row_scale = tl.load(scale_a + number * scale_a_block, row < m, other=0.0)
        column_scale = tl.load(scale_b + number * scale_b_block, column < n, other=0.0)
        total += product * row_scale[:, None] * column_scale[None, :]
        a += block_k
        b += block_k
    at = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(at, cast(total, out.dtype.element_ty), (row[:, None] < m) & (column[None, :] < n))

# %% 14.7 rolled
def next_scale(self: DelayedQuantizer, amax: torch.Tensor) -> torch.Tensor:
    if self.training:
        torch.maximum(self.amax, amax.reshape(1), out=self.amax)
    largest = torch.amax(self.history)
    return super().next_scale(torch.where(largest == 0, amax, largest))


@torch.no_grad()
def update(self: DelayedQuantizer) -> None:
    self.history.copy_(self.history.roll(1))
    self.history[:1].copy_(self.amax)
    self.amax.fill_(0.0)
    self.updated = True

# %% 14.8 the gradient of x in a loop
@staticmethod
def backward(ctx, *gradients: torch.Tensor) -> tuple:
    values, scale, *saved = ctx.saved_tensors
    count = len(ctx.quantizers)
    weights, scales = saved[:count], saved[count:]
    flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
    in_8_bits = [quantizer.gradient(gradient) for quantizer, gradient in zip(ctx.quantizers, flat)]
    total, on_its_way = None, None
    if ctx.needs_input_grad[0]:
        for quantizer, gradient, weight, of_weight in zip(ctx.quantizers, in_8_bits, weights, scales):
            quantized = quantizer.weight(weight, of_weight)
            product = fp8_matmul(gradient, quantizer.weight.transposed(quantized, weight), ctx.dtype)
            total = product if total is None else total + product
        total = total.reshape(ctx.shape)
        if ctx.group is not None:
            on_its_way = dist.all_reduce(total, group=ctx.group, async_op=True)
    of_weights = [None for _ in weights]
    wanted = [number for number in range(count) if ctx.needs_input_grad[3 + number]]
    if wanted:
        x = ctx.quantizers[0].input.transposed(Quantized(values, scale, ctx.block))
    for number in wanted:
        turned = ctx.quantizers[number].gradient.transposed(in_8_bits[number], flat[number])
        of_weights[number] = fp8_matmul(turned, x, ctx.grad_dtypes[number])
    if on_its_way is not None:
        on_its_way.wait()
    return (total, None, None, *of_weights)
