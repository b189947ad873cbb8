"""Costs of notebook 14b's kernels: instructions and registers of the compiled matmul, bytes of the casts, and times
measured on GPUs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import course_lib
from course_kit.gpu.compiled import compile_launches
from course_kit.gpu.launches import Launch, record_launches
from course_kit.gpu.transactions import count_transactions
from course_kit.typed import grad_of
from course_lib.fp8 import kernels
from course_lib.fp8.linear import Fp8Linear, quantized_once
from course_lib.fp8.operands import Casts
from course_lib.fp8.quantization import SQUARE, TILE, Quantized, quantize
from course_lib.fp8.quantizers import Quantizer

RESULTS = Path(course_lib.__file__).parents[1] / "benchmarks" / "results"


def block_launch(
    a: Quantized, b: Quantized, out: torch.Tensor, block_m: int = 64, block_n: int = 64
) -> tuple[tuple, dict]:
    """Return the arguments and the constants of block_matmul_kernel for these operands."""
    (m, k), n = a.values.shape, len(b.values)
    strides = *a.scale.stride(), *b.scale.stride()
    constants = {
        "rows_a": a.block[0],
        "rows_b": b.block[0],
        "block_k": 128,
        "block_m": block_m,
        "block_n": block_n,
        "group": 8,
    }
    return (a.values, b.values, out, a.scale, b.scale, m, n, k, *strides), constants


def print_block_kernels() -> None:
    """Compile block_matmul_kernel for an H100 in each of its configurations, and print its cost."""
    operands = quantize(torch.randn(256, 256), block=TILE), quantize(torch.randn(256, 256), block=SQUARE)
    launches = []
    for configuration in kernels.BLOCK_MATMUL_CONFIGURATIONS:
        tile = configuration.kwargs["block_m"], configuration.kwargs["block_n"]
        arguments, constants = block_launch(*operands, torch.empty(256, 256, dtype=torch.bfloat16), *tile)
        options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
        launches.append(Launch(kernels.block_matmul_kernel.fn, (1,), arguments, constants | options))
    print(f"{'tile':>9s} warps stages registers spills shared KB   FP8 matmuls   multiply, fused add per iteration")
    for launch, compiled in zip(launches, compile_launches(launches), strict=True):
        names = ("wgmma.mma_async", "fma.rn.f32", "mul.f32")
        matmuls, fused, multiplied = (compiled.ptx.count(name) for name in names)
        print(
            f"{launch.meta['block_m']:5d}x{launch.meta['block_n']:3d} {compiled.num_warps:5d} "
            f"{launch.meta['num_stages']:6d} {compiled.registers:9d} {compiled.spilled_bytes:6d} "
            f"{compiled.shared_bytes / 1000:9.0f} {matmuls:14d} {multiplied:13d}, {fused}"
        )


def bytes_per_element(run: Callable[[torch.Tensor], object], x: torch.Tensor) -> tuple[float, float]:
    """Return the bytes that the kernels of run(x) load and store for each element of x, in sectors of 32 bytes."""
    with record_launches() as launches:
        run(x)
    counted = [count_transactions(each.kernel, each.grid, *each.args, **each.meta) for each in launches]
    loaded, stored = (sum(32 * each.sectors(kind) for each in counted) / x.numel() for kind in ("load", "store"))
    return loaded, stored


def count_casts(casts: Casts, keep: bool) -> tuple[int, torch.Tensor]:
    """Return how often a weight is quantized in four micro-batches, forward and backward, and its gradient.

    keep: use `quantized_once`.
    """
    torch.manual_seed(0)
    layer, seen, quantize_weight = Fp8Linear(nn.Linear(160, 96, bias=False), casts), [], Quantizer.quantize

    def counted(quantizer, x, *args):
        seen.append(x.is_set_to(layer.weight))
        return quantize_weight(quantizer, x, *args)

    with mock.patch.object(Quantizer, "quantize", counted), quantized_once(layer) if keep else contextlib.nullcontext():
        for _ in range(4):
            layer(torch.randn(64, 160)).square().sum().backward()
    return sum(seen), grad_of(layer.weight)


def print_gpu_results() -> None:
    """Print the FP8 results recorded by `make gpu`: rates of kernels against their rivals, and steps."""
    names = ("fp8", "steps")
    paths = [path for name in names for path in sorted(RESULTS.glob(f"{name}_*.json")) if "cpu" not in path.name]
    if not paths:
        print("No GPU has run `make gpu` yet: there is no figure to show.")
    for path in paths:
        record = json.loads(path.read_text())
        print(path.name, record["date"], record["machine"])
        for row in (row for rows in record.values() if isinstance(rows, list) for row in rows):
            if "ms" in row:
                against = [f"{1 / ratio:.2f} of {column}" for column, ratio in row["ours_against"].items()]
                name = f"{row['kernel']}, {row['size']}, {row['pass']}"
                print(f"  {name:60s} {row['rate']:7,.0f} {row['unit']}\n     ", ", ".join(against))
            elif "way" in row:
                print(f"  {row['way']:20s} {row['step_s']:.3f} s per step, MFU {row['mfu'] or 0:.0%}")
        for pair, timed in record.get("in turns", {}).items():
            print(f"  step, in turns: {pair} {timed['ratio']:.2f}")


def fp8_speedup(
    m: int, n: int, k: int, cast_bytes: float, bf16: float = 989e12, fp8: float = 1979e12, bandwidth: float = 3.35e12
) -> float:
    """Return the time of a linear layer's three matmuls in BF16 over that in FP8 with its casts: a bound from data
    sheets.

    cast_bytes: bytes moved per number; bf16, fp8: FLOP/s; bandwidth: bytes/s of memory.
    """
    flops = 6 * m * n * k
    return (flops / bf16) / (flops / fp8 + cast_bytes * (m * k + n * k + m * n) / bandwidth)
