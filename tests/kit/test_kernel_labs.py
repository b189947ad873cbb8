"""course_kit.labs.kernels: what a warp of a product loads first, and the traffic of the four products."""

import numpy as np
import pytest

from course_kit.labs import kernels as labs
from course_lib.kernels import thread_kernels
from course_lib.kernels.thread_kernels import TILE


def test_first_loads_are_a_column_of_a_or_a_row_of_b():
    a, b = labs.first_loads(thread_kernels.naive, (TILE, TILE))
    assert a.tolist() == [32 * row for row in range(32)] and set(b.tolist()) == {0}
    a, b = labs.first_loads(thread_kernels.coalesced, (TILE * TILE,))
    assert set(a.tolist()) == {0} and b.tolist() == list(range(32))


@pytest.mark.parametrize(("elements", "touched"), [([0], 8), ([0, 9], 16), (range(32), 32)])
def test_loaded_map_has_whole_sectors(elements, touched):
    found = labs.loaded_map(np.array(elements))
    assert found.shape == (32, 32) and (found > 0).sum() == touched and (found == 2).sum() == len(elements)


def test_each_rung_of_the_ladder_moves_less_than_the_one_before():
    found = labs.ladder_traffic(64)
    naive, coalesced, tiled, coarsened = (each.sectors() for each in found.values())
    assert naive > 5 * coalesced > 50 * tiled and tiled == coarsened
    assert found["coarsened"].shared_ways < found["tiled"].shared_ways
