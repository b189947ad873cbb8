"""Block formats: a few bits a number, and a scale for each short block of numbers.

A number of 4 bits has 8 magnitudes, from 0 to 6. What makes that enough is a scale that follows the data: k numbers in
a row share one, so that number i of block b stands for

    x_i  ≈  tensor_scale · scale_b · element_i                       bits a number = element bits + scale bits / k

              elements    k    scale of a block      of the tensor     bits a number
    MXFP8     E4M3       32    E8M0                  -                 8.25
    MXFP4     E2M1       32    E8M0                  -                 4.25
    NVFP4     E2M1       16    E4M3                  float32           4.5

E8M0 is an exponent and nothing else: 2^(code - 127), without sign, zero or mantissa; code 255 is NaN. The rule for it

    scale = 2^(floor(log2 amax) - emax)          emax: exponent of the element format's largest number, 8 or 2

puts the largest |x| of a block into the highest binade of the elements, but not at its end. E4M3 ends at 448 and not at
512, E2M1 at 6 and not at 8: what comes to lie above is cut down to it. It is the largest number of its block that is
then wrong by up to 1/8, or 1/4. On normal data that makes MXFP8 worse than E4M3 with one scale for all: blocks guard
against outliers, not against rounding. (Mishra et al. 2025 round the scale up: nothing is cut.)

A scale of E4M3 has a mantissa, so NVFP4 aims at the end: amax of a block becomes 6, wrong by the rounding of the scale.
What E4M3 lacks is range. The tensor's scale makes 448 of its largest block's scale; a block whose amax is at most
2^-10 / 448 of the tensor's has a scale of 0, and is lost. It costs a pass over the tensor before the one that rounds.

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
    """Numbers of one format, in blocks that share a scale of 8 bits."""

    name: str
    element: FloatFormat
    block_size: int
    scale: FloatFormat | None  # None: E8M0, a power of two
    tensor_scale: bool  # whether a float32 for the whole tensor stands above the blocks' scales

    @property
    def bits_per_number(self) -> float:
        """With the block's share of its scale; the tensor's 32 bits are not counted."""
        scale_bits = 8 if self.scale is None else self.scale.bits
        return self.element.bits + scale_bits / self.block_size


MXFP8 = BlockFormat("MXFP8", E4M3, 32, None, False)
MXFP4 = BlockFormat("MXFP4", E2M1, 32, None, False)
NVFP4 = BlockFormat("NVFP4", E2M1, 16, E4M3, True)
BLOCK_FORMATS = {fmt.name: fmt for fmt in (MXFP8, MXFP4, NVFP4)}


class BlockCodes(NamedTuple):
    """Numbers in a block format. Codes are int64, one in each place, though they have 4 or 8 bits."""

    elements: torch.Tensor  # [..., blocks, block_size]
    scales: torch.Tensor  # [..., blocks], codes of E8M0 or E4M3
    tensor_scale: torch.Tensor  # float32, no dimensions; 1 where the format has none


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """2^(code - 127), or NaN for code 255, as float64. codes: integers, of which the lowest 8 bits count."""
    codes = codes.long() & 255
    return torch.where(codes == E8M0_NAN, torch.nan, power_of_two(codes - E8M0_BIAS))


def encode_e8m0(values: torch.Tensor) -> torch.Tensor:
    """Codes (int64) of the largest powers of two that are not above these values, from 2^-127, for 0 too, to 2^127.

    NaN for infinities, NaN and negative numbers. (torch's cast rounds to the nearest power instead, halfway up.)
    Raises ValueError for values that aren't floating-point.
    """
    check_floating(values)
    values = values.detach().double()
    exponent = torch.where(values > 0, torch.frexp(values).exponent.long() - 1, -E8M0_BIAS)
    code = exponent.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS
    return torch.where(values.isfinite() & (values >= 0), code, E8M0_NAN)


def blocks_of_last_dim(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """x [..., n] as [..., blocks, block_size]; zeros fill the last block."""
    missing = -x.shape[-1] % block_size
    return torch.nn.functional.pad(x, (0, missing)).unflatten(-1, (-1, block_size))


def tensor_scale_of(amax: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """The float32 that makes the largest possible block scale of the largest finite amax: amax / (448 · 6)."""
    if not fmt.tensor_scale:
        return torch.ones((), device=amax.device)
    largest = torch.where(amax.isfinite(), amax, 0.0).flatten()
    largest = torch.cat([largest, largest.new_zeros(1)]).amax()  # of no blocks: 0
    return (largest / (fmt.scale.largest * fmt.element.largest)).clamp(FP32.smallest_normal, FP32.largest).float()


def encode_blocks(x: torch.Tensor, fmt: BlockFormat) -> BlockCodes:
    """x [..., n] in blocks along its last dimension. Elements are rounded to nearest, ties to even, and saturate.

    Of a block with an infinity or NaN, the scale is NaN, so that all of it is; no other block notices. Raises
    ValueError for what isn't floating-point, or has no dimensions.
    """
    check_floating(x)
    if x.ndim == 0:
        raise ValueError("blocks lie along the last dimension, and a tensor of one number has none")
    blocks = blocks_of_last_dim(x.detach().double(), fmt.block_size)
    amax = blocks.abs().amax(-1)  # NaN where there is one
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
    """The numbers that the codes stand for, [..., n] float64, the last block's filling left out."""
    scale = decode_e8m0(codes.scales) if fmt.scale is None else decode(codes.scales, fmt.scale)
    scale = scale * codes.tensor_scale.double()
    return (decode(codes.elements, fmt.element) * scale[..., None]).flatten(-2)[..., :n]


def round_to_blocks(x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """What x [..., n] becomes in a block format, as float64 of the same shape; raises ValueError as encode_blocks."""
    return decode_blocks(encode_blocks(x, fmt), fmt, x.shape[-1])


def relative_error(rounded: torch.Tensor, exact: torch.Tensor) -> float:
    """The root of the squared errors' sum over the root of the squares' sum. Reads the tensors on the host."""
    return ((rounded - exact).norm() / exact.norm()).item()


def block_errors(x: torch.Tensor) -> dict[str, float]:
    """The relative error of x [..., n] in each block format, by name."""
    return {name: relative_error(round_to_blocks(x, fmt), x.double()) for name, fmt in BLOCK_FORMATS.items()}
