"""Wrong answers that the checks of notebook 14b must catch."""


# %% 14.5 fake: the scale is always 1
def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False) -> torch.Tensor:
    """The scale that takes amax to the dtype's largest number, or with power_of_two the next power above it; 1 for a
    block of zeros.
    """
    scale = (amax / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    if power_of_two:
        mantissa_bits = 2**23 - 1  # any of them that is set makes the exponent, which stands above them, one more
        scale = ((scale.view(torch.int32) + mantissa_bits) & ~mantissa_bits).view(torch.float32)
    return torch.ones_like(scale)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] = TENSOR,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    groups: tuple[dist.ProcessGroup, ...] = (),
) -> Quantized:
    """x [rows, columns] in 8 bits, rounded to nearest, ties to even; what a given scale takes past the largest number
    becomes the largest. Infinities and NaN become NaN, and don't count in their block's scale.

    scale: [blocks of rows, blocks of columns]; None: each block's own. groups: over whose ranks x is split, within a
    block: these take one scale. Raises ValueError where x, dtype, block or scale don't fit.
    """
    check_scales(x, dtype, block, scale)
    if scale is None:
        scale = scale_of(block_amax(x, block, groups), dtype, power_of_two)
    largest = LARGEST[dtype]
    blocks = in_blocks(x.detach().float(), block)
    scaled = (blocks / scale[:, None, :, None]).clamp(-largest, largest)
    scaled = torch.where(blocks.isfinite(), scaled, torch.nan)
    return Quantized(out_of_blocks(scaled.to(dtype), x.shape), scale, block)


# %% 14.5 fake: one scale for all blocks, in as many places
def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False) -> torch.Tensor:
    """The scale that takes amax to the dtype's largest number, or with power_of_two the next power above it; 1 for a
    block of zeros.
    """
    scale = (amax.max().expand_as(amax) / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    if power_of_two:
        mantissa_bits = 2**23 - 1  # any of them that is set makes the exponent, which stands above them, one more
        scale = ((scale.view(torch.int32) + mantissa_bits) & ~mantissa_bits).view(torch.float32)
    return torch.where(amax > 0, scale, 1.0)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] = TENSOR,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    groups: tuple[dist.ProcessGroup, ...] = (),
) -> Quantized:
    """x [rows, columns] in 8 bits, rounded to nearest, ties to even; what a given scale takes past the largest number
    becomes the largest. Infinities and NaN become NaN, and don't count in their block's scale.

    scale: [blocks of rows, blocks of columns]; None: each block's own. groups: over whose ranks x is split, within a
    block: these take one scale. Raises ValueError where x, dtype, block or scale don't fit.
    """
    check_scales(x, dtype, block, scale)
    if scale is None:
        scale = scale_of(block_amax(x, block, groups), dtype, power_of_two)
    largest = LARGEST[dtype]
    blocks = in_blocks(x.detach().float(), block)
    scaled = (blocks / scale[:, None, :, None]).clamp(-largest, largest)
    scaled = torch.where(blocks.isfinite(), scaled, torch.nan)
    return Quantized(out_of_blocks(scaled.to(dtype), x.shape), scale, block)


# %% 14.5 power_of_two doubles what is one already
def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False) -> torch.Tensor:
    """The scale that takes amax to the dtype's largest number, or with power_of_two the next power above it; 1 for a
    block of zeros.
    """
    scale = (amax / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    if power_of_two:
        mantissa_bits = 2**23 - 1
        scale = ((scale.view(torch.int32) + mantissa_bits + 1) & ~mantissa_bits).view(torch.float32)
    return torch.where(amax > 0, scale, 1.0)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] = TENSOR,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    groups: tuple[dist.ProcessGroup, ...] = (),
) -> Quantized:
    """x [rows, columns] in 8 bits, rounded to nearest, ties to even; what a given scale takes past the largest number
    becomes the largest. Infinities and NaN become NaN, and don't count in their block's scale.

    scale: [blocks of rows, blocks of columns]; None: each block's own. groups: over whose ranks x is split, within a
    block: these take one scale. Raises ValueError where x, dtype, block or scale don't fit.
    """
    check_scales(x, dtype, block, scale)
    if scale is None:
        scale = scale_of(block_amax(x, block, groups), dtype, power_of_two)
    largest = LARGEST[dtype]
    blocks = in_blocks(x.detach().float(), block)
    scaled = (blocks / scale[:, None, :, None]).clamp(-largest, largest)
    scaled = torch.where(blocks.isfinite(), scaled, torch.nan)
    return Quantized(out_of_blocks(scaled.to(dtype), x.shape), scale, block)


# %% 14.5 asks the host whether there is anything but zeros
def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False) -> torch.Tensor:
    """The scale that takes amax to the dtype's largest number, or with power_of_two the next power above it; 1 for a
    block of zeros.
    """
    scale = (amax / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    if power_of_two:
        mantissa_bits = 2**23 - 1  # any of them that is set makes the exponent, which stands above them, one more
        scale = ((scale.view(torch.int32) + mantissa_bits) & ~mantissa_bits).view(torch.float32)
    return torch.where(amax > 0, scale, 1.0) if amax.any() else torch.ones_like(scale)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] = TENSOR,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    groups: tuple[dist.ProcessGroup, ...] = (),
) -> Quantized:
    """x [rows, columns] in 8 bits, rounded to nearest, ties to even; what a given scale takes past the largest number
    becomes the largest. Infinities and NaN become NaN, and don't count in their block's scale.

    scale: [blocks of rows, blocks of columns]; None: each block's own. groups: over whose ranks x is split, within a
    block: these take one scale. Raises ValueError where x, dtype, block or scale don't fit.
    """
    check_scales(x, dtype, block, scale)
    if scale is None:
        scale = scale_of(block_amax(x, block, groups), dtype, power_of_two)
    largest = LARGEST[dtype]
    blocks = in_blocks(x.detach().float(), block)
    scaled = (blocks / scale[:, None, :, None]).clamp(-largest, largest)
    scaled = torch.where(blocks.isfinite(), scaled, torch.nan)
    return Quantized(out_of_blocks(scaled.to(dtype), x.shape), scale, block)


# %% 14.5 the cast will saturate: not that of e5m2
def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False) -> torch.Tensor:
    """The scale that takes amax to the dtype's largest number, or with power_of_two the next power above it; 1 for a
    block of zeros.
    """
    scale = (amax / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    if power_of_two:
        mantissa_bits = 2**23 - 1  # any of them that is set makes the exponent, which stands above them, one more
        scale = ((scale.view(torch.int32) + mantissa_bits) & ~mantissa_bits).view(torch.float32)
    return torch.where(amax > 0, scale, 1.0)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] = TENSOR,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    groups: tuple[dist.ProcessGroup, ...] = (),
) -> Quantized:
    """x [rows, columns] in 8 bits, rounded to nearest, ties to even; what a given scale takes past the largest number
    becomes the largest. Infinities and NaN become NaN, and don't count in their block's scale.

    scale: [blocks of rows, blocks of columns]; None: each block's own. groups: over whose ranks x is split, within a
    block: these take one scale. Raises ValueError where x, dtype, block or scale don't fit.
    """
    check_scales(x, dtype, block, scale)
    if scale is None:
        scale = scale_of(block_amax(x, block, groups), dtype, power_of_two)
    blocks = in_blocks(x.detach().float(), block)
    scaled = blocks / scale[:, None, :, None]
    scaled = torch.where(blocks.isfinite(), scaled, torch.nan)
    return Quantized(out_of_blocks(scaled.to(dtype), x.shape), scale, block)


# %% 14.5 inf and NaN spoil their block
def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False) -> torch.Tensor:
    """The scale that takes amax to the dtype's largest number, or with power_of_two the next power above it; 1 for a
    block of zeros.
    """
    scale = (amax / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    if power_of_two:
        mantissa_bits = 2**23 - 1  # any of them that is set makes the exponent, which stands above them, one more
        scale = ((scale.view(torch.int32) + mantissa_bits) & ~mantissa_bits).view(torch.float32)
    return torch.where(amax > 0, scale, 1.0)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] = TENSOR,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    groups: tuple[dist.ProcessGroup, ...] = (),
) -> Quantized:
    """x [rows, columns] in 8 bits, rounded to nearest, ties to even; what a given scale takes past the largest number
    becomes the largest. Infinities and NaN become NaN, and don't count in their block's scale.

    scale: [blocks of rows, blocks of columns]; None: each block's own. groups: over whose ranks x is split, within a
    block: these take one scale. Raises ValueError where x, dtype, block or scale don't fit.
    """
    check_scales(x, dtype, block, scale)
    if scale is None:
        scale = scale_of(in_blocks(x.float().abs(), block).amax((1, 3)), dtype, power_of_two)
    largest = LARGEST[dtype]
    blocks = in_blocks(x.detach().float(), block)
    scaled = (blocks / scale[:, None, :, None]).clamp(-largest, largest)
    scaled = torch.where(blocks.isfinite(), scaled, torch.nan)
    return Quantized(out_of_blocks(scaled.to(dtype), x.shape), scale, block)


# %% 14.5 rounds twice, to bfloat16 first
def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False) -> torch.Tensor:
    """The scale that takes amax to the dtype's largest number, or with power_of_two the next power above it; 1 for a
    block of zeros.
    """
    scale = (amax / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    if power_of_two:
        mantissa_bits = 2**23 - 1  # any of them that is set makes the exponent, which stands above them, one more
        scale = ((scale.view(torch.int32) + mantissa_bits) & ~mantissa_bits).view(torch.float32)
    return torch.where(amax > 0, scale, 1.0)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] = TENSOR,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    groups: tuple[dist.ProcessGroup, ...] = (),
) -> Quantized:
    """x [rows, columns] in 8 bits, rounded to nearest, ties to even; what a given scale takes past the largest number
    becomes the largest. Infinities and NaN become NaN, and don't count in their block's scale.

    scale: [blocks of rows, blocks of columns]; None: each block's own. groups: over whose ranks x is split, within a
    block: these take one scale. Raises ValueError where x, dtype, block or scale don't fit.
    """
    check_scales(x, dtype, block, scale)
    if scale is None:
        scale = scale_of(block_amax(x, block, groups), dtype, power_of_two)
    largest = LARGEST[dtype]
    blocks = in_blocks(x.detach().float(), block)
    scaled = (blocks / scale[:, None, :, None]).clamp(-largest, largest)
    scaled = torch.where(blocks.isfinite(), scaled, torch.nan)
    return Quantized(out_of_blocks(scaled.bfloat16().to(dtype), x.shape), scale, block)


# %% 14.5 each rank has its own scale
def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False) -> torch.Tensor:
    """The scale that takes amax to the dtype's largest number, or with power_of_two the next power above it; 1 for a
    block of zeros.
    """
    scale = (amax / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    if power_of_two:
        mantissa_bits = 2**23 - 1  # any of them that is set makes the exponent, which stands above them, one more
        scale = ((scale.view(torch.int32) + mantissa_bits) & ~mantissa_bits).view(torch.float32)
    return torch.where(amax > 0, scale, 1.0)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] = TENSOR,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    groups: tuple[dist.ProcessGroup, ...] = (),
) -> Quantized:
    """x [rows, columns] in 8 bits, rounded to nearest, ties to even; what a given scale takes past the largest number
    becomes the largest. Infinities and NaN become NaN, and don't count in their block's scale.

    scale: [blocks of rows, blocks of columns]; None: each block's own. groups: over whose ranks x is split, within a
    block: these take one scale. Raises ValueError where x, dtype, block or scale don't fit.
    """
    check_scales(x, dtype, block, scale)
    if scale is None:
        scale = scale_of(block_amax(x, block), dtype, power_of_two)
    largest = LARGEST[dtype]
    blocks = in_blocks(x.detach().float(), block)
    scaled = (blocks / scale[:, None, :, None]).clamp(-largest, largest)
    scaled = torch.where(blocks.isfinite(), scaled, torch.nan)
    return Quantized(out_of_blocks(scaled.to(dtype), x.shape), scale, block)


# %% 14.6 fake: a float32 product of what the 8 bits stand for
@triton.autotune(configs=tunable(BLOCK_MATMUL_CONFIGURATIONS), key=["m", "n", "k"])
@triton.jit
def block_matmul_kernel(
    a, b, out, scale_a, scale_b, m, n, k, scale_a_row, scale_a_piece, scale_b_row, scale_b_piece,
    rows_a: tl.constexpr, rows_b: tl.constexpr, piece: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """One tile of out [m, n]. a: [m, k]; b: [n, k]; out: contiguous. scale_a …: a scale for rows_a rows and `piece`
    numbers of k, by its strides.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, block_m), tl.cdiv(n, block_n), group)
    row = tile_m * block_m + tl.arange(0, block_m)
    column = tile_n * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, piece)
    a += row[:, None].to(tl.int64) * k + inner[None, :]
    b += column[None, :].to(tl.int64) * k + inner[:, None]
    scale_a += (row // rows_a).to(tl.int64) * scale_a_row
    scale_b += (column // rows_b).to(tl.int64) * scale_b_row
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for start in range(0, k, piece):
        there = inner < k - start
        tile_a = tl.load(a, (row[:, None] < m) & there[None, :], other=0.0)
        tile_b = tl.load(b, there[:, None] & (column[None, :] < n), other=0.0)
        of_a = tl.load(scale_a, row < m, other=0.0)
        of_b = tl.load(scale_b, column < n, other=0.0)
        wide_a, wide_b = widen_fp8(tile_a) * of_a[:, None], widen_fp8(tile_b) * of_b[None, :]
        total = tl.dot(wide_a, wide_b, total, input_precision="ieee")
        a += piece
        b += piece
        scale_a += scale_a_piece
        scale_b += scale_b_piece
    at = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(at, cast(total, out.dtype.element_ty), (row[:, None] < m) & (column[None, :] < n))


# %% 14.6 fake: FP8 products for show, beside those of 16-bit tensor cores
@triton.jit
def half_product(a, b):
    return tl.dot(widen_fp8(a).to(tl.float16), widen_fp8(b).to(tl.float16))


@triton.autotune(configs=tunable(BLOCK_MATMUL_CONFIGURATIONS), key=["m", "n", "k"])
@triton.jit
def block_matmul_kernel(
    a, b, out, scale_a, scale_b, m, n, k, scale_a_row, scale_a_piece, scale_b_row, scale_b_piece,
    rows_a: tl.constexpr, rows_b: tl.constexpr, piece: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """One tile of out [m, n]. a: [m, k]; b: [n, k]; out: contiguous. scale_a …: a scale for rows_a rows and `piece`
    numbers of k, by its strides.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, block_m), tl.cdiv(n, block_n), group)
    row = tile_m * block_m + tl.arange(0, block_m)
    column = tile_n * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, piece)
    a += row[:, None].to(tl.int64) * k + inner[None, :]
    b += column[None, :].to(tl.int64) * k + inner[:, None]
    scale_a += (row // rows_a).to(tl.int64) * scale_a_row
    scale_b += (column // rows_b).to(tl.int64) * scale_b_row
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for start in range(0, k, piece):
        there = inner < k - start
        tile_a = tl.load(a, (row[:, None] < m) & there[None, :], other=0.0)
        tile_b = tl.load(b, there[:, None] & (column[None, :] < n), other=0.0)
        of_a = tl.load(scale_a, row < m, other=0.0)
        of_b = tl.load(scale_b, column < n, other=0.0)
        shown = dot_fp8(tile_a, tile_b, tl.zeros((block_m, block_n), tl.float32))
        piece_sum = tl.where(shown == shown, half_product(tile_a, tile_b), shown)
        total += piece_sum * of_a[:, None] * of_b[None, :]
        a += piece
        b += piece
        scale_a += scale_a_piece
        scale_b += scale_b_piece
    at = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(at, cast(total, out.dtype.element_ty), (row[:, None] < m) & (column[None, :] < n))


# %% 14.6 one sum over all of k, scaled at the end by the last scales
@triton.autotune(configs=tunable(BLOCK_MATMUL_CONFIGURATIONS), key=["m", "n", "k"])
@triton.jit
def block_matmul_kernel(
    a, b, out, scale_a, scale_b, m, n, k, scale_a_row, scale_a_piece, scale_b_row, scale_b_piece,
    rows_a: tl.constexpr, rows_b: tl.constexpr, piece: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """One tile of out [m, n]. a: [m, k]; b: [n, k]; out: contiguous. scale_a …: a scale for rows_a rows and `piece`
    numbers of k, by its strides.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, block_m), tl.cdiv(n, block_n), group)
    row = tile_m * block_m + tl.arange(0, block_m)
    column = tile_n * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, piece)
    a += row[:, None].to(tl.int64) * k + inner[None, :]
    b += column[None, :].to(tl.int64) * k + inner[:, None]
    scale_a += (row // rows_a).to(tl.int64) * scale_a_row
    scale_b += (column // rows_b).to(tl.int64) * scale_b_row
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for start in range(0, k, piece):
        there = inner < k - start
        tile_a = tl.load(a, (row[:, None] < m) & there[None, :], other=0.0)
        tile_b = tl.load(b, there[:, None] & (column[None, :] < n), other=0.0)
        of_a = tl.load(scale_a, row < m, other=0.0)
        of_b = tl.load(scale_b, column < n, other=0.0)
        total = dot_fp8(tile_a, tile_b, total)
        a += piece
        b += piece
        scale_a += scale_a_piece
        scale_b += scale_b_piece
    total *= of_a[:, None] * of_b[None, :]
    at = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(at, cast(total, out.dtype.element_ty), (row[:, None] < m) & (column[None, :] < n))


# %% 14.6 the scales stay those of the first piece
@triton.autotune(configs=tunable(BLOCK_MATMUL_CONFIGURATIONS), key=["m", "n", "k"])
@triton.jit
def block_matmul_kernel(
    a, b, out, scale_a, scale_b, m, n, k, scale_a_row, scale_a_piece, scale_b_row, scale_b_piece,
    rows_a: tl.constexpr, rows_b: tl.constexpr, piece: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """One tile of out [m, n]. a: [m, k]; b: [n, k]; out: contiguous. scale_a …: a scale for rows_a rows and `piece`
    numbers of k, by its strides.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, block_m), tl.cdiv(n, block_n), group)
    row = tile_m * block_m + tl.arange(0, block_m)
    column = tile_n * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, piece)
    a += row[:, None].to(tl.int64) * k + inner[None, :]
    b += column[None, :].to(tl.int64) * k + inner[:, None]
    scale_a += (row // rows_a).to(tl.int64) * scale_a_row
    scale_b += (column // rows_b).to(tl.int64) * scale_b_row
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for start in range(0, k, piece):
        there = inner < k - start
        tile_a = tl.load(a, (row[:, None] < m) & there[None, :], other=0.0)
        tile_b = tl.load(b, there[:, None] & (column[None, :] < n), other=0.0)
        of_a = tl.load(scale_a, row < m, other=0.0)
        of_b = tl.load(scale_b, column < n, other=0.0)
        piece_sum = dot_fp8(tile_a, tile_b, tl.zeros((block_m, block_n), tl.float32))
        total += piece_sum * of_a[:, None] * of_b[None, :]
        a += piece
        b += piece
    at = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(at, cast(total, out.dtype.element_ty), (row[:, None] < m) & (column[None, :] < n))


# %% 14.6 the last piece is taken for a whole one
@triton.autotune(configs=tunable(BLOCK_MATMUL_CONFIGURATIONS), key=["m", "n", "k"])
@triton.jit
def block_matmul_kernel(
    a, b, out, scale_a, scale_b, m, n, k, scale_a_row, scale_a_piece, scale_b_row, scale_b_piece,
    rows_a: tl.constexpr, rows_b: tl.constexpr, piece: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """One tile of out [m, n]. a: [m, k]; b: [n, k]; out: contiguous. scale_a …: a scale for rows_a rows and `piece`
    numbers of k, by its strides.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, block_m), tl.cdiv(n, block_n), group)
    row = tile_m * block_m + tl.arange(0, block_m)
    column = tile_n * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, piece)
    a += row[:, None].to(tl.int64) * k + inner[None, :]
    b += column[None, :].to(tl.int64) * k + inner[:, None]
    scale_a += (row // rows_a).to(tl.int64) * scale_a_row
    scale_b += (column // rows_b).to(tl.int64) * scale_b_row
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for start in range(0, k, piece):
        there = inner < piece
        tile_a = tl.load(a, (row[:, None] < m) & there[None, :], other=0.0)
        tile_b = tl.load(b, there[:, None] & (column[None, :] < n), other=0.0)
        of_a = tl.load(scale_a, row < m, other=0.0)
        of_b = tl.load(scale_b, column < n, other=0.0)
        piece_sum = dot_fp8(tile_a, tile_b, tl.zeros((block_m, block_n), tl.float32))
        total += piece_sum * of_a[:, None] * of_b[None, :]
        a += piece
        b += piece
        scale_a += scale_a_piece
        scale_b += scale_b_piece
    at = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(at, cast(total, out.dtype.element_ty), (row[:, None] < m) & (column[None, :] < n))


# %% 14.6 rows of a without a mask
@triton.autotune(configs=tunable(BLOCK_MATMUL_CONFIGURATIONS), key=["m", "n", "k"])
@triton.jit
def block_matmul_kernel(
    a, b, out, scale_a, scale_b, m, n, k, scale_a_row, scale_a_piece, scale_b_row, scale_b_piece,
    rows_a: tl.constexpr, rows_b: tl.constexpr, piece: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """One tile of out [m, n]. a: [m, k]; b: [n, k]; out: contiguous. scale_a …: a scale for rows_a rows and `piece`
    numbers of k, by its strides.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, block_m), tl.cdiv(n, block_n), group)
    row = tile_m * block_m + tl.arange(0, block_m)
    column = tile_n * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, piece)
    a += row[:, None].to(tl.int64) * k + inner[None, :]
    b += column[None, :].to(tl.int64) * k + inner[:, None]
    scale_a += (row // rows_a).to(tl.int64) * scale_a_row
    scale_b += (column // rows_b).to(tl.int64) * scale_b_row
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for start in range(0, k, piece):
        there = inner < k - start
        tile_a = tl.load(a, (row[:, None] >= 0) & there[None, :], other=0.0)
        tile_b = tl.load(b, there[:, None] & (column[None, :] < n), other=0.0)
        of_a = tl.load(scale_a, row < m, other=0.0)
        of_b = tl.load(scale_b, column < n, other=0.0)
        piece_sum = dot_fp8(tile_a, tile_b, tl.zeros((block_m, block_n), tl.float32))
        total += piece_sum * of_a[:, None] * of_b[None, :]
        a += piece
        b += piece
        scale_a += scale_a_piece
        scale_b += scale_b_piece
    at = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(at, cast(total, out.dtype.element_ty), (row[:, None] < m) & (column[None, :] < n))


# %% 14.6 a total of 16 bits
@triton.autotune(configs=tunable(BLOCK_MATMUL_CONFIGURATIONS), key=["m", "n", "k"])
@triton.jit
def block_matmul_kernel(
    a, b, out, scale_a, scale_b, m, n, k, scale_a_row, scale_a_piece, scale_b_row, scale_b_piece,
    rows_a: tl.constexpr, rows_b: tl.constexpr, piece: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """One tile of out [m, n]. a: [m, k]; b: [n, k]; out: contiguous. scale_a …: a scale for rows_a rows and `piece`
    numbers of k, by its strides.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, block_m), tl.cdiv(n, block_n), group)
    row = tile_m * block_m + tl.arange(0, block_m)
    column = tile_n * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, piece)
    a += row[:, None].to(tl.int64) * k + inner[None, :]
    b += column[None, :].to(tl.int64) * k + inner[:, None]
    scale_a += (row // rows_a).to(tl.int64) * scale_a_row
    scale_b += (column // rows_b).to(tl.int64) * scale_b_row
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for start in range(0, k, piece):
        there = inner < k - start
        tile_a = tl.load(a, (row[:, None] < m) & there[None, :], other=0.0)
        tile_b = tl.load(b, there[:, None] & (column[None, :] < n), other=0.0)
        of_a = tl.load(scale_a, row < m, other=0.0)
        of_b = tl.load(scale_b, column < n, other=0.0)
        piece_sum = dot_fp8(tile_a, tile_b, tl.zeros((block_m, block_n), tl.float32))
        total = (total + piece_sum * of_a[:, None] * of_b[None, :]).to(tl.float16).to(tl.float32)
        a += piece
        b += piece
        scale_a += scale_a_piece
        scale_b += scale_b_piece
    at = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(at, cast(total, out.dtype.element_ty), (row[:, None] < m) & (column[None, :] < n))


# %% 14.6 fake: PyTorch behind a kernel's brackets
class TorchProduct:
    def __getitem__(self, grid):
        def launch(a, b, out, scale_a, scale_b, *sizes, **constants):
            wide_a, wide_b = (
                dequantize(Quantized(values, scale, (rows, constants["piece"])))
                for values, scale, rows in ((a, scale_a, constants["rows_a"]), (b, scale_b, constants["rows_b"]))
            )
            out.copy_(wide_a @ wide_b.t())

        return launch


class block_matmul_kernel:
    fn = TorchProduct()


# %% 14.7 fake: current scaling
class DelayedCaster(Caster):
    """Quantizes by the largest amax of the last `cast.history` steps: the scale is there before the matrix is read.

    amax [1]: the largest since the last `update`, evaluation apart; history [steps]: those before it. Where the history
    is empty a matrix has its own scale. Raises ValueError for blocks.
    """

    def __init__(self, cast: Cast, splits: tuple[Split, ...] = ()):
        if cast.block != TENSOR:
            raise ValueError(f"a history of amax is for scales of whole matrices, not for blocks of {cast.block}")
        super().__init__(cast, splits)
        self.updated = False  # where not, the history may be empty, and the ranks must agree about the matrix itself
        self.register_buffer("amax", torch.zeros(1))
        self.register_buffer("history", torch.zeros(cast.history))

    def groups(self, transposed: bool = False) -> tuple[dist.ProcessGroup, ...]:
        return () if self.updated else super().groups(transposed)  # later, `update_scales` asks them

    def known_scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.next_scale(block_amax(x, TENSOR, self.groups()))

    def next_scale(self, amax: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.amax.copy_(torch.maximum(self.amax, amax.view(1)))  # a second time, in recomputation, changes nothing
        return super().next_scale(amax)

    @torch.no_grad()
    def update(self) -> None:
        """After a step: its amax, by now that of all ranks, joins the history, and the oldest leaves."""
        self.history.copy_(torch.cat([self.amax, self.history[:-1]]))
        self.amax.zero_()
        self.updated = True


# %% 14.7 the last step's amax alone
class DelayedCaster(Caster):
    """Quantizes by the largest amax of the last `cast.history` steps: the scale is there before the matrix is read.

    amax [1]: the largest since the last `update`, evaluation apart; history [steps]: those before it. Where the history
    is empty a matrix has its own scale. Raises ValueError for blocks.
    """

    def __init__(self, cast: Cast, splits: tuple[Split, ...] = ()):
        if cast.block != TENSOR:
            raise ValueError(f"a history of amax is for scales of whole matrices, not for blocks of {cast.block}")
        super().__init__(cast, splits)
        self.updated = False  # where not, the history may be empty, and the ranks must agree about the matrix itself
        self.register_buffer("amax", torch.zeros(1))
        self.register_buffer("history", torch.zeros(cast.history))

    def groups(self, transposed: bool = False) -> tuple[dist.ProcessGroup, ...]:
        return () if self.updated else super().groups(transposed)  # later, `update_scales` asks them

    def known_scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.next_scale(block_amax(x, TENSOR, self.groups()))

    def next_scale(self, amax: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.amax.copy_(torch.maximum(self.amax, amax.view(1)))  # a second time, in recomputation, changes nothing
        known = self.history[0]
        return super().next_scale(torch.where(known > 0, known, amax))

    @torch.no_grad()
    def update(self) -> None:
        """After a step: its amax, by now that of all ranks, joins the history, and the oldest leaves."""
        self.history.copy_(torch.cat([self.amax, self.history[:-1]]))
        self.amax.zero_()
        self.updated = True


# %% 14.7 the history decides in the first step, too
class DelayedCaster(Caster):
    """Quantizes by the largest amax of the last `cast.history` steps: the scale is there before the matrix is read.

    amax [1]: the largest since the last `update`, evaluation apart; history [steps]: those before it. Where the history
    is empty a matrix has its own scale. Raises ValueError for blocks.
    """

    def __init__(self, cast: Cast, splits: tuple[Split, ...] = ()):
        if cast.block != TENSOR:
            raise ValueError(f"a history of amax is for scales of whole matrices, not for blocks of {cast.block}")
        super().__init__(cast, splits)
        self.updated = False  # where not, the history may be empty, and the ranks must agree about the matrix itself
        self.register_buffer("amax", torch.zeros(1))
        self.register_buffer("history", torch.zeros(cast.history))

    def groups(self, transposed: bool = False) -> tuple[dist.ProcessGroup, ...]:
        return () if self.updated else super().groups(transposed)  # later, `update_scales` asks them

    def known_scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.next_scale(block_amax(x, TENSOR, self.groups()))

    def next_scale(self, amax: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.amax.copy_(torch.maximum(self.amax, amax.view(1)))  # a second time, in recomputation, changes nothing
        known = self.history.max()
        return super().next_scale(known.view(1, 1))

    @torch.no_grad()
    def update(self) -> None:
        """After a step: its amax, by now that of all ranks, joins the history, and the oldest leaves."""
        self.history.copy_(torch.cat([self.amax, self.history[:-1]]))
        self.amax.zero_()
        self.updated = True


# %% 14.7 each forward joins the history
class DelayedCaster(Caster):
    """Quantizes by the largest amax of the last `cast.history` steps: the scale is there before the matrix is read.

    amax [1]: the largest since the last `update`, evaluation apart; history [steps]: those before it. Where the history
    is empty a matrix has its own scale. Raises ValueError for blocks.
    """

    def __init__(self, cast: Cast, splits: tuple[Split, ...] = ()):
        if cast.block != TENSOR:
            raise ValueError(f"a history of amax is for scales of whole matrices, not for blocks of {cast.block}")
        super().__init__(cast, splits)
        self.updated = False  # where not, the history may be empty, and the ranks must agree about the matrix itself
        self.register_buffer("amax", torch.zeros(1))
        self.register_buffer("history", torch.zeros(cast.history))

    def groups(self, transposed: bool = False) -> tuple[dist.ProcessGroup, ...]:
        return () if self.updated else super().groups(transposed)  # later, `update_scales` asks them

    def known_scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.next_scale(block_amax(x, TENSOR, self.groups()))

    def next_scale(self, amax: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.amax.copy_(torch.maximum(self.amax, amax.view(1)))
            self.history.copy_(torch.cat([amax.view(1), self.history[:-1]]))
        known = self.history.max()
        return super().next_scale(torch.where(known > 0, known, amax))

    @torch.no_grad()
    def update(self) -> None:
        """After a step: its amax, by now that of all ranks, joins the history, and the oldest leaves."""
        self.history.copy_(torch.cat([self.amax, self.history[:-1]]))
        self.amax.zero_()
        self.updated = True


# %% 14.7 the last matrix of a step is recorded
class DelayedCaster(Caster):
    """Quantizes by the largest amax of the last `cast.history` steps: the scale is there before the matrix is read.

    amax [1]: the largest since the last `update`, evaluation apart; history [steps]: those before it. Where the history
    is empty a matrix has its own scale. Raises ValueError for blocks.
    """

    def __init__(self, cast: Cast, splits: tuple[Split, ...] = ()):
        if cast.block != TENSOR:
            raise ValueError(f"a history of amax is for scales of whole matrices, not for blocks of {cast.block}")
        super().__init__(cast, splits)
        self.updated = False  # where not, the history may be empty, and the ranks must agree about the matrix itself
        self.register_buffer("amax", torch.zeros(1))
        self.register_buffer("history", torch.zeros(cast.history))

    def groups(self, transposed: bool = False) -> tuple[dist.ProcessGroup, ...]:
        return () if self.updated else super().groups(transposed)  # later, `update_scales` asks them

    def known_scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.next_scale(block_amax(x, TENSOR, self.groups()))

    def next_scale(self, amax: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.amax.copy_(amax.view(1))
        known = self.history.max()
        return super().next_scale(torch.where(known > 0, known, amax))

    @torch.no_grad()
    def update(self) -> None:
        """After a step: its amax, by now that of all ranks, joins the history, and the oldest leaves."""
        self.history.copy_(torch.cat([self.amax, self.history[:-1]]))
        self.amax.zero_()
        self.updated = True


# %% 14.7 evaluation is recorded, too
class DelayedCaster(Caster):
    """Quantizes by the largest amax of the last `cast.history` steps: the scale is there before the matrix is read.

    amax [1]: the largest since the last `update`, evaluation apart; history [steps]: those before it. Where the history
    is empty a matrix has its own scale. Raises ValueError for blocks.
    """

    def __init__(self, cast: Cast, splits: tuple[Split, ...] = ()):
        if cast.block != TENSOR:
            raise ValueError(f"a history of amax is for scales of whole matrices, not for blocks of {cast.block}")
        super().__init__(cast, splits)
        self.updated = False  # where not, the history may be empty, and the ranks must agree about the matrix itself
        self.register_buffer("amax", torch.zeros(1))
        self.register_buffer("history", torch.zeros(cast.history))

    def groups(self, transposed: bool = False) -> tuple[dist.ProcessGroup, ...]:
        return () if self.updated else super().groups(transposed)  # later, `update_scales` asks them

    def known_scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.next_scale(block_amax(x, TENSOR, self.groups()))

    def next_scale(self, amax: torch.Tensor) -> torch.Tensor:
        self.amax.copy_(torch.maximum(self.amax, amax.view(1)))  # a second time, in recomputation, changes nothing
        known = self.history.max()
        return super().next_scale(torch.where(known > 0, known, amax))

    @torch.no_grad()
    def update(self) -> None:
        """After a step: its amax, by now that of all ranks, joins the history, and the oldest leaves."""
        self.history.copy_(torch.cat([self.amax, self.history[:-1]]))
        self.amax.zero_()
        self.updated = True


# %% 14.7 forward asks the host
class DelayedCaster(Caster):
    """Quantizes by the largest amax of the last `cast.history` steps: the scale is there before the matrix is read.

    amax [1]: the largest since the last `update`, evaluation apart; history [steps]: those before it. Where the history
    is empty a matrix has its own scale. Raises ValueError for blocks.
    """

    def __init__(self, cast: Cast, splits: tuple[Split, ...] = ()):
        if cast.block != TENSOR:
            raise ValueError(f"a history of amax is for scales of whole matrices, not for blocks of {cast.block}")
        super().__init__(cast, splits)
        self.updated = False  # where not, the history may be empty, and the ranks must agree about the matrix itself
        self.register_buffer("amax", torch.zeros(1))
        self.register_buffer("history", torch.zeros(cast.history))

    def groups(self, transposed: bool = False) -> tuple[dist.ProcessGroup, ...]:
        return () if self.updated else super().groups(transposed)  # later, `update_scales` asks them

    def known_scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.next_scale(block_amax(x, TENSOR, self.groups()))

    def next_scale(self, amax: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.amax.copy_(torch.maximum(self.amax, amax.view(1)))  # a second time, in recomputation, changes nothing
        known = self.history.max()
        return super().next_scale(known.view(1, 1) if known > 0 else amax)

    @torch.no_grad()
    def update(self) -> None:
        """After a step: its amax, by now that of all ranks, joins the history, and the oldest leaves."""
        self.history.copy_(torch.cat([self.amax, self.history[:-1]]))
        self.amax.zero_()
        self.updated = True


# %% 14.7 forward waits for the other ranks in each step
class DelayedCaster(Caster):
    """Quantizes by the largest amax of the last `cast.history` steps: the scale is there before the matrix is read.

    amax [1]: the largest since the last `update`, evaluation apart; history [steps]: those before it. Where the history
    is empty a matrix has its own scale. Raises ValueError for blocks.
    """

    def __init__(self, cast: Cast, splits: tuple[Split, ...] = ()):
        if cast.block != TENSOR:
            raise ValueError(f"a history of amax is for scales of whole matrices, not for blocks of {cast.block}")
        super().__init__(cast, splits)
        self.updated = False  # where not, the history may be empty, and the ranks must agree about the matrix itself
        self.register_buffer("amax", torch.zeros(1))
        self.register_buffer("history", torch.zeros(cast.history))

    def groups(self, transposed: bool = False) -> tuple[dist.ProcessGroup, ...]:
        return () if self.updated else super().groups(transposed)  # later, `update_scales` asks them

    def known_scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.next_scale(block_amax(x, TENSOR, self.groups()))

    def next_scale(self, amax: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.amax.copy_(torch.maximum(self.amax, amax.view(1)))  # a second time, in recomputation, changes nothing
        known = self.history.max()
        return super().next_scale(torch.where(known > 0, known, amax))

    @torch.no_grad()
    def update(self) -> None:
        """After a step: its amax, by now that of all ranks, joins the history, and the oldest leaves."""
        self.history.copy_(torch.cat([self.amax, self.history[:-1]]))
        self.amax.zero_()


# %% 14.8 fake: Dgrad and Wgrad in full precision
class Fp8Products(Fp8Forward):
    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        values, scale, *saved = ctx.saved_tensors
        weights, scales = saved[: len(ctx.casters)], saved[len(ctx.casters) :]
        grads = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]  # [tokens, out]
        parts = list(zip(ctx.casters, [c.gradient(g) for c, g in zip(ctx.casters, grads, strict=True)], strict=True))
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            kept = zip(ctx.casters, weights, scales, strict=True)
            turned = [c.weight.turned(c.weight(w, of_w), w) for c, w, of_w in kept]  # [in, out]
            products = [dequantize(dy) @ dequantize(w).t() for (_, dy), w in zip(parts, turned, strict=True)]
            grad_x = sum(products[1:], products[0]).view(ctx.shape)
            work = None if ctx.group is None else dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weights, needed = [None] * len(weights), ctx.needs_input_grad[3:]
        if any(needed):
            x = ctx.casters[0].input.turned(Quantized(values, scale, ctx.block))  # [in, tokens]
            for i, (c, dy) in enumerate(parts):
                if needed[i]:
                    grad_weights[i] = (grads[i].t() @ dequantize(x).t()).to(ctx.grad_dtypes[i])
        if work is not None:
            work.wait()
        return grad_x, None, None, *grad_weights


# %% 14.8 fake: x is kept in full precision, for Wgrad
class Fp8Products(Fp8Forward):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group, casters: list[LayerCasters], *weights: torch.Tensor) -> tuple:
        """x: [..., in], weights: [out, in]; returns one [..., out] for each weight, in x's dtype."""
        rows = casters[0].input(x.reshape(-1, x.shape[-1]))
        factors = [each.weight(w) for each, w in zip(casters, weights, strict=True)]
        outs = [fp8_matmul(rows, factor, x.dtype) for factor in factors]
        ctx.group, ctx.casters, ctx.block, ctx.shape, ctx.dtype = group, casters, rows.block, x.shape, x.dtype
        ctx.grad_dtypes = [gradient_dtype(weight) for weight in weights]
        ctx.x = x.detach().reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows.values, rows.scale, *weights, *(factor.scale for factor in factors))
        return tuple(out.view(*x.shape[:-1], len(weight)) for out, weight in zip(outs, weights, strict=True))

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        values, scale, *saved = ctx.saved_tensors
        weights, scales = saved[: len(ctx.casters)], saved[len(ctx.casters) :]
        grads = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]  # [tokens, out]
        parts = list(zip(ctx.casters, [c.gradient(g) for c, g in zip(ctx.casters, grads, strict=True)], strict=True))
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            kept = zip(ctx.casters, weights, scales, strict=True)
            turned = [c.weight.turned(c.weight(w, of_w), w) for c, w, of_w in kept]  # [in, out]
            products = [fp8_matmul(dy, w, ctx.dtype) for (_, dy), w in zip(parts, turned, strict=True)]
            grad_x = sum(products[1:], products[0]).view(ctx.shape)
            work = None if ctx.group is None else dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weights, needed = [None] * len(weights), ctx.needs_input_grad[3:]
        if any(needed):
            x = ctx.casters[0].input.turned(Quantized(values, scale, ctx.block), ctx.x)  # [in, tokens]
            for i, (c, dy) in enumerate(parts):
                if needed[i]:
                    grad_weights[i] = fp8_matmul(c.gradient.turned(dy, grads[i]), x, ctx.grad_dtypes[i])
        if work is not None:
            work.wait()
        return grad_x, None, None, *grad_weights


# %% 14.8 x's scales are turned with its bytes: they lie along in
class Fp8Products(Fp8Forward):
    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        values, scale, *saved = ctx.saved_tensors
        weights, scales = saved[: len(ctx.casters)], saved[len(ctx.casters) :]
        grads = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]  # [tokens, out]
        parts = list(zip(ctx.casters, [c.gradient(g) for c, g in zip(ctx.casters, grads, strict=True)], strict=True))
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            kept = zip(ctx.casters, weights, scales, strict=True)
            turned = [c.weight.turned(c.weight(w, of_w), w) for c, w, of_w in kept]  # [in, out]
            products = [fp8_matmul(dy, w, ctx.dtype) for (_, dy), w in zip(parts, turned, strict=True)]
            grad_x = sum(products[1:], products[0]).view(ctx.shape)
            work = None if ctx.group is None else dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weights, needed = [None] * len(weights), ctx.needs_input_grad[3:]
        if any(needed):
            x = Quantized(values, scale, ctx.block).t()  # [in, tokens]
            for i, (c, dy) in enumerate(parts):
                if needed[i]:
                    grad_weights[i] = fp8_matmul(c.gradient.turned(dy, grads[i]), x, ctx.grad_dtypes[i])
        if work is not None:
            work.wait()
        return grad_x, None, None, *grad_weights


# %% 14.8 dyᵀ is quantized from 8 bits, though dy is there
class Fp8Products(Fp8Forward):
    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        values, scale, *saved = ctx.saved_tensors
        weights, scales = saved[: len(ctx.casters)], saved[len(ctx.casters) :]
        grads = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]  # [tokens, out]
        parts = list(zip(ctx.casters, [c.gradient(g) for c, g in zip(ctx.casters, grads, strict=True)], strict=True))
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            kept = zip(ctx.casters, weights, scales, strict=True)
            turned = [c.weight.turned(c.weight(w, of_w), w) for c, w, of_w in kept]  # [in, out]
            products = [fp8_matmul(dy, w, ctx.dtype) for (_, dy), w in zip(parts, turned, strict=True)]
            grad_x = sum(products[1:], products[0]).view(ctx.shape)
            work = None if ctx.group is None else dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weights, needed = [None] * len(weights), ctx.needs_input_grad[3:]
        if any(needed):
            x = ctx.casters[0].input.turned(Quantized(values, scale, ctx.block))  # [in, tokens]
            for i, (c, dy) in enumerate(parts):
                if needed[i]:
                    grad_weights[i] = fp8_matmul(c.gradient.turned(dy), x, ctx.grad_dtypes[i])
        if work is not None:
            work.wait()
        return grad_x, None, None, *grad_weights


# %% 14.8 the weights' scales are found anew
class Fp8Products(Fp8Forward):
    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        values, scale, *saved = ctx.saved_tensors
        weights, scales = saved[: len(ctx.casters)], saved[len(ctx.casters) :]
        grads = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]  # [tokens, out]
        parts = list(zip(ctx.casters, [c.gradient(g) for c, g in zip(ctx.casters, grads, strict=True)], strict=True))
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            kept = zip(ctx.casters, weights, scales, strict=True)
            turned = [c.weight.turned(c.weight(w), w) for c, w, _ in kept]  # [in, out]
            products = [fp8_matmul(dy, w, ctx.dtype) for (_, dy), w in zip(parts, turned, strict=True)]
            grad_x = sum(products[1:], products[0]).view(ctx.shape)
            work = None if ctx.group is None else dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weights, needed = [None] * len(weights), ctx.needs_input_grad[3:]
        if any(needed):
            x = ctx.casters[0].input.turned(Quantized(values, scale, ctx.block))  # [in, tokens]
            for i, (c, dy) in enumerate(parts):
                if needed[i]:
                    grad_weights[i] = fp8_matmul(c.gradient.turned(dy, grads[i]), x, ctx.grad_dtypes[i])
        if work is not None:
            work.wait()
        return grad_x, None, None, *grad_weights


# %% 14.8 makes products that nobody asked for
class Fp8Products(Fp8Forward):
    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        values, scale, *saved = ctx.saved_tensors
        weights, scales = saved[: len(ctx.casters)], saved[len(ctx.casters) :]
        grads = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]  # [tokens, out]
        parts = list(zip(ctx.casters, [c.gradient(g) for c, g in zip(ctx.casters, grads, strict=True)], strict=True))
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            kept = zip(ctx.casters, weights, scales, strict=True)
            turned = [c.weight.turned(c.weight(w, of_w), w) for c, w, of_w in kept]  # [in, out]
            products = [fp8_matmul(dy, w, ctx.dtype) for (_, dy), w in zip(parts, turned, strict=True)]
            grad_x = sum(products[1:], products[0]).view(ctx.shape)
            work = None if ctx.group is None else dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weights, needed = [None] * len(weights), ctx.needs_input_grad[3:]
        if any(needed):
            x = ctx.casters[0].input.turned(Quantized(values, scale, ctx.block))  # [in, tokens]
            for i, (c, dy) in enumerate(parts):
                grad_weights[i] = fp8_matmul(c.gradient.turned(dy, grads[i]), x, ctx.grad_dtypes[i])
        if work is not None:
            work.wait()
        return grad_x, None, None, *grad_weights


# %% 14.8 a float32 weight's gradient is rounded to x's dtype
class Fp8Products(Fp8Forward):
    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        values, scale, *saved = ctx.saved_tensors
        weights, scales = saved[: len(ctx.casters)], saved[len(ctx.casters) :]
        grads = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]  # [tokens, out]
        parts = list(zip(ctx.casters, [c.gradient(g) for c, g in zip(ctx.casters, grads, strict=True)], strict=True))
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            kept = zip(ctx.casters, weights, scales, strict=True)
            turned = [c.weight.turned(c.weight(w, of_w), w) for c, w, of_w in kept]  # [in, out]
            products = [fp8_matmul(dy, w, ctx.dtype) for (_, dy), w in zip(parts, turned, strict=True)]
            grad_x = sum(products[1:], products[0]).view(ctx.shape)
            work = None if ctx.group is None else dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weights, needed = [None] * len(weights), ctx.needs_input_grad[3:]
        if any(needed):
            x = ctx.casters[0].input.turned(Quantized(values, scale, ctx.block))  # [in, tokens]
            for i, (c, dy) in enumerate(parts):
                if needed[i]:
                    grad_weights[i] = fp8_matmul(c.gradient.turned(dy, grads[i]), x, ctx.dtype)
        if work is not None:
            work.wait()
        return grad_x, None, None, *grad_weights


# %% 14.8 waits for the sum before Wgrad begins
class Fp8Products(Fp8Forward):
    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        values, scale, *saved = ctx.saved_tensors
        weights, scales = saved[: len(ctx.casters)], saved[len(ctx.casters) :]
        grads = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]  # [tokens, out]
        parts = list(zip(ctx.casters, [c.gradient(g) for c, g in zip(ctx.casters, grads, strict=True)], strict=True))
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            kept = zip(ctx.casters, weights, scales, strict=True)
            turned = [c.weight.turned(c.weight(w, of_w), w) for c, w, of_w in kept]  # [in, out]
            products = [fp8_matmul(dy, w, ctx.dtype) for (_, dy), w in zip(parts, turned, strict=True)]
            grad_x = sum(products[1:], products[0]).view(ctx.shape)
            work = None if ctx.group is None else dist.all_reduce(grad_x, group=ctx.group)
        grad_weights, needed = [None] * len(weights), ctx.needs_input_grad[3:]
        if any(needed):
            x = ctx.casters[0].input.turned(Quantized(values, scale, ctx.block))  # [in, tokens]
            for i, (c, dy) in enumerate(parts):
                if needed[i]:
                    grad_weights[i] = fp8_matmul(c.gradient.turned(dy, grads[i]), x, ctx.grad_dtypes[i])
        if work is not None:
            work.wait()
        return grad_x, None, None, *grad_weights
