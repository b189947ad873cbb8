"""The style of the course's figures: one text size, and one color per quantity, in all notebooks."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED, PURPLE, BROWN = "#4C72B0", "#DD8452", "#55A868", "#C44E52", "#8172B3", "#937860"
GRAY, LIGHT = "#8C8C8C", "#DDDDDD"  # secondary elements; idle or waiting time

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
    "weights' backward": "#E9B872",  # W, the second half of a split backward
    "communication": PURPLE,
    "optimizer": GREEN,
    "wait": LIGHT,
}
RANKS = ["#17818A", "#E3B505", "#A23B72", "#7A9A01", "#3D348B", "#C97064", "#2F4858", "#9A8C98"]  # and their tokens
RANK_INK = ["white", "black", *["white"] * 6]  # of text on a rank's color
KINDS = ["#17818A", "#E3B505", "#A23B72", "#64B5CD", "#333333"]  # of other lines
LIMIT = "red"


def use_style() -> None:
    """Set the style of all later figures: 100 dpi, text of 9 points, no frame above and to the right."""
    plt.rcParams.update({"figure.dpi": 100, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9})


def limit_line(axes: Axes, gib: float, name: str, position: float = 0.01) -> None:
    """Draw the memory of a GPU, in GiB, as a dashed red line with its name at `position` of the width (0 to 1)."""
    axes.axhline(gib, color=LIMIT, linestyle="--", linewidth=1)
    text = f"{name}: {gib:.0f} GiB"
    axes.text(position, gib, text, color=LIMIT, fontsize=8, va="bottom", transform=axes.get_yaxis_transform())
