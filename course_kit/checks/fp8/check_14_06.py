"""Check of exercise 14.6: `block_matmul_kernel` is exact within its tensors, and runs on an H100's FP8 tensor cores."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from unittest import mock

import torch
from triton.runtime.interpreter import InterpreterBuilder

from course_kit.checks.kernels import run_guarded
from course_kit.gpu.compiled import compile_kernel
from course_kit.labs.fp8.kernels import block_launch
from course_lib.fp8 import kernels
from course_lib.fp8.quantization import SQUARE, TILE, Quantized, quantize
from course_lib.fp8.scaled_matmul import emulated_matmul
from course_lib.mixed_precision.block_formats import relative_error

CASES = (  # m, n, k, the blocks of a and of b; rows and columns of a program's tile, rows of tiles in a group
    (70, 40, 300, TILE, SQUARE, 64, 64, 8),
    (64, 130, 128, TILE, TILE, 64, 64, 8),
    (5, 7, 515, TILE, SQUARE, 64, 64, 8),
    (140, 40, 130, SQUARE, SQUARE, 32, 16, 2),
)


NAN = 0x7F  # in E4M3 and in E5M2


@contextlib.contextmanager
def bytes_within(most_loads: int, *tensors: torch.Tensor) -> Iterator[None]:
    """Raise AssertionError if an interpreted kernel loads 8-bit elements from outside of these tensors, or loads more
    often than that. Inside, masked-off lanes of a load without `other` are NaN: on a GPU they are undefined.
    """
    load, strays, made = InterpreterBuilder.create_masked_load, [], []

    def watching(self, pointers, mask, other, *rest, **options):
        made.append(pointers)
        if pointers.get_element_ty().is_fp8():
            at = pointers.data[mask.data]
            inside = [(at >= x.data_ptr()) & (at < x.data_ptr() + x.nbytes) for x in tensors]
            strays.append(int((sum(inside) == 0).sum()))
        loaded = load(self, pointers, mask, other, *rest, **options)
        if other is None and loaded.data.itemsize == 1:
            loaded.data[~mask.data.astype(bool)] = NAN
        return loaded

    with mock.patch.object(InterpreterBuilder, "create_masked_load", watching):
        yield
    assert not any(strays), f"{sum(strays)} lanes load 8-bit elements outside of a and b: mask rows, columns and k"
    assert len(made) <= most_loads, (
        f"{len(made)} loads in all programs, and {most_loads} are enough: of two tiles and their scales for each block"
    )


def run_block(
    values_a: torch.Tensor, values_b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    block_a: tuple[int, int], block_b: tuple[int, int], block_m: int, block_n: int, group: int,
) -> torch.Tensor:  # fmt: skip
    """Return [m, n] float32, by one launch of the kernel without its autotuner."""
    a, b = Quantized(values_a, scale_a, block_a), Quantized(values_b, scale_b, block_b)
    out = torch.empty(len(values_a), len(values_b), device=values_a.device)
    arguments, constants = block_launch(a, b, out, block_m, block_n)
    tiles = -(-out.shape[0] // block_m) * -(-out.shape[1] // block_n)
    with bytes_within(4 * tiles * -(-values_a.shape[1] // 128), values_a, values_b):
        kernels.block_matmul_kernel.fn[(tiles,)](*arguments, **constants | {"group": group})
    return out


def check() -> None:
    """Assert results against float64 in ragged sizes, between guard bands; then the code for an H100."""
    kernel = kernels.block_matmul_kernel.fn
    for m, n, k, block_a, block_b, block_m, block_n, group in CASES:
        torch.manual_seed(m)
        x, w = torch.randn(m, k) * torch.logspace(-3, 3, k), torch.randn(n, k) * torch.logspace(3, -3, k)
        a, b = quantize(x, block=block_a), quantize(w, torch.float8_e5m2 if m == 5 else torch.float8_e4m3fn, block_b)
        given = a.values, b.values, a.scale, b.scale, a.block, b.block, block_m, block_n, group
        out = run_guarded(kernel, run_block, *given)
        assert not out.isnan().any(), (
            f"[{m}, {k}] by [{n}, {k}]: {int(out.isnan().sum())} of {out.numel()} elements are NaN: elements that a "
            "mask leaves out are undefined unless the load says other=0.0"
        )
        off = relative_error(out.double(), emulated_matmul(a, b, torch.float64))
        assert off < 1e-5, (
            f"[{m}, {k}] by [{n}, {k}]: off by {off:.1e} of the result. Each block of 128 has scales "
            "of its own, and its sum starts at 0; the last block may be short; the total is float32"
        )
    names = kernel.fn.__code__.co_names
    assert "dot_fp8" in names and "dot" not in names, "the matmul is dot_fp8, of the 8 bits as they were loaded"
    large = quantize(torch.randn(256, 256), block=TILE), quantize(torch.randn(256, 256), block=SQUARE)
    arguments, constants = block_launch(*large, torch.empty(256, 256, dtype=torch.bfloat16), 128, 128)
    compiled = compile_kernel(kernel, *arguments, **constants, num_warps=8, num_stages=3)
    matmuls = re.findall(r"wgmma\.mma_async\S*\.(\w+\.\w+);?\s", compiled.ptx)
    assert len(matmuls) == 4 and set(matmuls) == {"e4m3.e4m3"}, (
        f"a block is 4 FP8 matmuls of 32 on an H100, not {matmuls}"
    )
    assert compiled.spilled_bytes == 0, f"{compiled.spilled_bytes} bytes per thread spill"
