"""The slider of notebook 13: a walk through the tiles of FlashAttention's forward."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as w

from course_kit.figures.flash_attention import walk_step
from course_kit.labs.tile_walk import WalkStep
from course_kit.widgets.redrawn import Drawing, redrawn


def walk_slider(steps: Sequence[WalkStep]) -> Drawing:
    """Return `walk_step` of the step that a slider selects and a play button advances.

    Raises ValueError if there is no step.
    """
    if not steps:
        raise ValueError("a walk needs at least one step")
    slider = w.IntSlider(value=1, min=1, max=len(steps), layout=w.Layout(width="420px"))
    play = w.Play(value=1, min=1, max=len(steps), interval=1000)
    w.jslink((play, "value"), (slider, "value"))
    walk = redrawn(lambda tile: walk_step(steps, tile), tile=slider)
    return Drawing([w.HBox([play]), *walk.children])
