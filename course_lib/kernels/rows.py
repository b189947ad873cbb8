"""How much of a row a program holds: what softmax and RMSNorm, which need a whole row's sum, decide in the same way.

A row that fits in the registers of one program is loaded once, and the sum costs no second look at memory. 16,384
elements fit: 16 warps of 32 threads with 32 elements each. Short rows share a program, so that it has work for 128
threads; a longer row goes by in blocks, twice.
"""

from __future__ import annotations

import torch
import triton

LONGEST_BLOCK = 16384  # elements of one row that a program holds
BLOCK_OF_LONG_ROW = 4096


def shape_of_work(columns: int) -> tuple[int, int, int]:
    """Rows and columns that a program holds, and its warps. Fewer columns than the row has: that is a long row.

    4 warps or more of 8 to 32 elements a thread: 8 are 16 bytes of bfloat16, the widest load there is; more than 32
    would not fit in a thread's registers beside what is computed of them.
    """
    block = triton.next_power_of_2(columns) if columns <= LONGEST_BLOCK else BLOCK_OF_LONG_ROW
    rows = max(1, 1024 // block)
    return rows, block, min(32, max(4, rows * block // 512))


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x: [..., h] as [rows, h] with adjacent elements of a row next to each other: a view if its strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
