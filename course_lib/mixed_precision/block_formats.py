"""Block formats: a few bits per number, and a scale for each short block of numbers.

A number of 4 bits has 8 magnitudes, from 0 to 6. That is enough only with a scale that follows the data: k consecutive
numbers share one, so that number i of block b stands for

    x_i  ≈  tensor_scale · scale_b · element_i                     bits per number = element bits + scale bits / k

              elements    k    scale of a block      of the tensor     bits per number
    MXFP8     E4M3       32    E8M0                  -                 8.25
    MXFP4     E2M1       32    E8M0                  -                 4.25
    NVFP4     E2M1       16    E4M3                  float32           4.5

E8M0 is only an exponent: 2^(code - 127), without sign, zero or mantissa; code 255 is NaN. Its rule

    scale = 2^(floor(log2 amax) - emax)          emax: exponent of the element format's largest number, 8 or 2

puts the largest |x| of a block into the highest binade of the elements, but not at its end. E4M3 ends at 448, not 512,
and E2M1 at 6, not 8: larger values saturate. The largest number of a block is then wrong by up to 1/8, or 1/4. On
normal data that makes MXFP8 worse than E4M3 with one scale for the tensor: blocks guard against outliers, not against
rounding. (Mishra et al. 2025 round the scale up: nothing saturates.)

A scale of E4M3 has a mantissa, so NVFP4 aims at the end: the amax of a block becomes 6, up to the scale's rounding.
E4M3 lacks range. The tensor's scale maps its largest block's scale to 448; a block whose amax is at most 2^-10 / 448 of
the tensor's has a scale of 0, and is lost. The tensor's scale costs a pass over the tensor before the one that rounds.

OCP Microscaling Formats (MX) v1.0, 2023: §5.3 (elements), §5.4.1 (E8M0), §6.3 (conversion); NVIDIA 2025, Pretraining
Large Language Models with NVFP4, §2 and appendix B; Mishra et al. 2025, Recipes for Pre-training LLMs with MXFP8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from course_lib.mixed_precision.formats import (
    E2M1,
    E4M3,
    FP32,
    FloatFormat,
    check_floating,
    decode,
    encode,
    power_of_two,
)

E8M0_BIAS, E8M0_NAN = 127, 255


@dataclass(frozen=True)
class BlockFormat:
    """A format of numbers in blocks; a block shares a scale of 8 bits."""

    name: str
    element: FloatFormat
    block_size: int
    scale: FloatFormat | None  # None: E8M0, a power of two
    tensor_scale: bool  # True: a float32 factor for the full tensor on top of the blocks' scales

    @property
    def bits_per_number(self) -> float:
        """Bits of an element and its share of the block's scale; the tensor's 32 bits are not counted."""
        scale_bits = 8 if self.scale is None else self.scale.bits
        return self.element.bits + scale_bits / self.block_size


MXFP8 = BlockFormat("MXFP8", E4M3, 32, None, False)
MXFP4 = BlockFormat("MXFP4", E2M1, 32, None, False)
NVFP4 = BlockFormat("NVFP4", E2M1, 16, E4M3, True)
BLOCK_FORMATS = {fmt.name: fmt for fmt in (MXFP8, MXFP4, NVFP4)}


class BlockCodes(NamedTuple):
    """Numbers in a block format. Each code is stored as an int64, though it has 4 or 8 bits."""

    elements: torch.Tensor  # [..., blocks, block_size]
    scales: torch.Tensor  # [..., blocks], codes of E8M0 or E4M3
    tensor_scale: torch.Tensor  # float32, no dimensions; 1 if the format has none


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return 2^(code - 127), or NaN for code 255, as float64. codes: integers, of which the lowest 8 bits count."""
    codes = codes.long() & 255
    return torch.where(codes == E8M0_NAN, torch.nan, power_of_two(codes - E8M0_BIAS))


def encode_e8m0(values: torch.Tensor) -> torch.Tensor:
    """Return the codes (int64) of the largest powers of two that are not above the values, from 2^-127 (also for 0) to
    2^127; NaN's code for infinities, NaN and negative numbers.

    (torch's cast rounds to the nearest power instead, halfway up.) Raises ValueError for values that are not
    floating-point.
    """
    check_floating(values)
    values = values.detach().double()
    exponent = torch.where(values > 0, torch.frexp(values).exponent.long() - 1, -E8M0_BIAS)
    code = exponent.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS
    return torch.where(values.isfinite() & (values >= 0), code, E8M0_NAN)


def blocks_of_last_dim(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return x [..., n] as [..., blocks, block_size]; zeros fill the last block."""
    missing = -x.shape[-1] % block_size
    return torch.nn.functional.pad(x, (0, missing)).unflatten(-1, (-1, block_size))


def tensor_scale_of(amax: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Return the float32 that maps the largest finite amax to the largest block scale: amax / (448 · 6)."""
    if not fmt.tensor_scale or fmt.scale is None:
        return torch.ones((), device=amax.device)
    largest = torch.where(amax.isfinite(), amax, 0.0).flatten()
    largest = torch.cat([largest, largest.new_zeros(1)]).amax()  # 0 if there are no blocks
    return (largest / (fmt.scale.largest * fmt.element.largest)).clamp(FP32.smallest_normal, FP32.largest).float()


def encode_blocks(x: torch.Tensor, fmt: BlockFormat) -> BlockCodes:
    """Encode x [..., n] in blocks of its last dimension. Elements are rounded to nearest, ties to even, and saturate.

    If a block has an infinity or NaN, its scale is NaN, and with it the block; other blocks are not affected. Raises
    ValueError if x is not floating-point, or has no dimensions.
    """
    check_floating(x)
    if x.ndim == 0:
        raise ValueError("blocks are along the last dimension, and a scalar tensor has none")
    blocks = blocks_of_last_dim(x.detach().double(), fmt.block_size)
    amax = blocks.abs().amax(-1)  # NaN if the block has one
    tensor_scale = tensor_scale_of(amax, fmt)
    if fmt.scale is None:
        scales = encode_e8m0(amax / 2.0 ** math.floor(math.log2(fmt.element.largest)))
        scale = decode_e8m0(scales)
    else:
        scales = encode(amax / fmt.element.largest / tensor_scale.double(), fmt.scale)
        scale = decode(scales, fmt.scale) * tensor_scale.double()
    scaled = blocks / torch.where(scale == 0, torch.inf, scale)[..., None]  # blocks too small for a scale become 0
    return BlockCodes(encode(scaled, fmt.element, saturate=True), scales, tensor_scale)


def decode_blocks(codes: BlockCodes, fmt: BlockFormat, n: int) -> torch.Tensor:
    """Return the numbers that the codes represent, [..., n] float64, without the padding of the last block."""
    scale = decode_e8m0(codes.scales) if fmt.scale is None else decode(codes.scales, fmt.scale)
    scale = scale * codes.tensor_scale.double()
    return (decode(codes.elements, fmt.element) * scale[..., None]).flatten(-2)[..., :n]


def round_to_blocks(x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Round x [..., n] to a block format; return float64 of the same shape. Raises ValueError as encode_blocks does."""
    return decode_blocks(encode_blocks(x, fmt), fmt, x.shape[-1])


def relative_error(rounded: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the errors over the norm of the exact values. Reads the tensors on the host."""
    return ((rounded - exact).norm() / exact.norm()).item()


def block_errors(x: torch.Tensor) -> dict[str, float]:
    """Return the relative error of x [..., n] in each block format, by name."""
    return {name: relative_error(round_to_blocks(x, fmt), x.double()) for name, fmt in BLOCK_FORMATS.items()}
