"""Check of exercise 12.5: `coalesced` loads fewer sectors, and `tiled` loads each element once per block."""

from __future__ import annotations

from collections.abc import Callable

import torch

from course_kit.checks.kernels.threads import run_threads
from course_lib.kernels import thread_kernels
from course_lib.kernels.thread_blocks import BlockTraffic

TILE = 32


def counted(kernel: Callable, n: int, threads: tuple[int, ...]) -> BlockTraffic:
    """Return the traffic of c = a @ b, all [n, n], after an assertion that c is right."""
    a, b = torch.randn(2, n * n).unbind(0)
    c = torch.full_like(a, float("nan"))
    traffic = run_threads(kernel, (-(-n // TILE),) * 2, threads, a, b, c, n)
    matmul = a.view(n, n).double() @ b.view(n, n).double()
    missing = int(c.isnan().sum())
    assert missing == 0, f"{kernel.__name__}: {missing} of {n * n} elements of c were never stored"
    error = (c.view(n, n).double() - matmul).abs().max().item()
    assert error < 1e-4, f"{kernel.__name__}: c is {error:.3g} away from a @ b for n = {n}"
    return traffic


def check() -> None:
    """Assert the results and the traffic of both kernels, for a size that TILE divides and one that it does not."""
    for n in (64, 50):
        slow = counted(thread_kernels.naive, n, (TILE, TILE))
        fast = counted(thread_kernels.coalesced, n, (TILE * TILE,))
        assert fast.requests("load") == slow.requests("load"), (
            f"coalesced: {slow.requests('load'):,} requests, as many as naive, only better ones; "
            f"yours makes {fast.requests('load'):,}"
        )
        assert fast.sectors("load") < slow.sectors("load") / 5, (
            f"coalesced: {fast.sectors('load'):,} sectors loaded, naive has "
            f"{slow.sectors('load'):,}; do neighbors have neighboring columns?"
        )
        check_tiled(n)


def check_tiled(n: int) -> None:
    """Assert what `tiled` loads from global and from shared memory, and that it stores c once, row by row."""
    shared = counted(thread_kernels.tiled, n, (TILE * TILE,))
    tiles = -(-n // TILE)
    once = 2 * n * n * tiles  # each element of a and of b, once for each block that needs it
    loaded = sum(count.bytes for count in shared.kinds("load")) // 4
    assert loaded <= once, (
        f"tiled: {loaded:,} elements loaded from global memory, {once:,} are enough: is each tile used 32 times?"
    )
    assert loaded == once, f"tiled: the blocks need {once:,} elements of a and b, yours loads {loaded:,}"
    # rows of 32 elements are 4 sectors each; where n is 50 a row may begin inside of one
    lines = [(row * n + start, min(start + TILE, n) - start) for row in range(n) for start in range(0, n, TILE)]
    fewest = 2 * tiles * sum((first + width - 1) // 8 - first // 8 + 1 for first, width in lines)
    sectors = shared.sectors("load")
    assert sectors < 1.2 * fewest, (
        f"tiled: {sectors:,} sectors loaded, about {fewest:,} are enough for the same elements: do neighbors in a warp "
        "bring neighboring columns, of a and of b?"
    )
    assert shared.shared_requests >= once, (  # 2 n reads by each of the n / TILE warps that share a row of c
        f"tiled: {shared.shared_requests:,} requests to shared memory, the multiply-adds alone take {once:,}: "
        "they read both factors from tile_a and tile_b"
    )
    ends = [(row * n + column, row * n + min(column + TILE, n) - 1) for row in range(n) for column in range(0, n, TILE)]
    stored = sum(last // 8 - first // 8 + 1 for first, last in ends)  # a sector has 8 elements of float32
    assert shared.sectors("store") == stored, (
        f"tiled: {stored:,} sectors stored if c is stored once, row by row; yours stores {shared.sectors('store'):,}"
    )
