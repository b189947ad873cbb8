"""Check of exercise 07.12: attention on gathered keys and values, and its gradients, against full attention."""

from __future__ import annotations

import torch

from course_kit.checks.context_parallel.check_07_09 import judge_bf16
from course_kit.checks.context_parallel.trials import (
    SEQ,
    Backward,
    Forward,
    backward_trial,
    forward_trial,
    hidden,
    lossy_trial,
    part_bytes,
)
from course_kit.checks.sequence_parallel.cases import results_of
from course_kit.checks.sequence_parallel.diary import total, unfinished
from course_kit.labs.context_parallel import scores_of
from course_kit.ranks import shared

LAYOUTS = (2, "contiguous", True), (4, "zigzag", True), (2, "zigzag", False)


def check() -> None:
    """Judge all_gather_forward, and then all_gather_backward, on 2 and 4 ranks."""
    with shared(4).within(20):
        cases = [(n, forward_trial, "all_gather_forward", *how) for n, *how in LAYOUTS]
        outcomes = results_of([*cases, (*cases[0], 64, torch.bfloat16)])
        for layout, report in zip(LAYOUTS, outcomes, strict=False):
            for rank, result in enumerate(report):
                judge_forward(rank, *layout, result)
        for rank, result in enumerate(next(outcomes)):
            judge_bf16(f"rank {rank}, in BF16, forward", result.traffic.bytes, 2 * 2 * 64 // 2 * 2 * 8 * 2, result)
        cases = [(n, backward_trial, "all_gather_backward", *how) for n, *how in LAYOUTS]
        extra = (*cases[0], SEQ, torch.bfloat16), (4, lossy_trial, "all_gather_backward")
        outcomes = results_of(cases[:1], [*cases[1:], *extra])
        for layout, report in zip(LAYOUTS, outcomes, strict=False):
            for rank, result in enumerate(report):
                judge_backward(rank, *layout, result)
        for rank, report in enumerate(next(outcomes)):
            part, bytes_sent = 2 * 2 * 8 * 2 * 8, report.traffic.bytes  # part: elements of a rank's k and v
            assert set(report.dtypes) == {torch.bfloat16}, (
                f"rank {rank}, in BF16: the gradients are {', '.join(map(str, report.dtypes))}; "
                "cast to the dtypes of q and k"
            )
            assert bytes_sent == part * (2 + 4), f"rank {rank}, in BF16: {bytes_sent} bytes: sums travel in float32"
        for rank, differences in enumerate(next(outcomes)):
            assert not differences[0], (
                f"rank {rank}, in BF16: the gradient of q is summed in BF16, where small shares are lost: "
                "sum in lse's dtype, and cast once, at the end"
            )


def judge_forward(rank: int, n: int, order: str, causal: bool, report: Forward) -> None:
    """Judge a forward of one rank in one layout."""
    where = f"{n} ranks, {order}, causal {causal}, rank {rank}, forward"
    assert not unfinished(report.events), f"{where}: the all-gather is never waited for"
    assert max(report.errors) < 1e-9, f"{where}: {'out' if report.errors[0] > 1e-9 else 'lse'} is not one process's"
    assert report.same, f"{where}: q, k or v has changed"
    bytes_sent, names = [r.collective for r in report.traffic.records], [word for word, _ in report.events]
    assert bytes_sent == ["all_gather"], f"{where}: sends {bytes_sent}; one all-gather of k and v together is enough"
    enough = (n - 1) * part_bytes(n)
    assert report.traffic.bytes == enough, f"{where}: {report.traffic.bytes} bytes sent, {enough} are enough"
    made, wanted = total(report.events, "attention"), scores_of(rank % n, n, order, SEQ, causal)
    assert made == wanted, f"{where}: {made} scores made, {wanted} are visible: each once, and no others"
    assert hidden(report.events, "gather"), f"{where}: attend to the local shard as others travel: {' · '.join(names)}"


def judge_backward(rank: int, n: int, order: str, causal: bool, report: Backward) -> None:
    """Judge a backward of one rank in one layout."""
    where = f"{n} ranks, {order}, causal {causal}, rank {rank}, backward"
    assert not unfinished(report.events), f"{where}: a transfer is never waited for"
    for name, error in zip("qkv", report.errors, strict=True):
        advice = "" if name == "q" else ": the sum of all ranks' contributions?"
        assert error < 1e-9, f"{where}: the gradient of {name} is not one process's{advice}"
    assert report.same, f"{where}: an argument has changed"
    bytes_sent = [r.collective for r in report.traffic.records]
    assert bytes_sent == ["all_gather", "reduce_scatter"], (
        f"{where}: sends {bytes_sent}; an all-gather and a reduce-scatter"
    )
    enough = 2 * (n - 1) * part_bytes(n)
    assert report.traffic.bytes == enough, f"{where}: {report.traffic.bytes} bytes sent, not {enough}"
    made, wanted = total(report.events, "attention"), scores_of(rank % n, n, order, SEQ, causal)
    assert made == wanted, f"{where}: {made} scores made, {wanted} are visible: each once, and no others"
    assert hidden(report.events, "gather"), f"{where}: attend to the local shard while the others travel"
