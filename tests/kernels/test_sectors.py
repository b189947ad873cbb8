"""course_lib.kernels.sectors: sectors and lines by request are what a brute-force count and closed forms say. CPU."""

import numpy as np
import pytest
import torch

from course_lib.kernels.sectors import LINE_BYTES, SECTOR_BYTES, WARP, Count, Transactions, shift, touched_units

LANES = np.arange(WARP)


def by_brute_force(addresses, active, unit: int) -> int:
    return sum(
        len({int(a) // unit for a, there in zip(*row, strict=True) if there})
        for row in zip(addresses, active, strict=True)
    )


def test_against_brute_force():
    """Addresses that a GPU may have, of 48 bits; requests of any width; masks of any kind."""
    generator = np.random.default_rng(0)
    for requests, touches, spread in ((1, 1, 8), (5, 32, 300), (7, 128, 40), (3, 32, 2**20), (0, 32, 9)):
        addresses = 2**47 + 4 * generator.integers(0, spread, (requests, touches))
        for active in (generator.random(addresses.shape) < 0.5, addresses > 0, addresses < 0):
            for unit in (4, SECTOR_BYTES, LINE_BYTES):
                assert touched_units(addresses, active, unit) == by_brute_force(addresses, active, unit)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("stride", [1, 2, 3, 5, 8, 16, 33])
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_strides_and_offsets(size, stride, offset):
    """32 lanes a stride apart: a sector each from 32 bytes on; below that what their span holds, at its alignment."""
    step, first = size * stride, size * offset
    addresses = (first + step * LANES)[None, :]
    last = first + step * (WARP - 1)
    for unit in (SECTOR_BYTES, LINE_BYTES):
        expected = WARP if step >= unit else last // unit - first // unit + 1
        assert touched_units(addresses, addresses >= 0, unit) == expected


def test_masks_broadcasts_and_two_requests():
    side_by_side = 4 * LANES[None, :]
    assert touched_units(side_by_side, LANES[None, :] < 9, SECTOR_BYTES) == 2
    assert touched_units(side_by_side, LANES[None, :] < 0, SECTOR_BYTES) == 0
    assert touched_units(0 * side_by_side, side_by_side >= 0, SECTOR_BYTES) == 1
    twice = np.repeat(side_by_side, 2, axis=0)
    assert touched_units(twice, twice >= 0, SECTOR_BYTES) == 8  # each request pays


def filled() -> Transactions:
    """A load of a line by lanes side by side, twice; the same elements by every second lane; one sector stored."""
    traffic, there = Transactions(), np.ones((1, WARP), dtype=bool)
    for _ in range(2):
        traffic.of("load", "3: a").add(4 * LANES[None, :], there, 4)
    traffic.of("load", "4: b").add(4 * LANES[None, :], LANES[None, :] % 2 == 0, 4)
    traffic.of("store", "5: c").add(4096 + 0 * LANES[None, :], there, 4)
    return traffic


def test_sums_over_accesses():
    traffic = filled()
    assert [(count.location, count.requests, count.sectors, count.lines) for count in traffic.counts] == [
        ("3: a", 2, 8, 2),
        ("4: b", 1, 4, 1),
        ("5: c", 1, 1, 1),
    ]
    assert [traffic.sectors(kind) for kind in (None, "load", "store", "atomic")] == [13, 12, 1, 0]
    assert (traffic.requests(), traffic.requests("load")) == (4, 3)
    assert [traffic.distinct_sectors(kind) for kind in (None, "load", "store")] == [5, 4, 1]
    assert traffic.efficiency("load") == (2 * 128 + 64) / (12 * SECTOR_BYTES)
    assert traffic.efficiency("store") == 4 / SECTOR_BYTES and traffic.efficiency("atomic") == 1.0


def test_requests_without_an_active_lane_are_none():
    count = Count("load", "here")
    count.add(np.zeros((3, WARP), dtype=np.int64), np.zeros((3, WARP), dtype=bool), 4)
    assert (count.requests, count.sectors, count.lines, count.bytes, count.touched) == (0, 0, 0, 0, set())


def test_the_table_has_a_line_for_each_access():
    traffic = filled()
    traffic.removed.add("9: d")
    title, *rows, removed = str(traffic).splitlines()
    assert title.split() == ["requests", "sectors", "a", "request", "lines", "of", "use", "where"]
    assert [row.split() for row in rows] == [
        ["load", "2", "8", "4.0", "2", "100%", "3:", "a"],
        ["load", "1", "4", "4.0", "1", "50%", "4:", "b"],
        ["store", "1", "1", "1.0", "1", "12%", "5:", "c"],
    ]
    assert removed == "removed by the compiler: 9: d"
    assert str(Transactions()) == title.replace("\n", "")


def test_a_storage_begins_at_a_line_of_its_own():
    """Views keep their place in it; small tensors, many of which lie in 512 bytes of a CPU, do not overlap."""
    whole = torch.zeros(1000)
    for view in (whole, whole[3:], whole[5:].view(5, 199).T):
        offset = view.storage_offset() * view.element_size()
        assert (view.data_ptr() + shift(view)) % 512 == offset % 512
    starts = sorted(x.data_ptr() + shift(x) for x in [torch.zeros(2) for _ in range(50)])
    assert all(second - first >= 512 for first, second in zip(starts, starts[1:], strict=False))
