"""Check of exercise 11.8: exactly the layouts one change away from a given one, each of them consistent."""

from __future__ import annotations

import dataclasses
import re

from course_lib.best_config import recipe
from course_lib.five_d.layouts import Layout

START = "dp4,pp2,tp4,sp,zero1,mb2"
NEAR = (  # of START: degrees, micro-batches, ZeRO stages and recomputation, schedules
    "dp8,tp4,sp,zero1,mb2 dp2,pp4,tp4,sp,zero1,mb2 dp8,pp2,tp2,sp,zero1,mb2 dp2,pp2,tp8,sp,zero1,mb2 "
    "dp2,pp2,cp2,tp4,sp,zero1,mb2 dp4,cp2,tp4,sp,zero1,mb2 dp4,pp4,tp2,sp,zero1,mb2 dp4,tp8,sp,zero1,mb2 "
    "dp4,pp2,cp2,tp2,sp,zero1,mb2 "
    "dp4,pp2,tp4,sp,zero1,mb4 dp4,pp2,tp4,sp,zero1 "
    "dp4,pp2,tp4,sp,mb2 dp4,pp2,tp4,sp,zero2,mb2 dp4,pp2,tp4,sp,zero3,mb2,keep dp4,pp2,tp4,sp,zero1,mb2,full "
    "dp4,pp2,tp4,sp,zero1,mb2,interleaved dp4,pp2,tp4,sp,zero1,mb2,zb-h1"
).split()

CHANGED = ("dp", "pp", "cp", "tp", "micro_batch", "zero_stage", "recompute", "schedule")


def new_values(one: Layout, start: Layout) -> list[str]:
    """Return the values of `one` that `start` does not have, of the fields that a change is about."""
    return [str(getattr(one, name)) for name in CHANGED if getattr(one, name) != getattr(start, name)]


def check_others() -> None:
    """Assert that no change touches other settings, and that only even degrees are halved."""
    start = Layout.parse("dp4,pp2,cp2,tp2,sp,zero1,ulysses,contiguous,interleaved,v4")
    for why, one in recipe.changes(start).items():
        for field in dataclasses.fields(start):
            if field.name in (*CHANGED, "sequence_parallel", "gather_once"):
                continue
            before, after = getattr(start, field.name), getattr(one, field.name)
            assert before == after, f"{start}, {why}: {field.name} was {before}, and is {after}: all else stays"
    odd = Layout.parse("dp6,pp3,tp2,sp")
    for why, one in recipe.changes(odd).items():
        assert one.ranks == odd.ranks, f"{odd}, {why}: {one.ranks} GPUs, not {odd.ranks}: only even degrees are halved"


def check() -> None:
    """Assert the changes of START, that a change can be undone, and what goes with tp, with ZeRO-3 and with pp."""
    start = Layout.parse(START)
    near = recipe.changes(start)
    assert all(one.ranks == start.ranks for one in near.values()), "a change must leave the number of GPUs as it is"
    result = set(near.values())
    missing = [spec for spec in NEAR if Layout.parse(spec) not in result]
    assert not missing, f"not among the changes of {start}, all else as it was: {', '.join(missing)}"
    other = result - {start, *map(Layout.parse, NEAR)}
    assert not other, f"not one change away from {start}: {', '.join(map(str, other))}"
    for spec, one in near.items():
        values, numbers = new_values(one, start), re.findall(r"\d+", str(spec))
        named = all(value in (numbers if value.isdigit() else str(spec)) for value in values)
        assert named, f"{spec!r} is {one}: the settings that have changed have the new values: {', '.join(values)}"
    check_others()
    back = set(recipe.changes(Layout.parse("pp4,zb-h1,full")).values())
    missing = [spec for spec in ("pp4,zb-h1", "pp4,full") if Layout.parse(spec) not in back]
    assert not missing, f"not among the changes of pp4,zb-h1,full: {', '.join(missing)}; a change can be undone"
    for spec in ("dp8,zero3", "dp2,pp4,tp2,sp,zero3,keep,zb-h1", "tp8,sp"):
        for why, one in recipe.changes(Layout.parse(spec)).items():
            assert one.sequence_parallel == (one.tp > 1), f"{spec}, {why}: sequence parallelism goes with tp above 1"
            assert one.gather_once == (one.zero_stage == 3 and one.pp > 1), (
                f"{spec}, {why}: keep goes with zero3 under a pipeline"
            )
            assert one.pp > 1 or one.schedule == "1f1b", f"{spec}, {why}: a schedule without a pipeline"
            assert one.micro_batch >= 1, f"{spec}, {why}: a micro-batch of {one.micro_batch}"
