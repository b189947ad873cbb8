"""A figure with controls, which is drawn again whenever one of them changes.

redrawn(stages, gpus=SelectionSlider(options=[1, 2, 4, 8]), policy=Dropdown(options=list(POLICIES)))
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable

import ipywidgets
from matplotlib.figure import Figure

SHARP = 2  # pixels per point of the screen


def png(figure: Figure) -> bytes:
    """Return a figure as a PNG image, with two pixels per point of the screen."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=SHARP * figure.dpi)
    return buffer.getvalue()


class Drawing(ipywidgets.VBox):
    """Controls and a picture. A notebook that is read without a kernel shows the picture."""

    def _repr_mimebundle_(self, **kwargs) -> tuple[dict, dict]:
        """Return the widget's output with the picture in it, for a viewer that shows no widget."""
        image = next(child for child in self.children if isinstance(child, ipywidgets.Image))
        still = {"image/png": base64.b64encode(image.value).decode()} if image.value else {}
        return super()._repr_mimebundle_(**kwargs) | still, {kind: {"width": int(image.width)} for kind in still}


def redrawn(draw: Callable[..., Figure], per_row: int = 3, **controls: ipywidgets.Widget) -> Drawing:
    """Return controls above the figure that `draw(**values)` returns for their values.

    `draw` must keep its axes fixed, so that what changes is seen to change. While it works, a line says so; if it
    raises ValueError, the line gives the reason and the figure stays.
    """
    image, line = ipywidgets.Image(format="png"), ipywidgets.HTML()

    def redraw(_=None) -> None:
        line.value = "<i>computing…</i>"
        try:
            figure = draw(**{name: control.value for name, control in controls.items()})
        except ValueError as error:
            line.value = str(error)
            return
        image.value, image.width = png(figure), f"{figure.get_figwidth() * figure.dpi:.0f}"
        line.value = ""

    redraw()
    for name, control in controls.items():
        control.description = control.description or name
        control.observe(redraw, "value")
    widgets = list(controls.values())
    rows = [ipywidgets.HBox(widgets[i : i + per_row]) for i in range(0, len(widgets), per_row)]
    return Drawing([*rows, line, image])
