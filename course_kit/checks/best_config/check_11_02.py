"""Check of exercise 11.2: micro-batches in flight and bubbles of eight schedules, against notebook 09's simulator."""

from __future__ import annotations

import numpy as np

from course_lib.best_config import stage_loads
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout
from course_lib.pipeline.actions import validate
from course_lib.pipeline.schedules import schedule_by_name
from course_lib.pipeline.simulation import simulate

SCHEDULES = ("1f1b", "afab", "naive", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe")
SIZES = (2, 8, 2), (4, 8, 2), (4, 16, 4), (8, 32, 2)  # p, m, v
FEW = (4, 1, 2), (4, 3, 2), (4, 6, 2), (8, 9, 2)  # micro-batches that fill no pipeline
THEIR_FEW = {"interleaved": ((4, 4, 2),), "dualpipe": ()}  # these take some numbers only


def played(name: str, p: int, m: int, v: int) -> tuple[float, float]:
    """Return the bubble as a share of 1F1B's, and the most micro-batches of all its layers that a rank holds."""
    schedule, parts = schedule_by_name(name, p, m, v), {"interleaved": v, "zb-v": 2}.get(name, 1)
    run = simulate(schedule, 1 / parts, 1 / parts, 1 / parts)  # an action has that part of a rank's layers
    lasted = max(ends[-1] for ends in run.ends) - min(starts[0] for starts in run.starts)
    return (lasted - max(run.busy)) / (3 * (p - 1)), max(validate(schedule)) / parts


def check() -> None:
    """Assert both functions for full and short pipelines, for none, and for arrays of layouts."""
    for name in SCHEDULES:
        for p, m, v in (*SIZES, *THEIR_FEW.get(name, FEW)):
            bubble, held = played(name, p, m, v)
            layout = Layout(pp=p, schedule=name, virtual=v)
            got = float(stage_loads.bubble_share(layout, m))
            assert abs(got - bubble) < 1e-9, (
                f"{name}, p = {p}, m = {m}: the simulator's bubble is {bubble:.3f} of 1F1B's, yours {got:.3f}"
            )
            got = float(stage_loads.in_flight(layout, m))
            assert abs(got - held) < 1e-9, (
                f"{name}, p = {p}, m = {m}, v = {v}: a rank holds {held:g} micro-batches of its layers, yours {got:g}"
            )
    short = Layout(pp=8, schedule="1f1b")
    assert float(stage_loads.in_flight(short, 2)) == 2, "1F1B with two micro-batches can't hold more than two"
    one_chunk = Layout(pp=4, schedule="interleaved", virtual=1)
    got = float(stage_loads.in_flight(one_chunk, 8))
    assert got == 4, f"interleaved, p = 4, m = 8, v = 1 is 1F1B: a rank holds 4 micro-batches, yours {got:g}"
    for name in SCHEDULES:
        got = float(stage_loads.in_flight(Layout(pp=1, schedule=name), 4))
        assert got == 1, f"{name} without a pipeline: one micro-batch is in flight, yours {got:g}: use is_schedule"
    two = LayoutTable.of([Layout(pp=4, schedule="zb-h1"), Layout(pp=4, schedule="afab")])
    bubbles, in_flight = stage_loads.bubble_share(two, 8), stage_loads.in_flight(two, 8)
    assert np.allclose(bubbles, [1 / 3, 1]) and np.allclose(in_flight, [4, 8]), (
        "arrays of layouts give other results than one at a time"
    )
