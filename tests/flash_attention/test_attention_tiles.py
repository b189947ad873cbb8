"""course_lib.flash_attention.tiles: each visible pair is in one tile, masks only where needed, FLOPs counted. Pure
Python.
"""

import itertools

import pytest

from course_lib.flash_attention.tiles import (
    computed_share,
    flops_backward,
    flops_forward,
    key_bounds,
    row_of_tiles,
    tiles,
    visible_pairs,
)

LENGTHS = (0, 1, 2, 3, 5, 8, 12, 13)
BLOCKS = (1, 2, 3, 4, 8)
# s_q, s_k, block_q, block_k, causal
ALL_SIZES = list(itertools.product(LENGTHS, LENGTHS, BLOCKS, BLOCKS, (True, False)))


def seen(s_q, s_k, causal):
    """The pairs of a query and a key that it sees, by the definition."""
    return {(query, key) for query in range(s_q) for key in range(s_k) if key <= query or not causal}


def pairs_of(tile):
    return set(itertools.product(range(tile.row, tile.row_end), range(tile.column, tile.column_end)))


def test_each_visible_pair_is_in_one_tile_and_no_tile_is_without():
    for s_q, s_k, block_q, block_k, causal in ALL_SIZES:
        found, visible = [], seen(s_q, s_k, causal)
        for tile in tiles(s_q, s_k, block_q, block_k, causal):
            assert pairs_of(tile) & visible, (tile, "nobody sees anything of it")
            found += pairs_of(tile) & visible
        assert len(found) == len(set(found)) and set(found) == visible, (s_q, s_k, block_q, block_k, causal)


def test_a_tile_is_full_exactly_where_a_mask_would_change_nothing():
    for s_q, s_k, block_q, block_k, causal in ALL_SIZES:
        visible = seen(s_q, s_k, causal)
        for tile in tiles(s_q, s_k, block_q, block_k, causal):
            whole = tile.column_end - tile.column == block_k
            assert tile.kind == ("full" if whole and pairs_of(tile) <= visible else "partial"), (tile, s_q, s_k, causal)


def test_tiles_lie_on_the_grid_within_the_sequences_rows_first_full_ones_before_partial_ones():
    for s_q, s_k, block_q, block_k, causal in ALL_SIZES:
        found = tiles(s_q, s_k, block_q, block_k, causal)
        assert found == sorted(found) and len(found) == len(set(found))
        for tile in found:
            assert tile.row % block_q == 0 and tile.row_end == min(tile.row + block_q, s_q)
            assert tile.column % block_k == 0 and tile.column_end == min(tile.column + block_k, s_k)
        for _, row in itertools.groupby(found, lambda tile: tile.row):
            kinds = [tile.kind for tile in row]
            assert kinds == sorted(kinds), "f is before p"


def test_key_bounds_by_hand():
    """Blocks of 4 queries and 2 keys, 10 queries, 9 keys."""
    assert [key_bounds(row, 4, 2, 10, 9, causal=True) for row in (0, 4, 8)] == [(0, 4), (4, 8), (8, 9)]
    assert key_bounds(4, 4, 2, 10, 9, causal=False) == (8, 9)
    assert key_bounds(8, 128, 2, 9, 100, causal=True) == (8, 9)  # queries past the end are none that sees more
    assert key_bounds(1, 2, 2, 10, 10, causal=True) == (2, 3)  # the first query sees keys 0 and 1
    assert [tile.kind for tile in row_of_tiles(4, 10, 9, 4, 2, True)] == ["full", "full", "partial", "partial"]


def test_flops_are_those_of_each_visible_pair():
    for s_q, s_k, causal in itertools.product(LENGTHS, LENGTHS, (True, False)):
        assert visible_pairs(s_q, s_k, causal) == len(seen(s_q, s_k, causal))
        forward = flops_forward(2, s_q, s_k, heads=6, head_dim=16, causal=causal)
        assert forward == 2 * 6 * len(seen(s_q, s_k, causal)) * 4 * 16
        assert flops_backward(2, s_q, s_k, 6, 16, causal) * 2 == forward * 5


def test_computed_share_counts_tiles_and_pairs():
    for s_q, s_k, block_q, block_k, causal in ALL_SIZES:
        if not s_q or not s_k:
            continue
        found, everything = (tiles(s_q, s_k, block_q, block_k, mask) for mask in (causal, False))
        share = computed_share(s_q, s_k, block_q, block_k, causal)
        assert share.of_tiles == len(found) / len(everything)
        assert share.visible == len(seen(s_q, s_k, causal)) / (len(found) * block_q * block_k)
    assert computed_share(4096, 4096, 64, 64, False) == (1, 1)
    of_tiles, visible = computed_share(4096, 4096, 128, 64, True)
    assert of_tiles == 33 / 64 and 0.96 < visible < 0.98


@pytest.mark.parametrize("sizes", [(-1, 4, 2, 2), (4, -1, 2, 2), (4, 4, 0, 2), (4, 4, 2, -3)])
def test_sizes_that_are_none_are_errors(sizes):
    for function in (tiles, computed_share):
        with pytest.raises(ValueError, match="expected lengths of 0 or more and blocks of 1 or more"):
            function(*sizes, True)


def test_no_share_of_nothing():
    with pytest.raises(ValueError, match="0 queries and 4 keys"):
        computed_share(0, 4, 2, 2, True)
