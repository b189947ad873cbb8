"""Widgets of notebook 10: a layout as a map of its ranks."""

from __future__ import annotations

import ipywidgets
from matplotlib.figure import Figure

from course_kit.figures.five_d import rank_map
from course_kit.widgets.redrawn import Drawing, redrawn
from course_lib.five_d import layouts
from course_lib.five_d.layouts import Layout

MAPS = ("dp2,pp2,cp2,tp2", "dp2,tp8", "pp4,tp4", "dp4,pp2,tp2", "cp4,tp4", "dp2,cp8", "dp16")  # of 16 GPUs each


def map_of_layout() -> Drawing:
    """Return a widget: the map of 16 GPUs for a choice of layout, and of the GPU whose groups are colored."""

    def draw(layout: str, gpu: int) -> Figure:
        parsed = Layout.parse(layout)
        return rank_map([layouts.coordinates(rank, parsed) for rank in range(parsed.ranks)], gpu)

    return redrawn(draw, layout=ipywidgets.Dropdown(options=MAPS), gpu=ipywidgets.IntSlider(5, 0, 15))
