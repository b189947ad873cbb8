"""Pictures of experts: a labeled rectangle, and the choices of each expert over the steps."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from course_kit.figures.style import BLUE, GREEN, ORANGE, PURPLE

EXPERTS = [BLUE, ORANGE, GREEN, PURPLE]  # a color for each of four experts


def draw_box(ax: Axes, x: float, y: float, width: float, height: float, word: str, color, text: str = "white") -> None:
    """Draw a rectangle from its lower left corner, labeled with a word in the color `text`."""
    ax.add_patch(plt.Rectangle((x, y), width, height, color=color))
    ax.text(x + width / 2, y + height / 2, word, ha="center", va="center", color=text, fontsize=8)


def draw_loads(ax: Axes, counts: np.ndarray, title: str, top: float | None = None) -> None:
    """Draw the choices of each expert, stacked, over the steps. counts: [steps, E]; top: the end of the axis."""
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.95, counts.shape[1]))
    ax.stackplot(range(1, len(counts) + 1), counts.T, colors=colors, antialiased=False)
    ax.set(xlabel="step", ylim=(0, top or counts[0].sum()), xlim=(1, len(counts)), title=title)
