"""How much of a row a program holds. Softmax and RMSNorm, which need the sum of a full row, decide this in the same
way.

A row that fits in the registers of one program is loaded once, and the sum costs no second pass over memory. 16,384
elements fit: 16 warps of 32 threads with 32 elements each. Short rows share a program, so that it has work for 128
threads; a longer row is processed in blocks, twice.
"""

from __future__ import annotations

import torch
import triton

LONGEST_BLOCK = 16384  # elements of one row that a program holds
BLOCK_OF_LONG_ROW = 4096


def shape_of_work(columns: int) -> tuple[int, int, int]:
    """Return the rows and columns that a program holds, and its warps. Fewer columns than the row has mark a long row.

    4 warps or more with 8 to 32 elements per thread: 8 are 16 bytes of bfloat16, the widest load; more than 32 would
    not fit in a thread's registers together with the values computed from them.
    """
    block = triton.next_power_of_2(columns) if columns <= LONGEST_BLOCK else BLOCK_OF_LONG_ROW
    rows = max(1, 1024 // block)
    return rows, block, min(32, max(4, rows * block // 512))


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x: [..., h] as [rows, h], each row contiguous: a view if its strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
