"""Check of exercise 07.8: which pairs of a query and a key the chunks cover, and how many chunks there are."""

from __future__ import annotations

import torch

from course_lib.context_parallel import blocks

SIZE = 3  # tokens of a chunk
CHUNKS = (  # of queries, of keys, and the fewest chunks where the mask is causal
    ((0,), (0,), 1),
    ((2,), (1,), 1),
    ((1,), (2,), 0),
    ((1, 6), (1, 6), 1),
    ((1, 6), (0, 7), 1),
    ((1, 6), (2, 5), 1),
    ((2, 3), (0, 1), 1),
    ((2, 5), (0, 3, 4), 2),
)


def cells(local: tuple[int, ...], other: tuple[int, ...], causal: bool) -> torch.Tensor:
    """Count how often visible() covers each pair of a query and a key."""
    times = torch.zeros(SIZE * len(local), SIZE * len(other))
    for rows, columns, inside in blocks.visible(local, other, causal):
        block = times[SIZE * rows.start : SIZE * rows.stop, SIZE * columns.start : SIZE * columns.stop]
        block += torch.ones_like(block).tril() if inside else 1
    return times


def check() -> None:
    """Judge visible."""
    for local, other, most in CHUNKS:
        tokens = [torch.cat([torch.arange(SIZE * c, SIZE * c + SIZE) for c in chunks]) for chunks in (local, other)]
        for causal in (True, False):
            times = cells(local, other, causal)
            expected = (tokens[0][:, None] >= tokens[1]).float() if causal else torch.ones_like(times)
            where = f"queries of chunks {local}, keys of chunks {other}, causal {causal}"
            assert times.max() <= 1, f"{where}: something is covered twice"
            assert torch.equal(times, expected), f"{where}: the chunks do not cover what is visible, and nothing else"
            result, enough = blocks.visible(local, other, causal), most if causal else 1
            assert len(result) <= enough, f"{where}: {len(result)} chunks, {enough} would do: {result}"
