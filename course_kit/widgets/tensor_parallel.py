"""Widget of notebook 06."""

from __future__ import annotations

from ipywidgets import SelectionSlider

from course_kit.figures.tensor_parallel import layer_on_the_clock
from course_kit.widgets.redrawn import Drawing, redrawn


def layer_widget() -> Drawing:
    """Return sliders of width, bandwidth and tp above a layer's matmuls and all-reduces."""
    speeds = [12, 25, 50, 100, 200, 300, 362, 436, 900]
    return redrawn(
        layer_on_the_clock,
        hidden=SelectionSlider(options=[1024, 2048, 3072, 4096, 8192, 16384], value=4096, description="h"),
        gb_s=SelectionSlider(options=speeds, value=436, description="GB/s"),
        tp=SelectionSlider(options=[2, 4, 8, 16, 32, 64], value=8, description="tp"),
    )
