"""The widget of notebook 09."""

from __future__ import annotations

from ipywidgets import Dropdown, IntSlider

from course_kit.figures import pipeline as figures
from course_kit.widgets.redrawn import Drawing, redrawn

NAMES = ["naive", "AFAB", "1F1B", "interleaved, depth first", "interleaved, breadth first"]
NAMES += ["ZB-H1", "ZB-H2", "ZB-V", "DualPipe"]


def any_schedule() -> Drawing:
    """A schedule by rank and time, its bubble and its memory, with sliders for p, m, v and all times."""
    limits = {"p": (4, 2, 6), "m": (8, 1, 12), "v": (2, 1, 4), "t_f": (2, 1, 3), "t_i": (2, 1, 3), "t_w": (2, 1, 3)}
    sliders = {name: IntSlider(value=at, min=low, max=high) for name, (at, low, high) in limits.items()}
    sliders["t_comm"] = IntSlider(value=0, min=0, max=3)
    return redrawn(figures.any_schedule, name=Dropdown(value="1F1B", options=NAMES, description="schedule"), **sliders)
