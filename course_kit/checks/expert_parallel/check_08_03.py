"""Check of exercise 08.3: experts by grouped matmuls, against the formula, without a loop or a read on the host."""

from __future__ import annotations

import torch

from course_kit.checks.expert_parallel.ways import judge_edges, judge_way
from course_kit.labs.expert_parallel.experts import KINDS, some_choices
from course_lib.expert_parallel import experts


def check() -> None:
    """Judge sorted_choices and grouped_experts."""
    _, gates, choices = some_choices("empty experts")
    expert, token, ends = experts.sorted_choices(gates, choices)
    assert expert.tolist() == sorted(expert.tolist()), "the choices are not sorted by expert"
    assert ends.dtype == torch.int32 and ends.tolist() == (gates != 0).sum(0).cumsum(0).tolist(), (
        f"ends are {ends.tolist()} of {ends.dtype}: at which row does each expert's stretch end?"
    )
    done = {}
    for number in (8, 32):
        for kind in KINDS:
            done[number] = judge_way(experts.grouped_experts, kind, number)
            for word, work in zip(("forward", "backward"), done[number], strict=True):
                assert not work.read, f"{word}: {work.read[0]} makes the host wait for the device"
    for word, eight, many in zip(("forward", "backward"), done[8], done[32], strict=True):
        assert eight.operators == many.operators, (
            f"{word}: {eight.operators} operators for 8 experts, {many.operators} for 32: is there a loop?"
        )
    judge_edges(experts.grouped_experts, 0)
