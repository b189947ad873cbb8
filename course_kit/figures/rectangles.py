"""Rectangles with a text in them, arrows, lanes, and bars of stacked parts, for several notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_kit.figures.style import MEMORY, ink_on

GAP = 0.05  # between neighbors in a lane, in units of the axes


def drawing(axes: Axes, xlim: tuple[float, float], ylim: tuple[float, float]) -> None:
    """Make these axes a sheet without ticks and frame."""
    axes.set(xlim=xlim, ylim=ylim)
    axes.axis("off")


def rectangle(axes: Axes, x: float, y: float, size: tuple[float, float], text: str, color: str, **style) -> None:
    """Draw a filled rectangle, (width, height), with a text in its middle. style: of the text."""
    axes.add_patch(Rectangle((x, y), *size, color=color, linewidth=0))
    if text:
        middle = {"ha": "center", "va": "center", "color": ink_on(color)}
        axes.text(x + size[0] / 2, y + size[1] / 2, text, **(middle | style))


def frame(axes: Axes, x: float, y: float, size: tuple[float, float], text: str, edge: str) -> None:
    """Draw a white rectangle, (width, height), with a colored edge and a text in its middle."""
    axes.add_patch(Rectangle((x, y), *size, facecolor="white", edgecolor=edge, linewidth=1.5))
    axes.text(x + size[0] / 2, y + size[1] / 2, text, ha="center", va="center")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = "black") -> None:
    """Draw an arrow from start to end."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": color})


def lane(axes: Axes, y: float, height: float, bars: Iterable[tuple[str, str, float, float]]) -> None:
    """Draw bars in a row whose foot is at y. bars: (color, text, start, length)."""
    for color, text, start, length in bars:
        rectangle(axes, start, y, (length - GAP, height), text, color)


def stacked(
    axes: Axes, at: Sequence[float], parts: Mapping[str, Sequence[float] | float], across: bool = False
) -> np.ndarray:
    """Draw bars of stacked parts (by name in MEMORY) at these places, and return their total lengths.

    across: bars to the right, the first at the top.
    """
    total = np.zeros(len(at))
    for part, size in parts.items():
        length = np.broadcast_to(np.asarray(size, float), total.shape)
        style: dict[str, Any] = {"color": MEMORY[part], "label": part, "edgecolor": "white", "linewidth": 0.5}
        if across:
            axes.barh(at, length, left=total, **style)
        else:
            axes.bar(at, length, bottom=total, **style)
        total = total + length
    if across and not axes.yaxis_inverted():
        axes.invert_yaxis()
    return total


def legend_below(figure: Figure, axes: Axes, columns: int = 5) -> None:
    """Write what the colors of these axes mean below the figure, each once."""
    handles, names = axes.get_legend_handles_labels()
    once = dict(zip(reversed(names), reversed(handles), strict=True))
    order = list(dict.fromkeys(names))
    figure.legend([once[name] for name in order], order, loc="outside lower center", ncols=columns)
