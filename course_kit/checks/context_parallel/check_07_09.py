"""Check of exercise 07.9: the ring's forward against full attention, and which of its transfers are hidden."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_kit.checks.context_parallel.trials import (
    SEQ,
    Forward,
    forward_trial,
    hidden,
    part_bytes,
    shards_alive,
)
from course_kit.checks.sequence_parallel.cases import results_of
from course_kit.checks.sequence_parallel.diary import total, unfinished
from course_kit.labs.context_parallel import scores_of
from course_kit.ranks import shared
from course_lib.sequence_parallel.shards import chunks_of

LAYOUTS = (2, "contiguous", True), (4, "contiguous", True), (4, "zigzag", True), (2, "zigzag", False)


def check() -> None:
    """Judge start_exchange and ring_forward on 2 and 4 ranks."""
    cases = [(n, forward_trial, "ring_forward", *how) for n, *how in LAYOUTS]
    with shared(4).within(20):
        in_bf16 = (*cases[0], 64, torch.bfloat16)
        outcomes = results_of(cases[:1], [*cases[1:], in_bf16, (4, forward_alive)])
        for layout, report in zip(LAYOUTS, outcomes, strict=False):
            for rank, result in enumerate(report):
                judge(rank, *layout, result)
        for rank, result in enumerate(next(outcomes)):
            judge_bf16(
                f"rank {rank}, in BF16", result.traffic.select("send").bytes, 2 * 2 * 64 // 2 * 2 * 8 * 2, result
            )
        most = max(next(outcomes))
        assert most <= 3, (
            f"4 ranks: {most} shards of k and v are alive at once: the one in use and the one that arrives are enough"
        )


def forward_alive(group: dist.ProcessGroup) -> int:
    """On a rank: how many shards of k and v the ring's forward makes and holds at once."""
    return shards_alive(group)[0]


def judge_bf16(where: str, bytes_sent: int, enough: int, report: Forward) -> None:
    """Judge a forward in BF16 of one rank by dtypes, bytes and errors."""
    out, lse = (str(dtype).removeprefix("torch.") for dtype in report.dtypes)
    assert (out, lse) == ("bfloat16", "float32"), (
        f"{where}: out is {out} and lse {lse}; they should be bfloat16, as q, and float32"
    )
    assert bytes_sent == enough, f"{where}: {bytes_sent} bytes sent, {enough} are enough: k and v as they are"
    assert report.errors[0] < 5e-3 and report.errors[1] < 1e-4, (
        f"{where}: out is off by {report.errors[0]:.4f}, lse by {report.errors[1]:.1e}: "
        "merge in float32 (initial_out_lse)"
    )


def steps_with_work(rank: int, n: int, order: str, causal: bool) -> int:
    """Return the number of steps before the last in which a rank's queries see some of the current keys."""
    last = max(chunks_of(rank, n, order))
    return sum(not causal or min(chunks_of((rank - step) % n, n, order)) <= last for step in range(n - 1))


def judge(rank: int, n: int, order: str, causal: bool, report: Forward) -> None:
    """Judge one rank in one layout; rank: among all of them."""
    where = f"{n} ranks, {order}, causal {causal}, rank {rank}"
    left = unfinished(report.events)
    assert not left, f"{where}: {left} sends or receives are never waited for"
    assert max(report.errors) < 1e-9, (
        f"{where}: {'out' if report.errors[0] > 1e-9 else 'lse'} is not one process's: all visible keys?"
    )
    assert report.same, f"{where}: q, k or v has changed"
    bytes_sent, part = report.traffic.select("send"), part_bytes(n)
    assert {r.collective for r in report.traffic.records} <= {"send", "recv"}, (
        f"{where}: the ring sends and receives, no more"
    )
    assert bytes_sent.bytes == (n - 1) * part and bytes_sent.calls == n - 1, (
        f"{where}: {bytes_sent.calls} messages, {bytes_sent.bytes} bytes in all; {n - 1} of {part} bytes are enough, "
        "of k and v together"
    )
    after, peers = rank // n * n + (rank + 1) % n, {r.peer for r in bytes_sent.records}
    assert peers == {after}, f"{where}: sends to {sorted(map(str, peers))}, and rank {after} is next"
    made, wanted = total(report.events, "attention"), scores_of(rank % n, n, order, SEQ, causal)
    assert made == wanted, f"{where}: {made} scores made, {wanted} are visible: each once, and no others"
    names = [word for word, _ in report.events if "exchange" in word or word == "attention"]
    assert "start exchange" in names, f"{where}: start the exchange with dist.batch_isend_irecv"
    assert hidden(report.events, "exchange") >= steps_with_work(rank % n, n, order, causal), (
        f"{where}: in each step start the exchange, attend, and then wait, not: {' · '.join(names)}"
    )
