"""A page about a run, from its log: the curves to look at first, the results, and the settings.

    python -m course_lib.train.summary log.jsonl my-run        writes my-run/summary.html and my-run/summary.png

The page is one file, with the picture in it. It needs matplotlib, which training does not.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from course_lib.single_gpu.errors import one_line_message
from course_lib.train.log_curves import Curve, curve, layout_changes, read_log, results, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GRAY, LIGHT = "#2E75B6", "#C26A00", "#666666", "#DDDDDD"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GRAY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


class Panel(NamedTuple):
    """A plot of one key of the records, times `factor`. Its y axis begins at 0 unless it is logarithmic."""

    key: str
    title: str
    factor: float = 1.0
    logarithmic: bool = False


PANELS = (
    Panel("norm", "gradient norm, before clipping", logarithmic=True),
    Panel("lr", "learning rate"),
    Panel("tokens_per_s", "tokens/s per device"),
    Panel("mfu", "MFU, %", 100),
    Panel("peak_memory", "peak memory of the fullest rank, GiB", 2**-30),
    Panel("batch", "sequences per step"),
)


def drawn_panels(records: list[dict]) -> list[tuple[Panel, Curve]]:
    """Return the panels that have something to show, and their curves in the panels' units."""
    drawn = []
    for panel in PANELS:
        steps, values = curve(records, panel.key)
        values = np.where(np.isfinite(values), values * panel.factor, np.nan)
        if panel.logarithmic:
            values = np.where(values > 0, values, np.nan)
        constant = panel.key == "batch" and len(set(values)) < 2
        if np.isfinite(values).any() and not constant:
            drawn.append((panel, Curve(steps, values)))
    return drawn


def draw_line(axes: Axes, line: Curve, width: int = 0) -> None:
    """Draw values: few of them as points, noisy ones in a light color behind their mean over 2 width + 1 steps."""
    if width:
        axes.plot(*line, color=BLUE, alpha=0.3, linewidth=0.8)
    marker = "o" if len(line.steps) < 20 else ""
    axes.plot(line.steps, smoothed(line.values, width), color=BLUE, linewidth=1.6, marker=marker, markersize=3.5)


def draw_loss(axes: Axes, records: list[dict], width: int) -> None:
    """Draw the training loss, and the loss on held-out text if there is one."""
    loss, held_out = curve(records, "loss"), curve(records, "eval_loss")
    axes.set_title("loss, nats per token")
    if not np.isfinite(np.concatenate([loss.values, held_out.values])).any():
        axes.text(0.5, 0.5, "no step had a finite loss", transform=axes.transAxes, ha="center", color=GRAY)
        axes.set_yticks([])
        return
    draw_line(axes, loss, width)
    axes.lines[-1].set_label(f"training, mean of {2 * width + 1} steps" if width else "training")
    if len(held_out.steps):
        axes.plot(*held_out, color=ORANGE, linewidth=1.6, marker="o", markersize=3.5, label="held-out text")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)


def draw_panel(axes: Axes, panel: Panel, line: Curve, width: int) -> None:
    """Draw a panel other than the loss."""
    axes.set_title(panel.title)
    draw_line(axes, line, width if panel.logarithmic else 0)
    least, most = float(np.nanmin(line.values)), float(np.nanmax(line.values))
    if not panel.logarithmic:
        axes.set_ylim(0, 1.1 * most or 1)
        return
    from matplotlib.ticker import LogLocator, NullFormatter

    # The limits are labeled numbers, so that a narrow range has labels too.
    below, above = (10.0 ** math.floor(math.log10(value)) for value in (least, most))
    bottom = max(factor * below for factor in (0.5, 1, 2, 5) if factor * below < least)
    top = min(factor * above for factor in (1, 2, 5, 10, 20) if factor * above > most)
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top / bottom < 50 else (1,)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def mark_layouts(axes: Axes, changes: list[tuple[int, str]], named: bool) -> None:
    """Mark the steps at which the layout changes. named: with the layout after the change, where there is room, and
    with that before the first one.
    """
    begin, end = axes.get_xlim()
    transform: Any = axes.get_xaxis_transform()  # steps, and 0 to 1
    background = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}

    def name(layout: str, step: int, points: int) -> None:
        axes.annotate(
            layout, (step, 0.97), (points, 0), transform, "offset points",
            rotation=90, fontsize=8, color=GRAY, va="top", ha="left" if points > 0 else "right", bbox=background,
            annotation_clip=False,
        )  # fmt: skip

    last = begin
    for (_, before), (step, layout) in itertools.pairwise(changes):
        axes.axvline(step, color=GRAY, linewidth=0.8, linestyle=(0, (4, 3)))
        if named and step - last > 0.03 * (end - begin):
            if last == begin and step - last > 0.06 * (end - begin):
                name(before, step, -3)
            name(layout, step, 3)
            last = step


def draw(records: list[dict], title: str) -> Figure:
    """Return the figure of a run: the loss above, a grid of the other panels below."""
    import matplotlib

    with matplotlib.rc_context(dict[Any, Any](STYLE)):
        figure = draw_panels(records, title)
        figure.draw_without_rendering()  # makes the ticks, in this style
    return figure


def draw_panels(records: list[dict], title: str) -> Figure:
    """Return the figure in matplotlib's current style."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    panels, changes = drawn_panels(records), layout_changes(records)
    first, last = records[0]["step"], records[-1]["step"]
    width, rows, margin = len(records) // 100, -(-len(panels) // 2), max(0.5, 0.01 * (last - first))
    figure = Figure(figsize=(9, 3.4 + 1.9 * rows), layout="constrained")
    grid = figure.add_gridspec(rows + 1, 2, height_ratios=[3.0] + [1.7] * rows)
    top = figure.add_subplot(grid[0, :])
    draw_loss(top, records, width)
    for number, (panel, line) in enumerate(panels):
        alone = number == len(panels) - 1 and number % 2 == 0
        axes = figure.add_subplot(grid[1 + number // 2, slice(None) if alone else number % 2])
        draw_panel(axes, panel, line, width)
        if number >= 2 * (rows - 1):
            axes.set_xlabel("step")
    for axes in figure.axes:
        axes.set_xlim(first - margin, last + margin)
        axes.xaxis.set_major_locator(MaxNLocator(8 if axes is top else 5, integer=True))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        mark_layouts(axes, changes, axes is top)
    figure.suptitle(title or "Training run", x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 900px; margin: 2rem auto;
       padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; overflow-wrap: anywhere; }}
img {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; vertical-align: top; padding: 0.3rem 1.5rem 0.3rem 0; border-bottom: 1px solid #ddd; }}
th {{ font-weight: normal; color: #555; }}
td {{ overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }}
pre {{ overflow-x: auto; background: #f5f5f5; padding: 1rem; font-size: 0.85rem; }}
summary {{ cursor: pointer; margin-top: 1.5rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<table>
{rows}
</table>
<p><img alt="{alt}" src="data:image/png;base64,{png}"></p>
{settings}
</body>
</html>
"""


def page(records: list[dict], png: bytes, title: str, config_toml: str | None) -> str:
    """Return the page in HTML."""
    shown = results(records)
    rows = [f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in shown.items()]
    titles = ["loss", *(panel.title for panel, _ in drawn_panels(records))]
    settings = f"<details><summary>Settings</summary><pre>{html.escape(config_toml or '')}</pre></details>"
    return PAGE.format(
        title=html.escape(title or "Training run"),
        rows="\n".join(rows),
        alt=html.escape(f"Curves by step: {'; '.join(titles)}. The table above has the results."),
        png=base64.b64encode(png).decode(),
        settings=settings if config_toml else "",
    )


def write_summary(log: Path, folder: Path, title: str, config_toml: str | None = None) -> list[Path]:
    """Draw the page of a run from its log; return the files written, summary.html and summary.png. Makes the folder.

    title: of the page; config_toml: the settings to show. Raises ValueError, in one line, if the log has no steps, the
    folder cannot be written to, or matplotlib is missing.
    """
    records, drawn = read_log(log), io.BytesIO()
    try:
        figure = draw(records, title)
    except ImportError:
        raise ValueError("the page is drawn by matplotlib: pip install matplotlib") from None
    figure.savefig(drawn, format="png", dpi=200)
    png = drawn.getvalue()
    files = {folder / "summary.html": page(records, png, title, config_toml).encode(), folder / "summary.png": png}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, contents in files.items():
            file.write_bytes(contents)
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}") from None
    return [*files]


def main(argv: list[str] | None = None) -> None:
    """Write the page of a log. An error ends the program with one line."""
    parser = argparse.ArgumentParser(prog="summary", description="Draw the page of a run from its log.")
    parser.add_argument("log", type=Path, help="the file of --out")
    parser.add_argument("folder", type=Path, nargs="?", help="for the page; default: the log's name, with -summary")
    args = parser.parse_args(argv)
    try:
        folder = args.folder or args.log.with_name(f"{args.log.stem}-summary")
        for file in write_summary(args.log, folder, args.log.stem):
            print(f"wrote {file}")
    except ValueError as error:
        raise SystemExit(f"summary: {one_line_message(error)}") from None


if __name__ == "__main__":
    main()
