"""Check of exercise 07.14: the megabytes that each method sends, by formula, beside four ranks' traffic, scaled up."""

from __future__ import annotations

import functools

import torch.distributed as dist

from course_kit.checks.context_parallel.trials import SEQ, method_trial
from course_kit.labs.tensor_parallel.models import in_groups
from course_kit.ranks import shared
from course_lib.context_parallel import model as context

RANKS, TOKENS, HEADS, KV_HEADS, D = 8, 131072, 32, 8, 128  # Llama-3 8B


def sent_by_methods(group: dist.ProcessGroup) -> dict[str, int]:
    """On a rank: bytes sent in forward by each method, for SEQ tokens and equal numbers of K/V heads and heads."""
    return {
        name: method_trial(group, method, "zigzag", True, 4, 4).forward.bytes
        for name, method in context.METHODS.items()
    }


@functools.cache
def measured() -> dict[str, int]:
    """sent_by_methods on rank 0 of 4."""
    return shared(4)(in_groups, 4, sent_by_methods)[0]


def factor(method: str, n: int, heads: int, kv_heads: int) -> float:
    """Return the bytes that a rank of n sends in forward, in sizes of its keys."""
    if method == "ulysses":
        return (n - 1) / n * (2 * heads + 2 * kv_heads) / kv_heads
    return 2 * (n - 1)


def check(megabytes_sent: dict[str, float | None]) -> None:
    """Judge the prediction by the formula; print what this code sends, scaled up."""
    with shared(4).within(20):
        bytes_sent = measured()
    keys = TOKENS // RANKS * KV_HEADS * D * 2 / 1e6  # MB of a rank's keys
    for name in bytes_sent:
        expected, message = factor(name, RANKS, HEADS, KV_HEADS) * keys, megabytes_sent.get(name)
        assert message and abs(message / expected - 1) < 0.02, (
            f"{name}: {message if message is None else f'{message:.4g}'} MB is not what this code sends. "
            f"{'(n-1)/n of its local q, k, v and out' if name == 'ulysses' else 'n - 1 times a shard of k and v'}?"
        )
    small = 2 * SEQ // 4 * 4 * 8 * 8  # bytes of a rank's keys in the trial: [b, s/n, heads, d] in float64
    for name, result in bytes_sent.items():
        scaled = result / small / factor(name, 4, 4, 4) * factor(name, RANKS, HEADS, KV_HEADS)
        print(f"{name:<12}{scaled * keys:>8.0f} MB per rank")
