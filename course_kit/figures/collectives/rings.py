"""The ring all-reduce, step by step: which chunk moves, and what each rank holds."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from course_kit.figures.style import GRAY, KINDS, WIDTH, ink_on, styled
from course_kit.labs.collectives import ring_states, sent_chunk

N = 5  # ranks


def style_of(holds: set[int]) -> tuple[str, str]:
    """Return the ranks whose values are in a chunk as a word, and its shade: the darker, the more."""
    if len(holds) == N:
        return "all", KINDS[1]
    paler = [1 - (0.05 + 0.2 * len(holds)) * (1 - part) for part in to_rgb(KINDS[0])]
    return "".join(map(str, sorted(holds))), to_hex(paler)


def step_name(step: int) -> str:
    return "start" if step == 0 else f"reduce-scatter, {step}" if step < N else f"all-gather, {step - N + 1}"


def draw_circle(ax: Axes, step: int) -> None:
    """Draw the ranks in a circle; on each arrow the chunk that moves in this step."""
    ax.set(xlim=(-1.4, 1.4), ylim=(-1.25, 1.25), aspect="equal", title=step_name(step))
    ax.axis("off")
    before = ring_states(N)[step - 1]
    spots = [(math.sin(2 * math.pi * r / N), math.cos(2 * math.pi * r / N)) for r in range(N)]
    for rank, (x, y) in enumerate(spots):
        ax.text(x, y, f"{rank}", ha="center", va="center", bbox={"boxstyle": "circle", "fc": "white", "ec": "black"})
        arrow = {"arrowstyle": "->", "color": GRAY, "shrinkA": 11, "shrinkB": 11, "connectionstyle": "arc3,rad=-0.2"}
        ax.annotate("", spots[(rank + 1) % N], (x, y), arrowprops=arrow)
        chunk, middle = sent_chunk(N, rank, step), 2 * math.pi * (rank + 0.5) / N
        word, shade = style_of(before[rank][chunk])
        position = 1.0 * math.sin(middle), 1.0 * math.cos(middle)
        rectangle = {"fc": shade, "ec": "none", "pad": 1.5}
        name = f"{'abcde'[chunk]} {word}"
        ax.text(*position, name, ha="center", va="center", fontsize=8, color=ink_on(shade), bbox=rectangle, zorder=5)


def draw_table(ax: Axes, step: int) -> None:
    """Draw a row per rank and a column per chunk after a step; each cell lists whose values are in it."""
    ax.set(xlim=(-0.4, N), ylim=(-N + 0.9, 1.6), title=step_name(step))
    ax.axis("off")
    for rank, row in enumerate(ring_states(N)[step]):
        ax.text(-0.15, 0.4 - rank, f"{rank}", ha="right", va="center", fontsize=8, color=GRAY)
        for chunk, holds in enumerate(row):
            word, shade = style_of(holds)
            ax.add_patch(plt.Rectangle((chunk, -rank), 0.92, 0.85, color=shade))
            ax.text(chunk + 0.46, 0.42 - rank, word, ha="center", va="center", fontsize=8, color=ink_on(shade))
    for chunk in range(N):
        ax.text(chunk + 0.46, 1.05, "abcde"[chunk], ha="center", fontsize=8, color=GRAY)


@styled
def ring_circles() -> Figure:
    """Return which chunk goes from each of five ranks to the next, in each of the eight steps of an all-reduce."""
    figure, axes = plt.subplots(2, 4, figsize=(WIDTH, 4.4))
    for step, ax in enumerate(axes.flat, start=1):
        draw_circle(ax, step)
    return figure


@styled
def ring_tables() -> Figure:
    """Return what five ranks hold at the start and after each step of the ring's two halves."""
    figure, axes = plt.subplots(3, 3, figsize=(WIDTH, 6))
    for step, ax in enumerate(axes.flat):
        draw_table(ax, step)
    return figure


@styled
def ring_step(step: int) -> Figure:
    """Return one step of a ring all-reduce: what moves, and what the ranks hold after it."""
    figure, (circle, table) = plt.subplots(1, 2, figsize=(0.8 * WIDTH, 3))
    draw_circle(circle, step)
    draw_table(table, step)
    table.set_title("after it")
    return figure
