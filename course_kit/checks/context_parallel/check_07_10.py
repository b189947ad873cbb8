"""Check of exercise 07.10: the ring's gradients of q, k and v against whole attention's, and what travels for them."""

from __future__ import annotations

import torch

from course_kit.checks.context_parallel.trials import SEQ, Backward, backward_trial, hidden, part_bytes
from course_kit.checks.sequence_parallel.cases import told_of
from course_kit.checks.sequence_parallel.diary import total, unfinished
from course_kit.labs.context_parallel import scores_of
from course_kit.ranks import shared

LAYOUTS = (2, "contiguous", True), (4, "contiguous", True), (4, "zigzag", True), (2, "zigzag", False)


def check() -> None:
    """Judge ring_backward on 2 and 4 ranks, and in BF16."""
    cases = [(n, backward_trial, "ring_backward", *how) for n, *how in LAYOUTS]
    with shared(4).within(20):
        outcomes = told_of(cases[:1], [*cases[1:], (*cases[0], 64, torch.bfloat16)])
        for layout, told in zip(LAYOUTS, outcomes, strict=False):
            for rank, found in enumerate(told):
                judge(rank, *layout, found)
        for rank, told in enumerate(next(outcomes)):
            assert set(told.dtypes) == {torch.bfloat16} and max(told.errors) < 0.02, (
                f"rank {rank}, in BF16: gradients of {told.dtypes[0]}, {max(told.errors):.3f} off: "
                "sums in float32, then BF16"
            )
            sent, part = told.traffic.select("send").bytes, 2 * 2 * 64 // 2 * 2 * 8
            assert sent == part * (2 + 4), f"rank {rank}, in BF16: {sent} bytes sent: sums travel in float32"


def judge(rank: int, n: int, order: str, causal: bool, told: Backward) -> None:
    """Judge one rank in one layout; rank: among all of them."""
    where = f"{n} ranks, {order}, causal {causal}, rank {rank}"
    left = unfinished(told.events)
    assert not left, f"{where}: {left} sends or receives are never waited for"
    for name, error in zip("qkv", told.errors, strict=True):
        advice = "" if name == "q" else ": have all ranks' shares come home to the owner?"
        assert error < 1e-9, f"{where}: the gradient of {name} is not one process's{advice}"
    assert told.same, f"{where}: something that was given has changed"
    sent, part = told.traffic.select("send"), part_bytes(n)
    assert {r.collective for r in told.traffic.records} <= {"send", "recv"}, (
        f"{where}: the ring sends and receives, no more"
    )
    assert sent.calls == 2 * (n - 1) and sent.bytes == 2 * (n - 1) * part, (
        f"{where}: {sent.calls} messages, {sent.bytes} bytes in all; {2 * (n - 1)} of {part} bytes are enough"
    )
    made, wanted = total(told.events, "attention"), scores_of(rank % n, n, order, SEQ, causal)
    assert made == wanted, f"{where}: {made} scores made, {wanted} are visible: each once, and no others"
    words = [word for word, _ in told.events if "exchange" in word or word == "attention"]
    assert order == "contiguous" or hidden(told.events, "exchange") >= 2 * n - 3, (  # all but the last sum
        f"{where}: attend to something while keys, values and sums travel, not: {' · '.join(words)}"
    )
