"""Matmuls in 8 bits: `fp8_matmul`, and a model of an accumulator with few bits.

    out = (values_a · scale_a) (values_b · scale_b)ᵀ          a: [m, k], b: [n, k]: k is last in both

The product of two e4m3 numbers has 8 bits of mantissa, exact in float32. Only the sum over k rounds. A scale that holds
for a full row can be factored out, and the tensor cores multiply 8-bit numbers alone (`torch._scaled_mm`). If it
changes along k, every 128 elements say, partial sums have to be scaled one by one (`block_matmul`).

The tensor cores of an H100 add FP8 products with some 14 bits, not with float32's 24: DeepSeek-V3 (2024, §3.3.2 and
§3.5.2) measured it, found errors near 2% at k = 4096, and adds up in float32 registers every 128 elements instead.
`short_sum_matmul` is a model of this accumulator; `emulated_matmul` adds in float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from course_lib.fp8.hopper import hopper_block_matmul
from course_lib.fp8.kernels import block_matmul, same_k_blocks
from course_lib.fp8.quantization import FULL, SQUARE, TILE, Quantized, dequantize, in_blocks


@dataclass
class Dispatch:
    """The kernel choice of `fp8_matmul` in this process."""

    block_kernel_only: bool = False  # set by `by_block_kernel`


DISPATCH = Dispatch()


@contextlib.contextmanager
def by_block_kernel() -> Iterator[None]:
    """Have `fp8_matmul` run `block_matmul` inside, on any device, if the scales of both operands change along k.

    Otherwise it emulates these matmuls on a CPU, where Triton interprets the kernel, and prefers faster kernels on a
    Hopper GPU.
    """
    before, DISPATCH.block_kernel_only = DISPATCH.block_kernel_only, True
    try:
        yield
    finally:
        DISPATCH.block_kernel_only = before


def check_operands(a: Quantized, b: Quantized) -> None:
    """Raise ValueError if a [m, k] and b [n, k] cannot be multiplied."""
    if a.values.shape[1] != b.values.shape[1]:
        raise ValueError(f"k is last in both and must agree: {list(a.values.shape)} and {list(b.values.shape)}")
    if a.values.device != b.values.device:
        raise ValueError(f"operands on {a.values.device} and {b.values.device}")


def has_scaled_mm(device: torch.device) -> bool:
    """True for GPUs with FP8 tensor cores (Ada, Hopper, and later), where `torch._scaled_mm` multiplies on them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def padded_to_16(values: torch.Tensor) -> torch.Tensor:
    """Return values [rows, k] padded with zeros to multiples of 16, which cuBLAS requires."""
    missing = -values.shape[1] % 16, -values.shape[0] % 16
    if any(missing):
        values = F.pad(values.view(torch.uint8), (0, missing[0], 0, missing[1])).view(values.dtype)
    return values.contiguous()


def supports_row_scales(device: torch.device, out_dtype: torch.dtype) -> bool:
    """True if `torch._scaled_mm` takes a scale for each row: on GPUs, and only for results in bfloat16."""
    return device.type == "cuda" and out_dtype == torch.bfloat16


def row_scaled_matmul(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
    """Return `torch._scaled_mm` for scales of full matrices or full rows: [m, n] in out_dtype."""
    (m, _), n = a.values.shape, len(b.values)
    left, right = padded_to_16(a.values), padded_to_16(b.values).t()  # the second one is column-major
    if a.scale.numel() == b.scale.numel() == 1:
        return torch._scaled_mm(left, right, a.scale, b.scale, out_dtype=out_dtype)[:m, :n].contiguous()
    if supports_row_scales(left.device, out_dtype):
        of_rows = F.pad(a.scale.expand(m, 1), (0, 0, 0, len(left) - m), value=1.0).contiguous()
        of_columns = F.pad(b.scale.expand(n, 1), (0, 0, 0, right.shape[1] - n), value=1.0).t().contiguous()
        return torch._scaled_mm(left, right, of_rows, of_columns, out_dtype=out_dtype)[:m, :n].contiguous()
    one = torch.ones((), device=left.device)
    sums = torch._scaled_mm(left, right, one, one, out_dtype=torch.float32)[:m, :n]
    return (sums * a.scale * b.scale.t()).to(out_dtype)


def float32_matmul(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply the codes in float32 and apply the scales of full matrices or full rows: [m, n] in out_dtype.

    For CPUs, and GPUs without FP8 tensor cores. The product of two codes is exact in float32, and in TF32 too. CPUs
    have `torch._scaled_mm` as well, but on some it is oneDNN's reference loop, hundreds of times slower than this.
    """
    with torch.autocast(a.values.device.type, enabled=False):  # autocast would multiply and add in bf16
        return (a.values.float() @ b.values.float().t() * a.scale * b.scale.t()).to(out_dtype)


def supports_block_scales(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> bool:
    """True if cuBLAS multiplies these block-scaled matrices: on Hopper, from CUDA 12.9 on; two matrices in tiles, or
    one in squares and one in tiles, both in e4m3; sides that are multiples of 16.
    """
    (m, k), n, device = a.values.shape, len(b.values), a.values.device
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    cuda = hopper and torch.version.cuda and tuple(map(int, torch.version.cuda.split("."))) >= (12, 9)
    blocks = {a.block, b.block} <= {TILE, SQUARE} and TILE in (a.block, b.block)
    types = out_dtype != torch.float64 and a.values.dtype == b.values.dtype == torch.float8_e4m3fn
    return bool(cuda and blocks and types and hasattr(F, "scaled_mm") and not (m % 16 or n % 16 or k % 16))


def scales_for_cublas(x: Quantized) -> tuple[torch.Tensor, F.ScalingType]:
    """Return the scales of x in cuBLAS's layout, and their kind. Tiles: [rows, blocks of k], column-major. Squares:
    [blocks of k, squares down], column-major, with blocks of k padded to a multiple of 4.
    """
    if x.block == TILE:
        return x.scale.t().contiguous().t(), F.ScalingType.BlockWise1x128
    return F.pad(x.scale, (0, -x.scale.shape[1] % 4)).contiguous().t(), F.ScalingType.BlockWise128x128


def block_scaled_matmul(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply by cuBLAS, if `supports_block_scales`: [m, n] in out_dtype. It sums in float32, as `block_matmul`."""
    left, right = a.values.contiguous(), b.values.contiguous().t()
    (scale_a, kind_a), (scale_b, kind_b) = scales_for_cublas(a), scales_for_cublas(b)
    return F.scaled_mm(left, right, scale_a, kind_a, scale_b, kind_b, output_dtype=out_dtype)


def emulated_matmul(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply with any scales on any device: [m, n] in out_dtype, exact in float64 but for the sum's last bits, and
    then rounded once.
    """
    return (dequantize(a, torch.float64) @ dequantize(b, torch.float64).t()).to(out_dtype)


def fp8_matmul(a: Quantized, b: Quantized, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a [m, k] times the transpose of b [n, k]: [m, n] in out_dtype. On FP8 tensor cores if the GPU has them: by
    cuBLAS (`torch._scaled_mm`) for scales of full rows, and on Hopper for most blocks; other blocks by
    `hopper_block_matmul` on Hopper, by `block_matmul` on other GPUs. Otherwise in float32 for scales of full rows, and
    emulated in float64 for other blocks, except inside `by_block_kernel`. Results in float64, empty operands, and meta
    tensors are always emulated.

    Raises ValueError if shapes or devices do not fit, and for a result in 8 bits.
    """
    check_operands(a, b)
    if out_dtype.itemsize == 1:
        raise ValueError(f"a result in {out_dtype} has no scale; for a weight's gradient, set weight.grad_dtype")
    if out_dtype == torch.float64 or a.values.is_meta or 0 in (a.values.numel(), b.values.numel()):
        return emulated_matmul(a, b, out_dtype)
    if DISPATCH.block_kernel_only and same_k_blocks(a, b):
        return block_matmul(a, b, out_dtype)
    on_tensor_cores = has_scaled_mm(a.values.device)
    if a.block[1] == b.block[1] == FULL:
        return (row_scaled_matmul if on_tensor_cores else float32_matmul)(a, b, out_dtype)
    if not (on_tensor_cores and same_k_blocks(a, b)):
        return emulated_matmul(a, b, out_dtype)
    if supports_block_scales(a, b, out_dtype):
        return block_scaled_matmul(a, b, out_dtype)
    if torch.cuda.get_device_capability(a.values.device)[0] == 9:
        return hopper_block_matmul(a, b, out_dtype)
    return block_matmul(a, b, out_dtype)


def truncate_to(values: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Round values toward zero to multiples of `unit`."""
    return (values / unit).trunc() * unit


def short_sum_matmul(
    a: Quantized, b: Quantized, bits: int = 14, per_instruction: int = 32, promote: int | None = None
) -> torch.Tensor:
    """Multiply as a tensor core with an accumulator of few bits does: [m, n] float32. For scales of full matrices or
    full rows; takes memory for m n `per_instruction` elements.

    One instruction adds `per_instruction` products to the sum so far. All are shifted to the largest one's exponent,
    and what falls below `bits` bits is cut. promote: after this many elements of k the sum is added to a float32 and
    starts again. Raises ValueError for other scales, and if promote is not a multiple of per_instruction.
    """
    check_operands(a, b)
    if not a.block[1] == b.block[1] == FULL:
        raise ValueError(f"short sums are for scales that hold for all of k, not for blocks of {a.block} and {b.block}")
    if promote and promote % per_instruction:
        raise ValueError(f"promote after {promote} elements: an instruction adds {per_instruction} of them")
    left, right = (in_blocks(each.values.double(), (1, per_instruction)).squeeze(1) for each in (a, b))  # [m, k/32, 32]
    total = left.new_zeros(len(left), len(right))
    sums = total.clone()
    for step in range(left.shape[1]):
        terms = torch.cat([left[:, None, step] * right[None, :, step], sums[..., None]], -1)  # [m, n, 33]
        _, exponent = torch.frexp(terms.abs().amax(-1, keepdim=True))
        unit = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - bits)
        sums = truncate_to(terms, unit).sum(-1)
        if promote and (step + 1) * per_instruction % promote == 0:
            total, sums = (total + sums).float().double(), torch.zeros_like(sums)
    return ((total + sums) * a.scale * b.scale.t()).float()
