"""Check of exercise 08.2: experts one after the other, against the formula."""

from __future__ import annotations

from course_kit.checks.expert_parallel.ways import judge_edges, judge_way
from course_kit.labs.expert_parallel.experts import KINDS
from course_lib.expert_parallel import experts


def check() -> None:
    """Judge loop_experts."""
    for kind in KINDS:
        judge_way(experts.loop_experts, kind)
    judge_edges(experts.loop_experts, 0)
