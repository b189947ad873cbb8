"""Check of exercise 07.12: attention on gathered keys and values, and its gradients, against whole attention."""

from __future__ import annotations

import torch

from course_kit.checks.context_parallel.trials import (
    SEQ,
    Backward,
    Forward,
    backward_trial,
    forward_trial,
    hidden,
    part_bytes,
)
from course_kit.checks.sequence_parallel.cases import told_of
from course_kit.checks.sequence_parallel.diary import total, unfinished
from course_kit.labs.context_parallel import scores_of
from course_kit.ranks import shared

LAYOUTS = (2, "contiguous", True), (4, "zigzag", True), (2, "zigzag", False)


def check() -> None:
    """Judge all_gather_forward, and then all_gather_backward, on 2 and 4 ranks."""
    with shared(4).within(20):
        cases = [(n, forward_trial, "all_gather_forward", *how) for n, *how in LAYOUTS]
        for layout, told in zip(LAYOUTS, told_of(cases), strict=True):
            for rank, found in enumerate(told):
                judge_forward(rank, *layout, found)
        cases = [(n, backward_trial, "all_gather_backward", *how) for n, *how in LAYOUTS]
        outcomes = told_of(cases[:1], [*cases[1:], (*cases[0], SEQ, torch.bfloat16)])
        for layout, told in zip(LAYOUTS, outcomes, strict=False):
            for rank, found in enumerate(told):
                judge_backward(rank, *layout, found)
        for rank, told in enumerate(next(outcomes)):
            part, sent = 2 * 2 * 8 * 2 * 8, told.traffic.bytes  # part: numbers in a rank's k and v
            assert set(told.dtypes) == {torch.bfloat16}, f"rank {rank}, in BF16: gradients of {told.dtypes[0]}"
            assert sent == part * (2 + 4), f"rank {rank}, in BF16: {sent} bytes: sums travel in float32"


def judge_forward(rank: int, n: int, order: str, causal: bool, told: Forward) -> None:
    """Judge a forward of one rank in one layout."""
    where = f"{n} ranks, {order}, causal {causal}, rank {rank}, forward"
    assert not unfinished(told.events), f"{where}: the all-gather is never waited for"
    assert max(told.errors) < 1e-9, f"{where}: {'out' if told.errors[0] > 1e-9 else 'lse'} is not one process's"
    assert told.same, f"{where}: q, k or v has changed"
    sent, words = [r.collective for r in told.traffic.records], [word for word, _ in told.events]
    assert sent == ["all_gather"], f"{where}: sends {sent}; one all-gather of k and v together is enough"
    enough = (n - 1) * part_bytes(n)
    assert told.traffic.bytes == enough, f"{where}: {told.traffic.bytes} bytes sent, {enough} are enough"
    made, wanted = total(told.events, "attention"), scores_of(rank % n, n, order, SEQ, causal)
    assert made == wanted, f"{where}: {made} scores made, {wanted} are visible: each once, and no others"
    assert hidden(told.events, "gather"), f"{where}: attend to the own part while others travel; {' · '.join(words)}"


def judge_backward(rank: int, n: int, order: str, causal: bool, told: Backward) -> None:
    """Judge a backward of one rank in one layout."""
    where = f"{n} ranks, {order}, causal {causal}, rank {rank}, backward"
    assert not unfinished(told.events), f"{where}: a transfer is never waited for"
    for name, error in zip("qkv", told.errors, strict=True):
        advice = "" if name == "q" else ": the sum of all ranks' shares?"
        assert error < 1e-9, f"{where}: the gradient of {name} is not one process's{advice}"
    assert told.same, f"{where}: something that was given has changed"
    sent = [r.collective for r in told.traffic.records]
    assert sent == ["all_gather", "reduce_scatter"], f"{where}: sends {sent}; an all-gather and a reduce-scatter"
    enough = 2 * (n - 1) * part_bytes(n)
    assert told.traffic.bytes == enough, f"{where}: {told.traffic.bytes} bytes sent, not {enough}"
    made, wanted = total(told.events, "attention"), scores_of(rank % n, n, order, SEQ, causal)
    assert made == wanted, f"{where}: {made} scores made, {wanted} are visible: each once, and no others"
    assert hidden(told.events, "gather"), f"{where}: attend to the own part while the others travel"
