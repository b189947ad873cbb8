"""Tiles of the score matrix that FlashAttention computes, and their cost.

The scores of s queries and s' keys are cut into tiles of block_q x block_k. One program owns a row of tiles: its block
of queries stays on chip while the keys go by. Under a causal mask (query i sees keys 0..i) there are three kinds, here
with blocks of 2 queries and 2 keys, where x is a pair that is seen and a dot one that is masked:

    x . |     |         full     every query sees every key: no mask is computed
    x x |     |         partial  some pairs are masked: the tile crosses the diagonal
    ----+-----+----     skipped  no query sees any key: neither computed nor loaded (left blank)
    x x | x . |
    x x | x x |         A row of tiles is full ones, then partial ones, then skipped ones. So two numbers describe it:
    ----+-----+----     the keys [0, unmasked_end) and [unmasked_end, end). A kernel runs one loop over both, with the
    x x | x x | x .     mask behind an `if`: a second loop would make each matmul wait for the one before.
    x x | x x | x x

The last keys, where block_k does not divide s', are a partial tile as well: the lanes past the end are masked.

Each visible pair costs 4 d FLOPs forward (q k^T and p v, 2 d each) and 10 d backward, where q k^T is computed again and
dp, dv, dq and dk are four more matmuls: 2.5 times as much. Under a causal mask about half of the pairs are visible,
and about half of the tiles remain where the blocks are small beside s. Of a tile on the diagonal about half is waste.

Dao 2023 (FlashAttention-2), §3.1.1, "Causal masking" (skipped tiles, one mask per row), and §4.1 (these FLOPs).
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Queries [row, row_end) with keys [column, column_end), both cut at the ends of the sequences."""

    row: int
    row_end: int
    column: int
    column_end: int
    kind: str  # "full": block_k keys, no mask needed; "partial": crosses the diagonal, or has fewer than block_k keys


# exercise 13.2
def key_bounds(first_row: int, block_q: int, block_k: int, s_q: int, s_k: int, causal: bool) -> tuple[int, int]:
    """Return (unmasked_end, end): tiles of the keys [0, unmasked_end) need no mask, those up to end do.

    The tiles contain the queries [first_row, first_row + block_q), with first_row < s_q, as far as there are that
    many; each begins at a multiple of block_k, and unmasked_end is one, too. The keys from end on are seen by none of
    these queries. A tile needs no mask if it has block_k keys and the first of the queries, hence each, sees them
    all. The tile of the last key before end may reach past it; where causal is off, end is s_k.
    """
    if not causal:
        return s_k // block_k * block_k, s_k
    row_end = min(first_row + block_q, s_q)
    return min(s_k, first_row + 1) // block_k * block_k, min(s_k, row_end)


def row_of_tiles(first_row: int, s_q: int, s_k: int, block_q: int, block_k: int, causal: bool) -> list[Tile]:
    """Return the tiles of the queries from first_row on, from left to right: full ones, then partial ones."""
    unmasked_end, end = key_bounds(first_row, block_q, block_k, s_q, s_k, causal)
    row_end = min(first_row + block_q, s_q)
    full = [Tile(first_row, row_end, key, key + block_k, "full") for key in range(0, unmasked_end, block_k)]
    partial = [
        Tile(first_row, row_end, key, min(key + block_k, s_k), "partial") for key in range(unmasked_end, end, block_k)
    ]
    return full + partial


def check_blocks(s_q: int, s_k: int, block_q: int, block_k: int) -> None:
    """Raise ValueError unless the lengths are 0 or more and the blocks 1 or more."""
    if min(s_q, s_k) < 0 or min(block_q, block_k) < 1:
        raise ValueError(
            f"{s_q} queries in blocks of {block_q}, {s_k} keys in blocks of {block_k}: expected lengths of 0 or more "
            "and blocks of 1 or more"
        )


def tiles(s_q: int, s_k: int, block_q: int, block_k: int, causal: bool) -> list[Tile]:
    """Return all tiles that are computed, in the order of forward. Raises ValueError as check_blocks does."""
    check_blocks(s_q, s_k, block_q, block_k)
    rows = range(0, s_q, block_q)
    return [tile for row in rows for tile in row_of_tiles(row, s_q, s_k, block_q, block_k, causal)]


def visible_pairs(s_q: int, s_k: int, causal: bool) -> int:
    """Return the number of pairs of a query and a key that it sees. Causal: query i sees the first i + 1 keys."""
    if not causal:
        return s_q * s_k
    in_triangle = min(s_q, s_k)  # queries that see 1, 2, 3, ... keys; later queries see all
    return in_triangle * (in_triangle + 1) // 2 + (s_q - in_triangle) * s_k


def flops_forward(b: int, s_q: int, s_k: int, heads: int, head_dim: int, causal: bool) -> int:
    """Return the FLOPs of the two matmuls of forward, of visible pairs only: 4 d each.

    heads: of the queries; GQA has fewer keys and values to load, but the same matmuls.
    """
    return 4 * head_dim * heads * b * visible_pairs(s_q, s_k, causal)


def flops_backward(b: int, s_q: int, s_k: int, heads: int, head_dim: int, causal: bool) -> int:
    """Return the FLOPs of the five matmuls of backward, of visible pairs only: 10 d each."""
    return flops_forward(b, s_q, s_k, heads, head_dim, causal) * 5 // 2


class ComputedShare(NamedTuple):
    """Work saved by skipping tiles, and work still wasted on masked pairs."""

    of_tiles: float  # tiles computed, of all tiles
    visible: float  # visible pairs, of all pairs of the computed tiles: a tile at an end counts as a full one


def computed_share(s_q: int, s_k: int, block_q: int, block_k: int, causal: bool) -> ComputedShare:
    """Return the shares for one head. Raises ValueError as check_blocks does, and without queries or keys."""
    check_blocks(s_q, s_k, block_q, block_k)
    if not s_q or not s_k:
        raise ValueError(f"{s_q} queries and {s_k} keys: there are no tiles")
    rows = range(0, s_q, block_q)
    ends = [key_bounds(row, block_q, block_k, s_q, s_k, causal)[1] for row in rows]
    computed = sum(-(-end // block_k) for end in ends)
    of_all = len(rows) * -(-s_k // block_k)
    return ComputedShare(computed / of_all, visible_pairs(s_q, s_k, causal) / (computed * block_q * block_k))
