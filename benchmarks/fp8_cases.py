"""The cases of benchmarks/fp8.py: matmuls, casts and linear layers of notebook 14b, their sizes, and their work.

Matmuls of x [m, k] and w [n, k], transposed; 2 m n k FLOPs. Operands are in 8 bits before the clock starts. BF16:
torch.mm. scaled_mm: torch._scaled_mm with a scale for each matrix and slow (accurate) accumulation; fast: with fast
accumulation. blockwise: torch.nn.functional.scaled_mm with scales of 1 x 128, 128 x 128 (Hopper, CUDA 12.9). With
scales of blocks, ours is the kernel for Hopper; plain: the kernel without TMA and groups of warps. With a scale for
each row, scaled_mm has these scales too on a GPU; on a CPU it has one scale per matrix. Errors are relative to the
product of the values that our own operands stand for, in a wider dtype: for a column that quantizes differently, or not
at all, they include the difference of quantization.

Casts: the bytes that must move (x read, 8 bits and scales written), so a second pass adds none. eager: `quantize`;
compile: torch.compile of it.

Layers: y = x w^T and its two gradients, 2 m n k FLOPs each, quantization included. ours, blocks: `Fp8Linear` with a
scale for each matrix, and with tiles and squares; kept: ours in a micro-batch after the first, whose weight is
quantized already (`quantized_once`; its peak leaves out these 2 n k bytes). BF16: nn.Linear. torchao: Float8Linear, one
scale for each matrix, if it is installed; compiled on a GPU, as it is meant to be.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from kernel_runs import DTYPES, WIDER, Case, random

from course_lib.fp8.casts import quantize_both, quantize_delayed, quantize_fused, transpose_tiles
from course_lib.fp8.hopper import hopper_block_matmul
from course_lib.fp8.kernels import block_matmul
from course_lib.fp8.linear import Fp8LinearFunction, LayerQuantizers
from course_lib.fp8.operands import Casts
from course_lib.fp8.quantization import (
    ROW,
    SQUARE,
    TENSOR,
    TILE,
    Quantized,
    block_amax,
    blocks_of,
    dequantize,
    quantize,
)
from course_lib.fp8.recipes import by_blocks, per_tensor
from course_lib.fp8.scaled_matmul import block_scaled_matmul, fp8_matmul, supports_row_scales

torchao = importlib.util.find_spec("torchao")
BLOCKS = {"tensor": TENSOR, "row": ROW, "1 x 128": TILE, "128 x 128": SQUARE}
SIZES = {  # m, n, k: a cube, and 8k tokens in the MLP of Llama 3 8B
    "cuda": {
        "products": [(8192, 8192, 8192), (8192, 14336, 4096)],
        "casts": [(8192, 8192)],
    },
    "small": {"products": [(256, 384, 512)], "casts": [(300, 400)]},
    "cpu": {"products": [(32, 48, 160)], "casts": [(20, 144)]},
}  # fmt: skip


def operands(x: torch.Tensor, w: torch.Tensor, blocks: tuple[tuple[int, int], tuple[int, int]]) -> list[torch.Tensor]:
    """Return values and scales of x and w for the matmul, then of both again with one scale per matrix."""
    in_blocks = [
        each for source, block in zip((x, w), blocks, strict=True) for each in quantize_fused(source, block=block)[:2]
    ]
    return in_blocks + [each for source in (x, w) for each in quantize_fused(source)[:2]]


def exact_matmul(x, w, x_values, x_scale, w_values, w_scale, *_, blocks) -> list[torch.Tensor]:
    """Return the matmul of the dequantized values, in a wider dtype."""
    wider = WIDER[x.dtype]
    left, right = (
        dequantize(Quantized(*each), wider) for each in ((x_values, x_scale, blocks[0]), (w_values, w_scale, blocks[1]))
    )
    return [(left @ right.t()).float()]


def ours(x, w, x_values, x_scale, w_values, w_scale, *_, blocks, matmul) -> torch.Tensor:
    return matmul(Quantized(x_values, x_scale, blocks[0]), Quantized(w_values, w_scale, blocks[1]), x.dtype)


def per_matrix(x, w, *rest, fast: bool) -> torch.Tensor:
    """Return torch._scaled_mm with a scale for each matrix."""
    x_values, x_scale, w_values, w_scale = rest[-4:]
    return torch._scaled_mm(x_values, w_values.t(), x_scale, w_scale, out_dtype=x.dtype, use_fast_accum=fast)


def per_row(x, w, x_values, x_scale, w_values, w_scale, *_) -> torch.Tensor:
    """Return torch._scaled_mm with a scale for each row."""
    return torch._scaled_mm(x_values, w_values.t(), x_scale, w_scale.t(), out_dtype=x.dtype)


def matmul_case(device: torch.device, m: int, n: int, k: int, names: tuple[str, str]) -> Case:
    """Return a case of x in blocks of names[0] times w in blocks of names[1]."""
    blocks = BLOCKS[names[0]], BLOCKS[names[1]]
    by_blocks_of_k = not {TENSOR, ROW} & {*blocks}

    @cache  # all columns read the same ones
    def make():
        x, w = (random(rows, k, device=device, needs_gradient=False) for rows in (m, n))
        return x, w, *operands(x, w, blocks)

    methods: dict[str, Callable] = {
        "ours": partial(ours, blocks=blocks, matmul=hopper_block_matmul if by_blocks_of_k else fp8_matmul),
        "scaled_mm": partial(per_matrix, fast=False),
        "fast": partial(per_matrix, fast=True),
        "BF16": lambda x, w, *_: torch.mm(x, w.t()),
    }
    if blocks == (ROW, ROW) and supports_row_scales(device, DTYPES[device.type]):
        methods["scaled_mm"] = per_row
    if by_blocks_of_k:
        methods["plain"] = partial(ours, blocks=blocks, matmul=block_matmul)
        methods["blockwise"] = partial(ours, blocks=blocks, matmul=block_scaled_matmul)
    kernel = f"product, {', '.join(dict.fromkeys(names) if not by_blocks_of_k else names)}"
    return Case(
        kernel,
        f"{m:,} x {n:,} x {k:,}",
        make,
        methods,
        {"forward": 2 * m * n * k},
        "TFLOP/s",
        rival="scaled_mm",
        exact=partial(exact_matmul, blocks=blocks),
        about={"m": m, "n": n, "k": k},
    )


def matmul_cases(device: torch.device, which: str) -> Iterator[Case]:
    """Yield cases with one scale per matrix; one per row; tiles times squares (forward, and the input's gradient);
    tiles times tiles (the weight's gradient).
    """
    for m, n, k in SIZES[which]["products"]:
        for names in (("tensor", "tensor"), ("row", "row"), ("1 x 128", "128 x 128"), ("1 x 128", "1 x 128")):
            yield matmul_case(device, m, n, k, names)


def tensors(*results: Quantized | torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return values and scales."""
    return tuple(part for each in results for part in (each[:2] if isinstance(each, Quantized) else (each,)))


def cast_case(
    device: torch.device, rows: int, columns: int, name: str, work: float, fused: Callable, eager: Callable
) -> Case:
    """Return a case of a cast. fused, eager: take x and return the quantized results."""
    methods = {"ours": lambda x: tensors(*fused(x)), "eager": lambda x: tensors(*eager(x))}
    if device.type == "cuda":
        methods["compile"] = torch.compile(methods["eager"], dynamic=False)
    return Case(
        f"cast, {name}",
        f"{rows:,} x {columns:,}",
        lambda: (random(rows, columns, device=device, needs_gradient=False),),
        methods,
        {"forward": work},
    )


def transpose_case(device: torch.device, rows: int, columns: int) -> Case:
    """Return a case that transposes a matrix in tiles, from its 8 bits."""

    def make():
        return tensors(quantize_fused(random(rows, columns, device=device, needs_gradient=False), block=TILE))

    def ours(values, scale):
        return tensors(transpose_tiles(Quantized(values, scale, TILE)))

    def eager(values, scale):
        return tensors(quantize(dequantize(Quantized(values, scale, TILE)).t(), block=TILE))

    methods = {"ours": ours, "eager": eager}
    if device.type == "cuda":
        methods["compile"] = torch.compile(eager, dynamic=False)
    work = 2 * rows * columns + scale_bytes((rows, columns), TILE) + scale_bytes((columns, rows), TILE)
    return Case("cast, tiles turned", f"{rows:,} x {columns:,}", make, methods, {"forward": work})


BOTH = {"tensor, both": (TENSOR, False), "128 x 128, both": (SQUARE, False)}
BOTH |= {"1 x 128, both": (TILE, False), "1 x 128, both, 2^i": (TILE, True)}


def cast_cases(device: torch.device, which: str) -> Iterator[Case]:
    """Yield cases for each kind of blocks; some with the transpose, and with scales that are powers of two; and one
    with a known scale.
    """
    element = DTYPES[device.type].itemsize
    for rows, columns in SIZES[which]["casts"]:
        case, numbers = partial(cast_case, device, rows, columns), rows * columns
        for name, block in BLOCKS.items():
            yield case(
                name,
                numbers * (element + 1) + scale_bytes((rows, columns), block),
                lambda x, block=block: [quantize_fused(x, block=block)],
                lambda x, block=block: [quantize(x, block=block)],
            )
        for name, (block, powers) in BOTH.items():
            others = scale_bytes((columns, rows), block) if block == TILE else 0
            how = {"block": block, "power_of_two": powers}
            yield case(
                name,
                numbers * (element + 2) + scale_bytes((rows, columns), block) + others,
                lambda x, how=how: quantize_both(x, **how),
                lambda x, how=how: [quantize(x, **how), quantize(x.t(), **how)],
            )
        yield transpose_case(device, rows, columns)
        yield case(
            "delayed, both",
            numbers * (element + 2) + 8,
            lambda x: quantize_delayed(x, x.new_full((1, 1), 0.01, dtype=torch.float32)),
            lambda x: delayed(x, x.new_full((1, 1), 0.01, dtype=torch.float32)),
        )


def scale_bytes(shape: tuple[int, int], block: tuple[int, int]) -> int:
    """Return the bytes of the scales of a matrix of this shape."""
    down, across, *_ = blocks_of(shape, block)
    return 4 * down * across


def delayed(x: torch.Tensor, scale: torch.Tensor) -> list[Quantized | torch.Tensor]:
    """Compute `quantize_delayed` by PyTorch's operators."""
    return [quantize(x, scale=scale), quantize(x.t(), scale=scale), block_amax(x, TENSOR)]


def layer(casts: Casts, device: torch.device, cached: bool = False) -> Callable:
    """Return x, w -> x w^T in 8 bits, as an `Fp8Linear` with the weight w computes it; cached: w is quantized the first
    time only.
    """

    @cache
    def quantizers() -> LayerQuantizers:
        made = LayerQuantizers(casts).to(device)
        made.weight.caching = cached
        return made

    def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return Fp8LinearFunction.apply(x, None, [quantizers()], w)[0]

    return multiply


def torchao_layer(device: torch.device) -> Callable:
    """Return torchao's autograd function, with its default recipe: one scale per matrix, computed each time."""

    @cache
    def made() -> Callable:
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

        config = Float8LinearConfig(emulate=device.type == "cpu")
        settings = Float8Linear(16, 16, bias=False, config=config)

        def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return matmul_with_hp_or_float8_args.apply(x, w.t(), settings.linear_mm_config, config)

        return torch.compile(multiply, dynamic=False) if device.type == "cuda" else multiply

    return lambda x, w: made()(x, w)


def layer_cases(device: torch.device, which: str) -> Iterator[Case]:
    """Yield forward and backward of a linear layer, quantization included."""
    for m, n, k in SIZES[which]["products"]:
        methods = {
            "ours": layer(per_tensor(), device),
            "kept": layer(per_tensor(), device, cached=True),
            "blocks": layer(by_blocks(), device),
            "BF16": F.linear,
        }
        if torchao:
            methods["torchao"] = torchao_layer(device)
        flops = 2 * m * n * k
        yield Case(
            "linear",
            f"{m:,} x {n:,} x {k:,}",
            lambda m=m, n=n, k=k: (random(m, k, device=device), random(n, k, device=device)),
            methods,
            {"forward": flops, "backward": 2 * flops, "forward and backward": 3 * flops},
            "TFLOP/s",
            peak=True,
            rival="BF16",
            about={"m": m, "n": n, "k": k},
        )
