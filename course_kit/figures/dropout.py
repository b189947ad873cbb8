"""A picture of the elements that dropout keeps on each rank."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from course_kit.figures.style import RANKS


def draw_masks(of_ranks: Sequence[tuple[torch.Tensor, torch.Tensor]], title: str) -> Figure:
    """Draw the elements that each rank keeps of its head's probabilities and, beside them, of the output; dropped
    elements are white. Returns the figure.
    """
    n = len(of_ranks)
    widths = [masks[kind].shape[1] for kind in (0, 1) for masks in of_ranks]
    figure, axes = plt.subplots(1, 2 * n, figsize=(7.8, 1.3), width_ratios=widths)
    for rank, masks in enumerate(of_ranks):
        for ax, mask, word in zip((axes[rank], axes[n + rank]), masks, ("head", "output"), strict=True):
            ax.imshow(mask, cmap=ListedColormap(["white", RANKS[rank]]), vmin=0, vmax=1)
            ax.set(xticks=[], yticks=[])
            ax.set_title(f"{word} {rank}", fontsize=7)
            for side in ax.spines.values():
                side.set_visible(True)
    figure.suptitle(title, y=1.12, fontsize=10)
    return figure
