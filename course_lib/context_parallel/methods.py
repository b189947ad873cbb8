"""Names of the methods of context parallelism, and what Ulysses needs; without torch."""

from __future__ import annotations

METHOD_NAMES = ("ring", "all_gather", "ulysses")


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise ValueError if Ulysses cannot give every rank the same number of heads."""
    if heads % ranks or kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"ulysses: {ranks} ranks can't share {heads} heads and {kv_heads} K/V heads")
