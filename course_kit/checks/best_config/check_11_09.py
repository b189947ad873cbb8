"""Check of exercise 11.9: layouts by hand for three jobs, against the best of a search within the same risk."""

from __future__ import annotations

from course_kit.labs.best_config import JOBS
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.planner import RISK, Estimate, estimate, search
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.single_gpu.model import PRESETS

GIB = 2**30


def largest_losses(plan: Estimate, layout: Layout) -> str:
    """Return the two parts of a step, besides the model's own FLOPs, that take most of it."""
    again = plan.time["matrices"] / 4 + plan.time["attention"] * 2 / 9  # what full recomputation repeats
    spent = plan.time | {"recomputation": again * (layout.recompute == "full")}
    shares = {name: float(part / plan.step_s) for name, part in spent.items()}
    others = set(shares) - {"matrices", "attention", "output layer"}
    most = sorted(others, key=lambda name: (shares[name], name), reverse=True)[:2]
    return " and ".join(f"{name} ({shares[name]:.0%})" for name in most)


def check(by_hand: dict[str, Layout]) -> None:
    """Assert that each job has a layout that fits, is safe, and is at least 85% as fast as the best; print how fast."""
    assert isinstance(by_hand, dict) and set(by_hand) == set(JOBS), "a layout for A, B and C"
    if all(layout == Layout() for layout in by_hand.values()):
        raise NotImplementedError  # as the cell begins
    for job, (preset, gpus, batch, seq) in JOBS.items():
        layout = by_hand[job]
        assert isinstance(layout, Layout), f"{job}: {layout!r} is no Layout; Layout.parse(...) makes one of words"
        try:
            check_layout(PRESETS[preset], layout, gpus, batch, seq)
        except ValueError as error:
            raise AssertionError(f"{job}: {error}") from None
        plan = estimate(PRESETS[preset], CLUSTERS["H100"], layout, batch, seq)
        needs = ", ".join(f"{name} {size / GIB:.0f}" for name, size in plan.memory.items() if size > GIB)
        assert plan.fits, f"{job}: {layout} needs {plan.needed_bytes / GIB:.0f} GiB: {needs}"
        assert plan.risk <= RISK, (
            f"{job}: {layout} needs {plan.needed_bytes / GIB:.0f} of {plan.usable_bytes / GIB:.0f} GiB, a risk of "
            f"{plan.risk:.0%} to run out of memory: {needs}"
        )
        best = search(PRESETS[preset], CLUSTERS["H100"], gpus, batch, seq).best(1)[0][1]
        assert plan.tokens_per_s > 0.85 * best, (
            f"{job}: {layout} reaches {plan.tokens_per_s / best:.0%} of the best; it loses most to "
            f"{largest_losses(plan, layout)}"
        )
        print(f"{job}: {layout} reaches {plan.tokens_per_s / best:.0%} of the best of all")
