"""Check of exercise 09.15: `owner_ranks` of a weight, and `final_backwards`, after which weights are complete."""

from __future__ import annotations

from torch import nn

from course_kit.checks.pipeline.lists import listed
from course_lib.pipeline import tied_weights
from course_lib.pipeline.actions import Action
from course_lib.pipeline.schedules import interleaved, one_f_one_b, zero_bubble_v

BOTH = [[Action("F", 0, 0), Action("F", 1, 1)], [Action("F", 1, 0), Action("F", 0, 1)]]


def linears(*stages: int) -> nn.ModuleDict:
    """Return a small layer for each stage."""
    return nn.ModuleDict({str(stage): nn.Linear(2, 2) for stage in stages})


def check() -> None:
    """Assert both functions for schedules with one stage per rank and with two, and for one that is out of order."""
    for schedule, stages, wanted, why in (
        (one_f_one_b(4, 4), (0, 3), (0, 3), "1F1B, a weight tied across stages 0 and 3"),
        (zero_bubble_v(4, 4), (0, 7), (0,), "ZB-V: rank 0 has both ends, stages 0 and 7"),
        (interleaved(4, 4, 2), (0, 7), (0, 3), "interleaved: stage 7 is on rank 3"),
        (BOTH, (1,), (0, 1), "a stage may be on two ranks (DualPipe)"),
    ):
        result = tied_weights.owner_ranks(schedule, stages)
        assert result == wanted, f"owner_ranks, {why}: {result}, not {wanted}"
    mixed = [Action(*each) for each in (("F", 0, 0), ("F", 0, 1), ("I", 0, 0), ("W", 0, 0), ("B", 0, 1))]
    final = tied_weights.final_backwards(linears(0), mixed)
    assert final == {4}, (
        f"{listed([mixed])}: {sorted(final)}, not [4]: a stage may have W's and B's, and its last one is a B"
    )
    for schedule in (zero_bubble_v(4, 8), zero_bubble_v(4, 9)):
        actions = schedule[0]
        last = {max(i for i, a in enumerate(actions) if a.stage == stage and a.kind in "BW") for stage in (0, 7)}
        final = tied_weights.final_backwards(linears(0, 7), actions)
        assert final == last, f"ZB-V, rank 0: {sorted(final)}, not {sorted(last)}: the last W of each stage"
    shared = linears(0, 7)
    shared["7"].weight = shared["0"].weight
    final = tied_weights.final_backwards(shared, actions)
    assert final == {max(last)}, (
        f"stages 0 and 7 share a weight: {sorted(final)}, not {max(last)}: only the later stage's last W counts"
    )
    late = [Action(*each) for each in (("F", 0, 1), ("F", 0, 0), ("B", 0, 1), ("B", 0, 0))]
    assert tied_weights.final_backwards(linears(0), late) == {3}, (
        "the last B is the one that the list has last, whatever its micro-batch"
    )
    actions = one_f_one_b(4, 8)[1]
    assert tied_weights.final_backwards(linears(1), actions) == {len(actions) - 1}, "1F1B: its last B"
