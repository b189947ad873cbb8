"""Check of exercise 08.4: experts with as many slots each, against the formula."""

from __future__ import annotations

from course_kit.checks.expert_parallel.ways import ONE_CHOICE, judge_edges, judge_way
from course_kit.labs.expert_parallel.experts import KINDS, by_token, some_choices, some_experts
from course_kit.labs.tensor_parallel.models import relative_error
from course_lib.expert_parallel import experts


def check() -> None:
    """Judge batched_experts."""
    for kind in KINDS:
        slots = int((some_choices(kind)[1] != 0).sum(0).max())
        for work in judge_way(experts.batched_experts, kind, number=slots, enough=8 * slots * ONE_CHOICE):
            assert not work.read, f"{work.read[0]} makes the host wait for the device"
    module, (x, gates, _) = some_experts(), some_choices()
    saved = gates.detach() * (gates.detach().t() >= gates.detach().t().topk(3, dim=1).values[:, -1:]).t()
    assert relative_error(experts.batched_experts(module, x, gates, 3), by_token(module, x, saved)) < 1e-5, (
        "with 3 slots an expert takes the tokens of its 3 largest gates"
    )
    assert relative_error(experts.batched_experts(module, x, gates, 999), by_token(module, x, gates)) < 1e-5, (
        "999 slots for 20 tokens"
    )
    judge_edges(experts.batched_experts, 3)
