"""A walk through the tiles of FlashAttention's forward: after each tile, the state, its error and its cost.

The state of a row has three parts: m, the highest score so far; l, the sum of exp(z - m); o, the sum of exp(z - m) v.
With them o / l is attention over the keys seen so far: exact for those keys, wrong by the keys to come. Likewise the
weight of key j is, for now,

    p_j = exp(z_j - m) / l

No step changes a score z_j of an earlier tile, and no tile is loaded again; but m and l change, so p_j falls with every
further tile, and falls fast if the tile has a higher score. One factor per row, e^(m - m'), corrects the sums o and l,
although their terms are gone. The figures keep these terms to show the effect.

Memory, in elements: the chip holds a block of q, one of k, one of v, a tile of scores and the state of block_q rows,
whatever the length of the sequences. Between the chip and slow memory move, for one head,

    tiled       s d + 2 d sum over the rows of tiles of the keys each visits + s (d + 1)
    standard    2 s d + 2 s' d + 4 s s'

with S = scale q k^T written, read for the softmax, and P written and read for the matmul with v. Dao et al. 2022,
§2.2 (algorithm 0, standard attention) and §3.1 (algorithm 1); Dao 2023, §3.1 (one division, at the end of a row).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from course_lib.flash_attention.reference import check_attention, online_step, scale_or_default, tile_scores, wide_dtype
from course_lib.flash_attention.tiles import Tile, check_blocks, row_of_tiles, tiles


class WalkShape(NamedTuple):
    """The sizes of one head: q [s_q, head_dim], k and v [s_k, head_dim]."""

    s_q: int
    s_k: int
    head_dim: int
    block_q: int
    block_k: int
    causal: bool


@dataclass(frozen=True)
class WalkStep:
    """The record after a tile. The state covers the tile's rows; sizes are in elements, not in bytes."""

    shape: WalkShape
    tile: Tile
    scores: torch.Tensor  # [rows, columns] of the tile, scaled, -inf where masked
    highest: torch.Tensor  # [rows]
    total: torch.Tensor  # [rows]
    out: torch.Tensor  # [rows, d], not yet divided by total
    errors: torch.Tensor  # [s]: the largest error of each row of out / total; NaN for rows not yet begun
    on_chip: dict[str, int]
    read: int  # so far
    written: int

    @property
    def largest_error(self) -> float:
        """The largest error of all rows that have begun."""
        return self.errors.nan_to_num(0.0).max().item()


class WalkState(NamedTuple):
    """The state of all rows after a step; NaN for rows without a visited tile."""

    p: torch.Tensor  # [s, s'], float64: each key's weight by the present maximum and sum of its row
    highest: torch.Tensor  # [s]
    total: torch.Tensor  # [s]


def standard_numbers(shape: WalkShape) -> int:
    """Return the elements that attention with a stored S and P reads and writes for one head, masked or not."""
    s_q, s_k, d = shape[:3]
    return 2 * (s_q + s_k) * d + 4 * s_q * s_k


def exact_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """Return softmax(scale q k^T) v of one head, in float64: [s, d]."""
    z = q.double() @ k.double().T * scale
    if causal:
        z = z.masked_fill(torch.ones_like(z).triu(1).bool(), -math.inf)
    return z.softmax(-1) @ v.double()


def check_walk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, *blocks: int) -> None:
    """Raise ValueError as check_attention and check_blocks do, or if the tensors are not of one head or have no
    tokens.
    """
    if any(x.dim() != 2 for x in (q, k, v)):
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: expected [tokens, head_dim] each")
    check_attention(q[None, :, None], k[None, :, None], v[None, :, None], scale)
    check_blocks(len(q), len(k), *blocks)
    if not len(q) or not len(k):
        raise ValueError(f"{len(q)} queries and {len(k)} keys: no tile to walk through")


def record_walk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, block_q: int, block_k: int
) -> list[WalkStep]:
    """Return a record for each tile of one head, in the order of forward. q: [s, d]; k, v: [s', d]; scale None: 1 /
    sqrt(d).

    Each record holds one number per row, so use a walk for tens of tokens. Raises ValueError as check_walk does.
    """
    check_walk(q, k, v, scale, block_q, block_k)
    q, k, v = (x.detach().cpu() for x in (q, k, v))
    shape = WalkShape(len(q), len(k), k.shape[1], block_q, block_k, causal)
    scale = scale_or_default(scale, q.shape[1])
    exact = exact_head(q, k, v, causal, scale)
    steps, errors, read, written = [], torch.full_like(exact[:, 0], math.nan), 0, 0
    for first_row in range(0, len(q), block_q):
        q_tile = q[first_row : first_row + block_q]
        highest = torch.full_like(q_tile[:, 0], -math.inf, dtype=wide_dtype(q))
        total, out = torch.zeros_like(highest), torch.zeros_like(q_tile, dtype=highest.dtype)
        read += q_tile.numel()
        row = row_of_tiles(first_row, len(q), len(k), block_q, block_k, causal)
        for tile in row:
            k_tile, v_tile = (x[tile.column : tile.column_end] for x in (k, v))
            read += k_tile.numel() + v_tile.numel()
            z = tile_scores(q_tile[None, None], k_tile[None, None], tile, scale, causal)[0, 0]
            highest, total, out = online_step(highest, total, out, z, v_tile)
            errors = errors.clone()
            errors[tile.row : tile.row_end] = (out / total[:, None] - exact[tile.row : tile.row_end]).abs().amax(-1)
            if tile == row[-1]:
                written += out.numel() + total.numel()  # out, and lse
            held = {"q tile": q_tile, "k tile": k_tile, "v tile": v_tile, "scores tile": z}
            held |= {"out": out, "highest": highest, "total": total}
            on_chip = {name: x.numel() for name, x in held.items()}
            steps.append(WalkStep(shape, tile, z, highest, total, out, errors, on_chip, read, written))
    return steps


def check_step_number(steps: Sequence[WalkStep], number: int) -> None:
    """Raise ValueError unless the walk has a number-th step, counted from 1."""
    if not 1 <= number <= len(steps):
        raise ValueError(f"step {number} of a walk of {len(steps)}: steps are counted from 1")


def walk_state(steps: Sequence[WalkStep], number: int) -> WalkState:
    """Return all rows after `number` tiles, 1 to len(steps); p after the last is the softmax. ValueError for other
    numbers.
    """
    check_step_number(steps, number)
    shape = steps[0].shape
    z = torch.full((shape.s_q, shape.s_k), math.nan, dtype=torch.float64)
    highest, total = torch.full((2, shape.s_q), math.nan, dtype=torch.float64)
    for step in steps[:number]:
        rows = slice(step.tile.row, step.tile.row_end)
        z[rows, step.tile.column : step.tile.column_end] = step.scores.double()
        highest[rows], total[rows] = step.highest.double(), step.total.double()
    return WalkState(torch.exp(z - highest[:, None]) / total[:, None], highest, total)


def rows_that_rose(steps: Sequence[WalkStep], number: int) -> int:
    """Return the number of rows in which the number-th tile raised the maximum of earlier tiles, so that their weights
    are rescaled. Raises ValueError as walk_state does.
    """
    check_step_number(steps, number)
    if steps[number - 1].tile.column == 0:
        return 0
    return int((steps[number - 1].highest > steps[number - 2].highest).sum())


def skipped_tiles(s_q: int, s_k: int, block_q: int, block_k: int, causal: bool) -> list[Tile]:
    """Return the tiles that `tiles` leaves out, cut at the ends of the sequences."""
    visited = {(tile.row, tile.column) for tile in tiles(s_q, s_k, block_q, block_k, causal)}
    return [
        Tile(row, min(row + block_q, s_q), column, min(column + block_k, s_k), "skipped")
        for row in range(0, s_q, block_q)
        for column in range(0, s_k, block_k)
        if (row, column) not in visited
    ]
