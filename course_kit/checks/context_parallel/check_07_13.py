"""Check of exercise 07.13: Ulysses' results, gradients and traffic against full attention, and a refusal."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_kit.checks.context_parallel.trials import SEQ, Both, method_trial
from course_kit.checks.sequence_parallel.cases import results_of, retained_tensors
from course_kit.labs.tensor_parallel.models import in_groups
from course_kit.ranks import shared
from course_lib.context_parallel import attention

LAYOUTS = (  # ranks, order, causal, heads, K/V heads, dtype
    (2, "contiguous", True, 4, 2, torch.float64),
    (4, "zigzag", True, 4, 2, torch.float64),
    (4, "zigzag", False, 8, 8, torch.float64),
    (4, "contiguous", True, 4, 1, torch.float64),
    (2, "zigzag", True, 4, 2, torch.bfloat16),
)


def ulysses_trial(group: dist.ProcessGroup, *how) -> Both:
    """On a rank: method_trial of ulysses_attention."""
    return method_trial(group, attention.ulysses_attention, *how)


def ulysses_refusal(group: dist.ProcessGroup) -> str:
    """On a rank: the error of 6 heads; empty if there is none."""
    heads = torch.zeros(1, 2, 6, 4)
    try:
        attention.ulysses_attention(heads, heads, heads, group)
    except ValueError as error:
        return str(error)
    return ""


def retained_by_exchange(group: dist.ProcessGroup) -> int:
    """On a rank: the number of tensors that AllToAll keeps for backward."""
    return retained_tensors(attention.AllToAll.apply(torch.zeros(2, 3, requires_grad=True), group))


def check() -> None:
    """Judge AllToAll and ulysses_attention on 2 and 4 ranks."""
    ranks, cases = shared(4), [(n, ulysses_trial, *how) for n, *how in LAYOUTS]
    with ranks.within(20):
        for (n, order, _, heads, kv, dtype), report in zip(LAYOUTS, results_of(cases[:1], cases[1:]), strict=True):
            for rank, result in enumerate(report):
                where = f"{n} ranks, {order}, {heads} heads, {kv} K/V heads, rank {rank}, {dtype}"
                enough = 2 * SEQ // n * (2 * heads + 2 * max(kv, n)) * 8 * dtype.itemsize * (n - 1) // n
                judge(where, enough, result, dtype)
        retained = max(ranks(in_groups, 2, retained_by_exchange))
        assert not retained, f"AllToAll keeps {retained} tensor{'s' * (retained > 1)} for backward: the group is enough"
        assert "6 heads" in ranks(in_groups, 4, ulysses_refusal)[0], (
            "6 heads can't be shared by 4 ranks: check_heads says so"
        )


def judge(where: str, enough: int, report: Both, dtype: torch.dtype) -> None:
    """Judge one rank in one layout; enough: bytes sent each way."""
    for name, error in zip(("out", "q's gradient", "k's gradient", "v's gradient"), report.errors, strict=True):
        advice = "are heads, tokens and order right?" if name == "out" else "AllToAll's backward?"
        most = 1e-9 if dtype == torch.float64 else 0.02
        assert error < most, f"{where}: {name} is not one process's: {advice}"
    assert set(report.dtypes) == {dtype}, (
        f"{where}: out and its gradients are {report.dtypes}, they should be {dtype}, as q"
    )
    assert report.blocks, f"{where}: the `attention` that was given is never called"
    for traffic, word in ((report.forward, "forward"), (report.backward, "backward")):
        bytes_sent = [r.collective for r in traffic.records]
        assert bytes_sent == ["all_to_all"] * 2, (
            f"{where}, {word}: sends {bytes_sent}; two all-to-alls: q, k and v in one, out in the other"
        )
        assert traffic.bytes == enough, f"{where}, {word}: {traffic.bytes} bytes sent, {enough} are enough"
