"""How an operand of an FP8 product is quantized: `Cast` says it, `cast_matrix` does it, by a kernel where there is one.

`RowColumnQuantized` is a matrix and its transpose from one look: backward wants operands the other way round (`linear`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_lib.fp8.casts import CAST_DTYPES, FUSED_BLOCKS, block_amax_fused, quantize_both, quantize_fused
from course_lib.fp8.quantization import SQUARE, TENSOR, Quantized, block_amax, quantize


class Cast(NamedTuple):
    """How the operands of one role are quantized."""

    dtype: torch.dtype = torch.float8_e4m3fn
    block: tuple[int, int] = TENSOR  # k is last
    power_of_two: bool = False
    history: int = 0  # steps whose amax decides the scale (delayed); 0: the matrix's own (current)


class Casts(NamedTuple):
    """How a linear layer quantizes, by role."""

    input: Cast
    weight: Cast
    gradient: Cast


class Split(NamedTuple):
    """A matrix is split over a group along a dimension."""

    dim: int
    group: dist.ProcessGroup


class RowColumnQuantized(Quantized):
    """A matrix in 8 bits, and `turned`, its transpose in 8 bits: made by one look at it."""

    turned: Quantized


def with_transposed(straight: Quantized, turned: Quantized) -> RowColumnQuantized:
    """Both in one."""
    found = RowColumnQuantized(*straight)
    found.transposed = turned
    return found


def has_kernels(x: torch.Tensor, block: tuple[int, int]) -> bool:
    """Whether kernels quantize x in such blocks; interpreted they would take long."""
    return x.is_cuda and x.dtype in CAST_DTYPES and block in FUSED_BLOCKS


def has_transpose_kernel(values: torch.Tensor) -> bool:
    """Whether a kernel turns tiles of 8 bits."""
    return values.is_cuda


def cast_matrix(
    x: torch.Tensor, cast: Cast, scale: torch.Tensor | None, groups: tuple = (), transposed: bool = False,
    both: bool = False,
) -> Quantized:  # fmt: skip
    """x, or its transpose, quantized: on a GPU by the kernel that reads x as seldom as can be, where there is one.
    both: there the transpose comes with it, from one look at x.
    """
    if not has_kernels(x, cast.block) or groups and scale is None:
        return quantize(x.t() if transposed else x, cast.dtype, cast.block, cast.power_of_two, scale, groups)
    if both and (scale is None or cast.block in (TENSOR, SQUARE)):
        return with_transposed(*quantize_both(x, cast.dtype, cast.block, cast.power_of_two, scale))
    return quantize_fused(x, cast.dtype, cast.block, cast.power_of_two, scale, transposed)


def amax_of(x: torch.Tensor, groups: tuple = ()) -> torch.Tensor:
    """`block_amax` of all of x, [1, 1], over the ranks of the groups; on a GPU in one pass."""
    if not has_kernels(x, TENSOR):
        return block_amax(x, TENSOR, groups)
    amax = block_amax_fused(x)
    for group in groups:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    return amax


class Float32Buffers(nn.Module):
    """A module whose buffers, scales and amaxes, stay in float32 when the model takes another dtype."""

    def _apply(self, fn, recurse=True):
        """As nn.Module's, for .to() and the like; scales and amax stay float32."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.dtype != torch.float32:
                self._buffers[name] = before[name].to(buffer.device)
        return self
