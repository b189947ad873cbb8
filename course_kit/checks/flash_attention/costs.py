"""Properties of a kernel of notebook 13 besides its results: matmuls and masks for each tile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.interpreter import InterpreterBuilder


def count_tiles(s_q: int, s_k: int, block_q: int, block_k: int, causal: bool) -> tuple[int, int]:
    """Return how many tiles of the scores have a pair that is seen, and how many of these need a mask."""
    seen = torch.ones(s_q, s_k, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    visited = [tile for rows in seen.split(block_q) for tile in rows.split(block_k, 1) if tile.any()]
    return len(visited), sum(tile.shape[1] < block_k or not tile.all() for tile in visited)


@contextlib.contextmanager
def count_operations() -> Iterator[dict[str, int]]:
    """Count how often the interpreter executes matmuls, masks (tl.where) and exponentials in the `with` block."""
    counts = dict.fromkeys(("create_dot", "create_select", "create_exp2", "create_exp"), 0)

    def counted(name, operation):
        def counting(*args):
            counts[name] += 1
            return operation(*args)

        return counting

    with contextlib.ExitStack() as patches:
        for name in counts:
            operation = counted(name, getattr(InterpreterBuilder, name))
            patches.enter_context(mock.patch.object(InterpreterBuilder, name, operation))
        yield counts


def assert_counts(
    counts: dict[str, int], case: str, matmuls: int, heads: int, s_q: int, s_k: int, blocks: dict[str, int],
    causal: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Assert `matmuls` matmuls per tile, masks in partial tiles alone, and no exp; only in the interpreter."""
    if not triton.knobs.runtime.interpret or dtype == torch.bfloat16:  # rounding to bfloat16 selects, too
        return
    visited, partial = (heads * n for n in count_tiles(s_q, s_k, blocks["BLOCK_Q"], blocks["BLOCK_K"], causal))
    assert counts["create_dot"] <= matmuls * visited, (
        f"{case}: {counts['create_dot']} matmuls for {visited} tiles: {matmuls} each, and none for skipped tiles"
    )
    assert counts["create_select"] <= partial, (
        f"{case}: {counts['create_select']} masks for {partial} partial tiles: full ones need none"
    )
    assert counts["create_exp"] == 0, f"{case}: exp, where one multiply-add and exp2 would do"


@contextlib.contextmanager
def in_blocks(kernel: Any, **blocks: int) -> Iterator[None]:
    """Launch an autotuned kernel with these blocks inside, instead of those of its first configuration."""
    with mock.patch.object(kernel, "configs", [triton.Config(blocks)]):
        yield
