"""Quantizers: how each operand of an FP8 layer gets its scale, as in NVIDIA's Transformer Engine.

    CurrentQuantizer    the scale of the matrix's own amax: all of it is read before the first element is rounded
    DelayedQuantizer    the scale of the largest amax of the last steps: the matrix is read once (`delayed_scaling`)
    StoredQuantizer     the scale of a weight that is kept in 8 bits; nothing is quantized

A layer has one quantizer for each role (`LayerQuantizers`). Two scales take precedence over the quantizer's own: a
scale passed with the matrix (of the same matrix, from before), and `gathered_scale`, which the all-gather of ZeRO-3 has
computed over the full weight (`Fp8Gather`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from course_lib.fp8.casts import transpose_tiles
from course_lib.fp8.operands import (
    Cast,
    Float32Buffers,
    RowColumnQuantized,
    Split,
    cast_matrix,
    has_transpose_kernel,
    with_transposed,
)
from course_lib.fp8.quantization import FULL, TILE, Quantized, dequantize, scale_of


class CachedWeight(NamedTuple):
    """A weight quantized row-wise and column-wise, valid while `source` is the same memory in the same version."""

    source: torch.Tensor
    version: int
    quantized: RowColumnQuantized

    def is_valid_for(self, x: torch.Tensor) -> bool:
        """True if `x` is the memory that was quantized, unchanged since."""
        return self.source.is_set_to(x) and self.version == x._version


class Quantizer(Float32Buffers):
    """Quantizes the operands of one role of one layer.

    splits: the groups over which the operands are split; ranks that share a block share its scale. columnwise: in
    training, the transpose is needed too. `quantized_once` sets `caching`: a weight is quantized once and kept in
    `cached`.
    """

    def __init__(self, cast: Cast, splits: tuple[Split, ...] = (), columnwise: bool = False):
        super().__init__()
        self.cast, self.splits, self.columnwise = cast, splits, columnwise
        self.gathered_scale: torch.Tensor | None = None
        self.caching = False
        self.cached: CachedWeight | None = None

    def groups(self, transposed: bool = False) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups whose ranks share a block of the (transposed) matrix."""
        return tuple(s.group for s in self.splits if self.cast.block[1 - s.dim if transposed else s.dim] == FULL)

    def next_scale(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the scales of a matrix whose blocks have this amax [blocks of rows, blocks of columns] over all
        ranks.
        """
        return scale_of(amax, self.cast.dtype, self.cast.power_of_two)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Quantized:
        """Return x [rows, k] in 8 bits. scale: of the same x, from before. Raises ValueError for an x that is in
        8 bits already.
        """
        if x.itemsize == 1:
            raise ValueError(f"{x.dtype} and no stored scale: `LayerQuantizers.store_weight` makes both")
        if self.caching:
            return self.quantize_cached(x)
        return self.quantize(x, scale, self.columnwise and self.training or scale is not None)

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None, columnwise: bool) -> Quantized:
        """Return x in 8 bits, by the scale if it is given. columnwise: with its transpose, where one pass over x makes
        both.
        """
        scale = self.gathered_scale if scale is None else scale
        if scale is None:
            return self.quantize_unscaled(x, columnwise)
        return self.cast_by(scale, x, columnwise)

    def quantize_unscaled(self, x: torch.Tensor, columnwise: bool) -> Quantized:
        """Return x in 8 bits, by the quantizer's own scale."""
        raise NotImplementedError

    def cast_by(self, scale: torch.Tensor | None, x: torch.Tensor, columnwise: bool) -> Quantized:
        """Return x in 8 bits, by the scale, or by the amax of each of its blocks."""
        return cast_matrix(x, self.cast, scale, self.groups(), both=columnwise)

    def quantize_cached(self, x: torch.Tensor) -> RowColumnQuantized:
        """Return x in 8 bits, row-wise and column-wise: from the cache, or quantized and cached."""
        if self.cached is None or not self.cached.is_valid_for(x):
            quantized = self.quantize(x, None, True)
            if not isinstance(quantized, RowColumnQuantized):
                quantized = with_transposed(quantized, self.transposed(quantized, x))
            self.cached = CachedWeight(x.detach(), x._version, quantized)
        return self.cached.quantized

    def transposed(self, quantized: Quantized, x: torch.Tensor | None = None) -> Quantized:
        """Return the transpose of a quantized matrix, for a matmul over its rows. Where blocks differ both ways, the
        transpose is quantized again: from x, or from its dequantized values.
        """
        if isinstance(quantized, RowColumnQuantized):
            return quantized.transposed
        if self.cast.block[0] == self.cast.block[1]:
            return quantized.t()
        if x is None and self.cast.block == TILE and has_transpose_kernel(quantized.values):
            return transpose_tiles(quantized, self.cast.power_of_two)
        x = dequantize(quantized) if x is None or x.itemsize == 1 else x
        return cast_matrix(x, self.cast, None, self.groups(True), transposed=True)


class CurrentQuantizer(Quantizer):
    """Quantizes by the amax of each block of the matrix itself."""

    def quantize_unscaled(self, x: torch.Tensor, columnwise: bool) -> Quantized:
        return self.cast_by(None, x, columnwise)


class StoredQuantizer(CurrentQuantizer):
    """Pairs a weight that is kept in 8 bits with its scale."""

    stored_scale: torch.Tensor | None

    def __init__(self, cast: Cast, splits: tuple[Split, ...] = ()):
        super().__init__(cast, splits)
        self.register_buffer("stored_scale", None)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Quantized:
        """Return the stored weight x [out, in] with its scale. Raises ValueError for an x that is not in 8 bits, or
        before `store`.
        """
        if x.itemsize != 1 or self.stored_scale is None:
            has = "no" if self.stored_scale is None else "a"
            raise ValueError(f"{x.dtype} and {has} stored scale: `LayerQuantizers.store_weight` makes both")
        return Quantized(x.detach(), self.stored_scale, self.cast.block)

    def store(self, weight: torch.Tensor) -> torch.Tensor:
        """Return weight [out, in] in 8 bits, to be kept in its place, and keep the scale here."""
        stored = cast_matrix(weight, self.cast, None, self.groups())
        self.stored_scale = stored.scale
        return stored.values
