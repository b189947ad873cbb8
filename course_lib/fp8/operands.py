"""The operands of an FP8 matmul: `Cast` says how one is quantized, `cast_matrix` quantizes it, by a kernel if there is
one.

`RowColumnQuantized` is a matrix quantized row-wise and column-wise in one pass: backward reads the operands of forward
transposed (`linear`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_lib.fp8.casts import CAST_DTYPES, FUSED_BLOCKS, block_amax_fused, quantize_both, quantize_fused
from course_lib.fp8.quantization import SQUARE, TENSOR, Quantized, block_amax, quantize


class Cast(NamedTuple):
    """The quantization of one role's operands."""

    dtype: torch.dtype = torch.float8_e4m3fn
    block: tuple[int, int] = TENSOR  # k is last
    power_of_two: bool = False
    history: int = 0  # steps whose amax decides the scale (delayed); 0: the matrix's own (current)


class Casts(NamedTuple):
    """The casts of a linear layer's operands, by role."""

    input: Cast
    weight: Cast
    gradient: Cast


class Split(NamedTuple):
    """A matrix is split over a group along a dimension."""

    dim: int
    group: dist.ProcessGroup


class RowColumnQuantized(Quantized):
    """A matrix in 8 bits row-wise, and column-wise: `transposed` is its transpose in 8 bits."""

    transposed: Quantized


def with_transposed(quantized: Quantized, transposed: Quantized) -> RowColumnQuantized:
    """Return the matrix together with its transpose."""
    both = RowColumnQuantized(*quantized)
    both.transposed = transposed
    return both


def has_kernels(x: torch.Tensor, block: tuple[int, int]) -> bool:
    """True if kernels quantize x in these blocks. False on a CPU: interpreted, they would be slow."""
    return x.is_cuda and x.dtype in CAST_DTYPES and block in FUSED_BLOCKS


def has_transpose_kernel(values: torch.Tensor) -> bool:
    """True if a kernel transposes tiles of 8 bits."""
    return values.is_cuda


def cast_matrix(
    x: torch.Tensor, cast: Cast, scale: torch.Tensor | None, groups: tuple[dist.ProcessGroup, ...] = (),
    transposed: bool = False, both: bool = False,
) -> Quantized:  # fmt: skip
    """Return x, or its transpose, quantized: on a GPU by the kernel that reads x fewest times, if there is one.
    both: the kernel then writes x and its transpose in one pass over x.
    """
    if not has_kernels(x, cast.block) or groups and scale is None:
        return quantize(x.t() if transposed else x, cast.dtype, cast.block, cast.power_of_two, scale, groups)
    if both and (scale is None or cast.block in (TENSOR, SQUARE)):
        return with_transposed(*quantize_both(x, cast.dtype, cast.block, cast.power_of_two, scale))
    return quantize_fused(x, cast.dtype, cast.block, cast.power_of_two, scale, transposed)


def amax_of(x: torch.Tensor, groups: tuple[dist.ProcessGroup, ...] = ()) -> torch.Tensor:
    """Return the `block_amax` of all of x, [1, 1], over the ranks of the groups; on a GPU in one pass."""
    if not has_kernels(x, TENSOR):
        return block_amax(x, TENSOR, groups)
    amax = block_amax_fused(x)
    for group in groups:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    return amax


class Float32Buffers(nn.Module):
    """A module whose buffers, scales and amaxes, stay in float32 when the model is cast to another dtype."""

    def _apply(self, fn, recurse=True):
        """Apply fn as nn.Module does, for .to() and the like, but keep buffers in float32."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            original = before[name]
            if buffer is not None and original is not None and buffer.dtype != torch.float32:
                self._buffers[name] = original.to(buffer.device)
        return self
