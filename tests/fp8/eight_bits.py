"""What test modules of 8-bit matrices share: blocks, random matrices, and what a matrix stands for, worked out anew."""

from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.fp8.quantization import FULL, ROW, SQUARE, TENSOR, TILE, Quantized

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = [E4M3, E5M2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TENSOR_CORE = 32 * 2.0**-14  # of the sum of magnitudes: what 32 products lose, each cut to 14 bits of the largest
BLOCKS = [TENSOR, ROW, TILE, SQUARE, (FULL, 1), (3, 7)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uneven(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers whose size differs by row and by column, by 2^-8 to 2^8 each, so that every block has its own."""
    generator = seeded(seed)
    by_row, by_column = (torch.randint(-8, 9, (n,), generator=generator).double() for n in (rows, columns))
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return (x * 2 ** by_row[:, None] * 2**by_column).clamp(-60_000, 60_000).to(dtype).to(DEVICE)


def scale_of_each(quantized: Quantized) -> torch.Tensor:
    """The scale of each value, [rows, columns] float64."""
    scale = quantized.scale.double()
    for dim, (size, whole) in enumerate(zip(quantized.block, quantized.values.shape, strict=True)):
        index = torch.arange(whole, device=scale.device) // (max(whole, 1) if size == FULL else size)
        scale = scale.index_select(dim, index)
    return scale


def stands_for(quantized: Quantized) -> torch.Tensor:
    """values * scale, [rows, columns] float64: exact."""
    return quantized.values.double() * scale_of_each(quantized)


def any_codes(rows: int, k: int, dtype: torch.dtype, block: tuple[int, int], seed: int = 0) -> Quantized:
    """Values of all finite codes alike, the smallest too, and scales that are no powers of two."""
    generator = seeded(seed)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    finite = codes.view(torch.uint8)[codes.float().isfinite()]
    chosen = finite[torch.randint(len(finite), (rows, k), generator=generator)]
    blocks = [1 if size == FULL else -(-whole // size) for size, whole in zip(block, (rows, k), strict=True)]
    scale = 2 ** (6 * torch.rand(blocks, generator=generator) - 3)
    return Quantized(chosen.view(dtype).to(DEVICE), scale.to(DEVICE), block)


def format_of(x: torch.Tensor) -> torch.dtype:
    """The dtype of x; for a float32 tensor the 8-bit format that has all of its numbers, if there is one.

    Without FP8 tensor cores, 8-bit codes are multiplied in float32.
    """
    if x.dtype == torch.float32 and not x.is_meta:
        return next((dtype for dtype in (E4M3, E5M2) if torch.equal(x.to(dtype).float(), x)), x.dtype)
    return x.dtype


class Products(TorchDispatchMode):
    """`with Products() as found:` lists the operands of each matrix multiplication inside, and their formats."""

    NAMES = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "linear"}

    def __init__(self):
        super().__init__()
        self.dtypes: list[tuple[torch.dtype, torch.dtype]] = []
        self.operands: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[-1]
        if name in self.NAMES:
            left, right = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            self.dtypes.append((format_of(left), format_of(right)))
            self.operands.append((left, right))
        return func(*args, **(kwargs or {}))


def watched(module, name: str):
    """`with watched(module, "f") as calls:` records the calls of module.f, which goes on as it was."""
    return mock.patch.object(module, name, wraps=getattr(module, name))
