"""Check of exercise 07.10: the ring's gradients of q, k and v against full attention's, and their traffic."""

from __future__ import annotations

import torch

from course_kit.checks.context_parallel.trials import (
    SEQ,
    Backward,
    backward_trial,
    hidden,
    lossy_trial,
    part_bytes,
    shards_alive,
)
from course_kit.checks.sequence_parallel.cases import results_of
from course_kit.checks.sequence_parallel.diary import total, unfinished
from course_kit.labs.context_parallel import scores_of
from course_kit.ranks import shared

LAYOUTS = (2, "contiguous", True), (4, "contiguous", True), (4, "zigzag", True), (2, "zigzag", False)
MOST_SHARDS = 8  # k and v: in use and arriving; sums: the local one, new, outgoing, arriving; and two copies


def check() -> None:
    """Judge ring_backward on 2 and 4 ranks, and in BF16."""
    cases = [(n, backward_trial, "ring_backward", *how) for n, *how in LAYOUTS]
    with shared(4).within(20):
        extra = (*cases[0], 64, torch.bfloat16), (4, lossy_trial, "ring_backward"), (4, shards_alive)
        outcomes = results_of(cases[:1], [*cases[1:], *extra])
        for layout, report in zip(LAYOUTS, outcomes, strict=False):
            for rank, result in enumerate(report):
                judge(rank, *layout, result)
        for rank, report in enumerate(next(outcomes)):
            dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in report.dtypes)
            assert set(report.dtypes) == {torch.bfloat16}, (
                f"rank {rank}, in BF16: the gradients are {dtypes}: sum in float32, then cast to the dtypes of q and k"
            )
            assert max(report.errors) < 0.02, f"rank {rank}, in BF16: gradients {max(report.errors):.3f} off"
            bytes_sent, part = report.traffic.select("send").bytes, 2 * 2 * 64 // 2 * 2 * 8
            assert bytes_sent == part * (2 + 4), (
                f"rank {rank}, in BF16: {bytes_sent} bytes sent: sums travel in float32"
            )
        for rank, differences in enumerate(next(outcomes)):
            lost = [name for name, difference in zip("qkv", differences, strict=True) if difference]
            assert not lost, (
                f"rank {rank}, in BF16: the gradient of {lost[0]} is summed in BF16, where small shares are lost: "
                "sum in lse's dtype, and cast once, at the end"
            )
        most = max(backward for _, backward in next(outcomes))
        assert most <= MOST_SHARDS, (
            f"4 ranks: {most} shards of k and v or of their gradients are alive at once, {MOST_SHARDS} are enough: "
            "drop what has been passed on"
        )


def judge(rank: int, n: int, order: str, causal: bool, report: Backward) -> None:
    """Judge one rank in one layout; rank: among all of them."""
    where = f"{n} ranks, {order}, causal {causal}, rank {rank}"
    left = unfinished(report.events)
    assert not left, f"{where}: {left} sends or receives are never waited for"
    for name, error in zip("qkv", report.errors, strict=True):
        advice = "" if name == "q" else ": have all ranks' contributions reached the owner?"
        assert error < 1e-9, f"{where}: the gradient of {name} is not one process's{advice}"
    assert report.same, f"{where}: an argument has changed"
    bytes_sent, part = report.traffic.select("send"), part_bytes(n)
    assert {r.collective for r in report.traffic.records} <= {"send", "recv"}, (
        f"{where}: the ring sends and receives, no more"
    )
    assert bytes_sent.calls == 2 * (n - 1) and bytes_sent.bytes == 2 * (n - 1) * part, (
        f"{where}: {bytes_sent.calls} messages, {bytes_sent.bytes} bytes; {2 * (n - 1)} of {part} bytes are enough"
    )
    made, wanted = total(report.events, "attention"), scores_of(rank % n, n, order, SEQ, causal)
    assert made == wanted, f"{where}: {made} scores made, {wanted} are visible: each once, and no others"
    names = [word for word, _ in report.events if "exchange" in word or word == "attention"]
    assert order == "contiguous" or hidden(report.events, "exchange") >= 2 * n - 3, (  # all but the last sum
        f"{where}: attend to something while keys, values and sums travel, not: {' · '.join(names)}"
    )
