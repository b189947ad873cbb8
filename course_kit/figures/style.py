"""The style of the course's figures: one size of text, and one color per quantity, in all notebooks.

    @styled
    def kept(layers: int) -> Figure:
        figure, axes = plt.subplots(figsize=(WIDTH, 2.5))

The colors of one table are told apart by readers who are color-blind (tests/figures/test_style.py), and text on them is
written in `ink_on(color)`; a colored line's own label is written in `readable(color)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PURPLE, BROWN = "#2E75B6", "#E8A04C", "#A6D9A0", "#A3303B", "#5F3A78", "#8A8178"
GRAY, LIGHT = "#757575", "#DDDDDD"  # secondary elements and their text; idle or waiting time

MEMORY = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer states": GREEN,
    "activations": RED,
    "temporary": BROWN,
}
PHASES = {
    "forward": BLUE,
    "backward": ORANGE,
    "weight gradient": "#F5E08A",  # W, the second half of a split backward
    "communication": PURPLE,
    "optimizer": GREEN,
    "wait": LIGHT,
}
RANKS = ["#0F8A99", "#F2C230", "#A8306B", "#8FB04A", "#2F4E94", "#BA746A", "#27313A", "#D9C3DC"]  # and their tokens
KINDS = ["#0F8A99", "#F2C230", "#A8306B", "#2F4E94", "#333333"]  # of other bars and lines
LIMIT = "#C00000"  # what may not be exceeded, and its text
WIDTH = 8.2  # inches: the width of a column
STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=KINDS),
    "hatch.linewidth": 0.6,
}
Arguments = ParamSpec("Arguments")


def styled(draw: Callable[Arguments, Figure]) -> Callable[Arguments, Figure]:
    """Return `draw` in the course's style: its figure is closed for pyplot, so that a notebook shows it once."""

    @functools.wraps(draw)
    def in_style(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Figure:
        with plt.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            figure.canvas.draw()  # the layout is computed in this style, too
        plt.close(figure)
        return figure

    return in_style


def luminance(color: str) -> float:
    """Return the relative luminance of a color, 0 to 1 (WCAG 2.1)."""
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colors, 1 to 21 (WCAG 2.1): text needs 4.5."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def ink_on(color: str) -> str:
    """Return black or white: the one that can be read on this color."""
    return "white" if contrast("white", color) >= 4.5 else "black"


def readable(color: str) -> str:
    """Return this color, darkened until text in it can be read on white."""
    while contrast(color, "white") < 4.5:
        red, green, blue = to_rgb(color)
        color = to_hex((0.95 * red, 0.95 * green, 0.95 * blue))
    return color


def limit_line(axes: Axes, gib: float, name: str, position: float = 0.01) -> None:
    """Draw the memory of a GPU, in GiB, as a dashed red line with its name at `position` of the width (0 to 1)."""
    axes.axhline(gib, color=LIMIT, linestyle="--", linewidth=1)
    text = f"{name}: {gib:.0f} GiB"
    axes.text(position, gib, text, color=LIMIT, va="bottom", transform=axes.get_yaxis_transform())
