"""course_lib.kernels.thread_blocks and thread_kernels: blocks of threads on a CPU find races, bad barriers, stray
indices, bank conflicts and divergence, and count sectors as closed forms have them.
"""

import inspect
import math
import textwrap

import numpy as np
import pytest
import torch

from course_kit.gpu.transactions import count_transactions
from course_lib.kernels import thread_kernels
from course_lib.kernels.sectors import WARP
from course_lib.kernels.thread_blocks import BANKS, BlockTraffic, run_blocks
from course_lib.kernels.thread_kernels import LADDER, ROWS, TILE, branch_by_lane, branch_by_warp, tiled


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def multiplied(name: str, n: int) -> BlockTraffic:
    """The kernel's traffic; its product is right, and nothing beside it is written."""
    kernel, threads = LADDER[name]
    a, b, c = random(n, n), random(n + 1, n)[:n], torch.full((n * n + 64,), float("nan"))
    blocks = -(-n // TILE)
    traffic = count_transactions(kernel, (blocks, blocks), a.flatten(), b.flatten(), c[: n * n], n, threads=threads)
    torch.testing.assert_close(c[: n * n].view(n, n), a @ b, rtol=1e-5, atol=1e-5)
    assert c[n * n :].isnan().all()
    return traffic


@pytest.mark.parametrize("name", list(LADDER))
@pytest.mark.parametrize("n", [1, 33])
def test_products_of_odd_size(name, n):
    assert multiplied(name, n).distinct_sectors("store") == -(-4 * n * n // 32)


@pytest.mark.parametrize("name", list(LADDER))
def test_sectors_of_the_ladder_are_closed_forms(name):
    n, warps = 64, 64 * 64 // WARP
    traffic = multiplied(name, n)
    if name == "naive":  # rows differ from lane to lane: a sector of a for each, one of b for all
        assert traffic.sectors("load") == warps * n * (32 + 1) and traffic.sectors("store") == 32 * warps
    elif name == "coalesced":  # one element of a for all, a line of b
        assert traffic.sectors("load") == warps * n * (1 + 4) and traffic.sectors("store") == 4 * warps
    else:  # a line each of a and b for 32 products
        assert traffic.sectors("load") == warps * n // TILE * (4 + 4) and traffic.sectors("store") == 4 * warps
    requests = warps * n * 2 // (1 if name in ("naive", "coalesced") else TILE)
    assert traffic.requests("load") == requests and traffic.distinct_sectors("load") == 2 * 4 * n * n // 32


def test_coarsening_reads_shared_memory_less():
    """Of each product's two reads, the one of tile_b is shared by ROWS products; nothing collides in the banks."""
    n = 64
    tiled_traffic, coarsened = multiplied("tiled", n), multiplied("coarsened", n)
    products, writes = n**3 // WARP, 2 * 2 * n**3 // TILE // WARP  # each element: 0 first, then what was loaded
    assert tiled_traffic.shared_requests == 2 * products + writes
    assert coarsened.shared_requests == products + products // ROWS + writes
    for traffic in (tiled_traffic, coarsened):
        assert traffic.shared_ways == traffic.shared_requests


# Races and barriers.


def without_sync(number: int):
    """`tiled` with one of its barriers taken out."""
    lines = textwrap.dedent(inspect.getsource(tiled)).splitlines()
    places = [i for i, line in enumerate(lines) if "block.sync()" in line]
    assert len(places) == 2
    del lines[places[number]]
    space = dict(vars(thread_kernels))
    exec("\n".join(lines), space)
    return space["tiled"]


@pytest.mark.parametrize("number, does", [(0, "reads .* another wrote"), (1, "writes .* another read")])
def test_each_missing_barrier_is_found(number, does):
    n = 2 * TILE
    given = random(n * n), random(n * n), torch.zeros(n * n), n
    with pytest.raises(RuntimeError, match=does):
        run_blocks(without_sync(number), (1, 1), LADDER["tiled"][1], *given)


def exchange(block, out, distance: int, barrier: bool) -> None:
    """Each thread writes its number, and reads that of the thread `distance` away."""
    tile = block.shared(block.size)
    tile[block.x] = block.x
    if barrier:
        block.sync()
    block.store(out, block.x, tile[block.x ^ distance])


def test_a_race_is_between_warps():
    """Lanes of one warp go in step, so they need no barrier among themselves."""
    out = torch.zeros(128)
    for distance, barrier in ((1, False), (16, False), (32, True), (96, True)):
        run_blocks(exchange, (1,), (128,), out, distance, barrier)
        assert torch.equal(out.long(), torch.arange(128) ^ distance)
    for distance in (32, 64):
        with pytest.raises(RuntimeError, match="a warp reads shared memory that another wrote"):
            run_blocks(exchange, (1,), (128,), out, distance, False)


def test_two_warps_that_write_one_element_race():
    def all_write(block):
        block.shared(1)[0 * block.x] = block.x

    run_blocks(all_write, (1,), (32,))
    with pytest.raises(RuntimeError, match="a warp writes shared memory that another wrote"):
        run_blocks(all_write, (1,), (64,))


def test_a_barrier_that_some_threads_never_reach():
    def waits(block, least):
        with block.where(block.x >= least):
            block.sync()

    run_blocks(waits, (1,), (64,), 0)
    with pytest.raises(RuntimeError, match="the others wait forever"):
        run_blocks(waits, (1,), (64,), 32)


# Global memory.


def copy(block, x, out, n):
    i = block.block_x * block.size + block.x
    with block.where(i < n):
        block.store(out, i, block.load(x, i))


def test_an_index_outside_names_its_thread():
    x, out = random(100), torch.zeros(100)
    with pytest.raises(IndexError, match=r"load outside of an array of 100 .* thread \(36, 0\) of block \(1, 0\)"):
        run_blocks(copy, (2,), (64,), x, out, 128)
    with pytest.raises(IndexError, match=r"store outside .* thread \(4, 0\) of block \(0, 0\) touches element -1"):
        run_blocks(lambda block, out: block.store(out, 3 - block.x, 1.0), (1,), (64,), out)
    run_blocks(copy, (2,), (64,), x, out, 100)
    assert torch.equal(x, out)


@pytest.mark.parametrize("threads", [1, 31, 32, 40, 96, 1000])
def test_ragged_warps(threads):
    """The missing lanes of a block's last warp are no lanes: n elements in ceil(threads / 32) requests a block."""
    n = 2 * threads - 1
    x, out = random(n), torch.zeros(n)
    traffic = run_blocks(copy, (2,), (threads,), x, out, n)
    assert torch.equal(x, out)
    requests = sum(-(-own // WARP) for own in (threads, threads - 1))
    assert traffic.requests("load") == traffic.requests("store") == requests
    assert sum(count.bytes for count in traffic.kinds("load")) == 4 * n
    assert traffic.distinct_sectors() == 2 * -(-4 * n // 32)
    assert traffic.lane_use == n / (WARP * traffic.passes)


def test_threads_of_two_dimensions_are_cut_into_warps_along_x():
    """Threads (16, 4): a warp is two rows of 16."""
    seen = []

    def look(block):
        seen.append((block.x.reshape(-1, 32), block.y.reshape(-1, 32), block.warp.reshape(-1, 32)))

    run_blocks(look, (1,), (16, 4))
    (x, y, warp) = seen[0]
    assert (x == np.tile(np.arange(16), 2)).all() and (y == np.repeat([[0, 1], [2, 3]], 16, axis=1)).all()
    assert (warp == [[0], [1]]).all()


# Branches and banks.


@pytest.mark.parametrize("kernel, passes, divergent, use", [(branch_by_lane, 16, 16, 0.5), (branch_by_warp, 8, 0, 1.0)])
def test_divergence(kernel, passes, divergent, use):
    """3 blocks of 8 warps: the same elements with each warp in both branches, or in one."""
    x, out = random(3 * 256), torch.zeros(3 * 256)
    traffic = run_blocks(kernel, (3,), (256,), x, out)
    i = torch.arange(3 * 256)
    assert torch.equal(out, torch.where(i % 2 == 0, 2 * x, x**2))
    assert (traffic.passes, traffic.divergent, traffic.lane_use) == (3 * passes, 3 * divergent, use)


def test_a_branch_in_a_branch():
    """A warp that is not in the outer one does not count in the inner; lanes outside do not diverge again."""

    def nested(block):
        with block.where(block.x < 48):
            with block.where(block.x % 2 == 0):
                pass
            with block.where(block.x >= 0):
                pass

    traffic = run_blocks(nested, (1,), (96,))
    assert (traffic.passes, traffic.divergent) == (2 + 2 + 2, 1 + 2 + 0)
    assert run_blocks(lambda block: None, (1,), (96,)).lane_use == 1.0


@pytest.mark.parametrize("stride", [0, 1, 2, 3, 4, 6, 8, 16, 31, 32, 33])
def test_bank_conflicts(stride):
    """Lanes a stride of words apart: gcd(stride, 32) wait for one bank; one word for all is no conflict."""

    def strided(block):
        block.shared(WARP * max(stride, 1))[stride * block.x]

    traffic = run_blocks(strided, (1,), (WARP,))
    assert traffic.shared_requests == 1
    assert traffic.shared_ways == (math.gcd(stride, BANKS) if stride else 1)


def test_a_column_more_undoes_a_transposes_conflicts():
    def column(block, width):
        tile = block.shared(TILE, width)
        tile[block.x % TILE, block.x // TILE]

    assert run_blocks(column, (1,), (1024,), TILE).shared_ways == 32 * 32
    assert run_blocks(column, (1,), (1024,), TILE + 1).shared_ways == 32


def test_impossible_blocks():
    for threads in ((0,), (1025,), (64, 32)):
        with pytest.raises(ValueError, match="a block has 1 to 1,024 threads"):
            run_blocks(copy, (1,), threads)
