"""The palette: colors that meet are told apart, by everybody, and text on them can be read."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from course_kit.figures.style import GRAY, KINDS, LIMIT, MEMORY, PHASES, RANKS, contrast, ink_on, readable, styled
from figure_faults import faults

# G. M. Machado, M. M. Oliveira, L. A. F. Fernandes, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", IEEE TVCG 15 (2009), severity 1.0; applied to linear RGB.
SEEN_WITH = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
WHITE = [0.95047, 1, 1.08883]
TABLES = {"memory": list(MEMORY.values()), "phases": list(PHASES.values()), "ranks": RANKS, "kinds": KINDS}
LEAST_DISTANCE = 16  # in CIELAB; 2.3 is a just noticeable difference, the palette of before had pairs at 3 and 9


def lab(color: str, seen_with: str) -> np.ndarray:
    """A color in CIELAB, as it is seen."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.array(TO_XYZ) @ np.clip(np.array(SEEN_WITH[seen_with]) @ linear, 0, 1) / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen_with", SEEN_WITH)
@pytest.mark.parametrize("table", TABLES)
def test_colors_of_a_table_are_told_apart(table, seen_with):
    for one, other in itertools.combinations(TABLES[table], 2):
        distance = np.linalg.norm(lab(one, seen_with) - lab(other, seen_with))
        assert distance > LEAST_DISTANCE, (one, other)


def test_a_pair_that_color_blind_readers_confuse_is_seen():
    # Red and green of the palette of before: 10 in deuteranopia.
    assert np.linalg.norm(lab("#C44E52", "deuteranopia") - lab("#55A868", "deuteranopia")) < LEAST_DISTANCE


def test_text_can_be_read():
    for color in {color for table in TABLES.values() for color in table}:
        assert contrast(ink_on(color), color) >= 4.5 and contrast(readable(color), "white") >= 4.5
    assert contrast(GRAY, "white") >= 4.5 and contrast(LIMIT, "white") >= 4.5


def test_a_figure_is_closed_and_leaves_no_style_behind():
    before = plt.rcParams["font.size"], plt.get_fignums()

    @styled
    def line(color: str):
        figure, axes = plt.subplots()
        axes.plot([1, 2], color=color)
        return figure

    assert line("black").dpi == 100 and (plt.rcParams["font.size"], plt.get_fignums()) == before


def test_faults_are_found():
    figure, axes = plt.subplots(figsize=(5, 3))
    axes.axis("off")
    axes.add_patch(plt.Rectangle((0, 0), 0.4, 1, color=RANKS[1]))
    axes.text(0.1, 0.5, "pale", color="white")
    axes.text(0.1, 0.2, "dark", color="black")
    axes.text(0.6, 0.8, "small", fontsize=6)
    axes.text(0.6, 0.5, "one text"), axes.text(0.63, 0.52, "another text")
    found = faults(figure)
    plt.close(figure)
    assert len(found) == 3 and "'pale': contrast" in " ".join(found) and "'small': 6.0 points" in found
    assert "'one text' overlaps 'another text'" in found
