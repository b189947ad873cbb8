"""Check of exercise 13.2: `key_bounds` visits all visible keys, and masks no tile that needs no mask."""

from __future__ import annotations

import torch

from course_lib.flash_attention import tiles

CASES = (
    (7, 7, 2, 3, True), (8, 8, 4, 4, True), (5, 9, 2, 4, False), (9, 4, 4, 2, True), (3, 12, 4, 2, True),
    (12, 12, 2, 6, True), (6, 0, 4, 4, False), (1, 5, 3, 2, True),
)  # fmt: skip


def check() -> None:
    """Assert both bounds of each row of tiles, against the mask itself."""
    for s_q, s_k, block_q, block_k, causal in CASES:
        case = f"{s_q} queries, {s_k} keys, tiles {block_q} x {block_k}, {'causal' if causal else 'not causal'}"
        seen = torch.ones(s_q, s_k, dtype=torch.bool)
        seen = seen.tril() if causal else seen
        for first_row in range(0, s_q, block_q):
            rows = seen[first_row : first_row + block_q]
            unmasked_end, end = tiles.key_bounds(first_row, block_q, block_k, s_q, s_k, causal)
            where = f"{case}, the tiles of query {first_row}: you return ({unmasked_end}, {end})"
            last = int(rows.any(0).sum())
            assert end >= last, f"{where}: key {last - 1} is seen by one of them, and never visited"
            assert end <= last, f"{where}: from key {last} on none of these queries sees anything: skip that"
            assert unmasked_end % block_k == 0, f"{where}: the first number ends full tiles: a multiple of {block_k}"
            assert rows[:, :unmasked_end].all(), f"{where}: a tile that needs a mask is among those without"
            further = rows[:, unmasked_end : unmasked_end + block_k]
            all_seen = further.shape[1] == block_k and bool(further.all()) and unmasked_end + block_k <= first_row + 1
            extra = f"{where}: the tile of keys {unmasked_end} to {unmasked_end + block_k - 1} needs no mask either"
            assert not all_seen or not causal, extra
            assert causal or unmasked_end == s_k // block_k * block_k, extra
