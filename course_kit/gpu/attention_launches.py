"""Launches of the attention kernels at practical sizes, to compile them for a GPU and to count the bytes they move."""

from __future__ import annotations

import torch
import triton

from course_kit.gpu.launches import Launch, record_launches
from course_kit.gpu.operation_bytes import BytesMoved
from course_kit.gpu.transactions import count_transactions
from course_lib.flash_attention import forward, hopper
from course_lib.flash_attention.first import first_attention
from course_lib.kernels.sectors import Transactions

TILE = {"BLOCK_Q": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


def forward_launch(kernel: triton.runtime.KernelInterface, s: int = 256, d: int = 64) -> Launch:
    """Return a launch of the forward kernel, or of a variant of it: one head of d, s tokens, causal, bfloat16."""
    q, k, v = (torch.randn(1, s, 1, d).bfloat16() for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(1, 1, s)
    args = (q, k, v, out, lse, None, s, s, 1, d**-0.5, *forward.strides_of(q, k, v))
    grid = triton.cdiv(s, TILE["BLOCK_Q"]), 1, 1
    return Launch(kernel, grid, args, {"CAUSAL": True, **forward.head_sizes(d), **TILE})


def first_launch(s: int = 256, d: int = 64) -> Launch:
    """Return the launch of `first_attention` at the same size. Works only if kernels are interpreted."""
    with record_launches() as launches:
        q, k, v = (torch.randn(1, s, 1, d).bfloat16() for _ in range(3))
        first_attention(q, k, v)
    return launches[0]


def hopper_launches(d: int = 128) -> dict[str, Launch]:
    """Return a launch of the Hopper kernel for each of its configurations, by name: 256 tokens, one head of d."""
    q, k, v = (torch.zeros(1, 256, 1, d, dtype=torch.bfloat16) for _ in range(3))
    args = (q, k, v, q, torch.zeros(1, 1, 256), 256, 256, 1, 0.1, *forward.strides_of(q, k, v))
    launches = {}
    for overlapped, configurations in hopper.HOPPER_CONFIGURATIONS.items():
        for each in configurations:
            meta = {"CAUSAL": True, "MASKED": True, "OVERLAPPED": overlapped, **forward.head_sizes(d)}
            name = f"TMA, {'overlapped' if overlapped else 'specialized'}, {each.kwargs['BLOCK_K']} keys"
            launches[name] = Launch(hopper.hopper_forward_kernel, (2, 1, 1), args, meta | each.all_kwargs())
    return launches


def count(launch: Launch) -> Transactions:
    """Return the loads and stores of a launch, in sectors of 32 bytes."""
    return count_transactions(launch.kernel, launch.grid, *launch.args, **launch.meta)


def standard_bytes(s: int, d: int = 64) -> int:
    """Return the bytes that attention moves with all scores in memory, one head of d, bfloat16, no mask."""
    q, k, v = (torch.randn(1, s, d).bfloat16() for _ in range(3))
    with BytesMoved() as moved:
        torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)
    return moved.total
