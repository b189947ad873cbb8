"""Widget of notebook 05."""

from __future__ import annotations

from ipywidgets import Dropdown, IntSlider, SelectionSlider

from course_kit.figures.zero import states_by_stage
from course_kit.widgets.redrawn import Drawing, redrawn
from course_lib.single_gpu.memory import POLICIES
from course_lib.single_gpu.model import PRESETS


def states_widget() -> Drawing:
    """Return controls of model, GPUs, precision and GPU memory above the memory of each stage."""
    return redrawn(
        states_by_stage,
        per_row=2,
        preset=Dropdown(options=list(PRESETS), value="llama3-8B", description="model"),
        gpus=SelectionSlider(options=[2**n for n in range(11)], value=8, description="GPUs"),
        policy=Dropdown(options=list(POLICIES), value="bf16", description="precision"),
        gpu_gib=IntSlider(80, min=16, max=192, step=8, description="GPU GiB"),
    )
