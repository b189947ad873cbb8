"""Check of exercise 12.3: `branch_by_warp` divides no warp, and computes the same elements in the same block."""

from __future__ import annotations

import torch

from course_kit.checks.kernels.threads import run_threads
from course_lib.kernels import thread_kernels
from course_lib.kernels.thread_blocks import Block, BlockTraffic


def check() -> None:
    """Assert the elements, the passes through branches and the requests of three grids, and the elements of a block."""
    for blocks, threads in ((4, 256), (3, 128), (1, 64)):
        x = torch.randn(blocks * threads)
        out = torch.full_like(x, float("nan"))
        traffic = run_threads(thread_kernels.branch_by_warp, (blocks,), (threads,), x, out)
        wanted = torch.where(torch.arange(len(x)) % 2 == 0, 2 * x, x**2)
        wrong = int((out != wanted).sum())
        assert wrong == 0, (
            f"{wrong} of {len(x)} elements are wrong or missing: does each thread have an element of its own?"
        )
        warps = blocks * threads // 32
        assert traffic.divergent == 0, (
            f"{traffic.divergent} warps are still divided; every warp should be all even or all odd"
        )
        assert traffic.passes == warps, (
            f"{warps} warps should go through one branch of `compute` each, there were {traffic.passes} passes"
        )
        assert traffic.requests() == 2 * warps, (
            f"each warp loads once and stores once, there were {traffic.requests()} requests"
        )
    check_elements()


def check_elements() -> None:
    """Assert that a block computes the elements of its index, by the stores of block 1 alone."""
    x, out = torch.randn(384), torch.full((384,), float("nan"))
    thread_kernels.branch_by_warp(Block((1, 0), (128, 1), BlockTraffic()), x, out)
    done = (~out.isnan()).nonzero().flatten().tolist()
    assert done == list(range(128, 256)), (
        f"block 1 of 128 threads computes elements 128 to 255, as before; yours {min(done)} to {max(done)}"
    )
