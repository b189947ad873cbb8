"""The best layout of each model at each size, as a heatmap from rows of runs: the figure of the playbook's chapter 9.

Rows are dictionaries with the columns of a sweep (`course_kit.sweep.runs`) or of the published runs: numbers as
numbers, blanks as nan. The best row of a cell has the most tokens/s per device, which is the measured quantity; MFU is
derived from it, and sources count FLOPs differently (some count a tied embedding twice with a pipeline). Rows of one
name must be of one model, not of a variant with other sizes.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_kit.figures.style import BLUE, LIGHT, WIDTH, ink_on, styled

LETTERS = 11  # of a line in a cell
SHADES = LinearSegmentedColormap.from_list("shades", ["white", BLUE])
AXES = ("nodes", "ranks")
DEGREES = ("dp", "pp", "cp", "tp", "ep")
SHOWN = {"zero_stage": "zero", "micro_batch": "mb"}  # column: word


def ranks_of(row: dict) -> int:
    """Return the number of ranks of a row's layout; published rows have no cp."""
    return row["dp"] * row["tp"] * row["pp"] * row.get("cp", 1)


def layout_label(row: dict) -> str:
    """Return a row's layout in lines: the degrees above 1, and ZeRO's stage and the micro-batch."""
    degrees = [f"{name}{row[name]}" for name in DEGREES if row.get(name, 1) > 1] or ["dp1"]
    settings = [f"{word}{row[name]}" for name, word in SHOWN.items() if row[name]]
    return "\n".join([*textwrap.wrap(" ".join(degrees), LETTERS), " ".join(settings)])


def known(value: object) -> bool:
    """Return True if a value of a row is a number."""
    return isinstance(value, (int, float)) and not math.isnan(value)


def cells_of(rows: Sequence[dict], across: str) -> dict[tuple[str, int], tuple[dict | None, int]]:
    """Return, by model and column, the best row (None if all runs failed) and the number of runs.

    Raises ValueError if rows of one model differ in the batch or the sequence length, so that they cannot be compared.
    """
    groups, sizes = defaultdict(list), defaultdict(set)
    for row in rows:
        groups[row["model"], ranks_of(row) if across == "ranks" else row["nodes"]].append(row)
        sizes[row["model"]].add((row["global_batch_seqs"], row.get("seq"), row.get("options", "")))
    for model, batches in sizes.items():
        if len(batches) > 1:
            names = ", ".join(f"{batch} x {seq} {options}".strip() for batch, seq, options in sorted(batches, key=str))
            raise ValueError(f"{model} has rows of several batches, sequences x tokens: {names}; choose one")
    best = {}
    for cell, group in groups.items():
        succeeded = [row for row in group if row["ok"] and known(row["tokens_per_s_per_gpu"])]
        best[cell] = max(succeeded, key=lambda row: row["tokens_per_s_per_gpu"], default=None), len(group)
    return best


def shades_of(cells: dict, models: Sequence[str], columns: Sequence[int], by_mfu: bool) -> list[list[float]]:
    """Return the quantity behind the color of each cell: MFU in percent, or tokens/s in percent of the model's best."""
    top: dict[str, float] = {}
    for (model, _), (row, _) in cells.items():
        if row:
            top[model] = max(top.get(model, 0), row["tokens_per_s_per_gpu"])

    def value(model: str, column: int) -> float:
        row, _ = cells.get((model, column), (None, 0))
        if row is None:
            return math.nan
        return row["mfu_pct"] if by_mfu else 100 * row["tokens_per_s_per_gpu"] / top[model]

    return [[value(model, column) for column in columns] for model in models]


def cell_text(row: dict | None, count: int, by_mfu: bool, predicted: bool) -> str:
    """Return the text of a cell."""
    if row is None:
        return "none\nfits" if predicted else f"none of {count}\nran" if count > 1 else "did not\nrun"
    value = f"{row['mfu_pct']:.1f}%" if by_mfu else f"{row['tokens_per_s_per_gpu']:,.0f}"
    return f"{value}\n{layout_label(row)}"


@styled
def heatmap(rows: Sequence[dict], source: str, across: str = "nodes", predicted: bool = False) -> Figure:
    """Draw the best layout of each model (row) and number of nodes or ranks (column, `across`), with its MFU, or its
    tokens/s if the peak of the device is unknown.

    Cells in which every run failed are hatched, cells without a run are empty. source: the origin of the rows, for the
    title; predicted: the rows are predictions, one per cell. Models keep the order of the rows.

    Raises ValueError if there are no rows, or rows that cannot be compared.
    """
    if across not in AXES:
        raise ValueError(f"across {across!r}: it is one of {', '.join(AXES)}")
    if not rows:
        raise ValueError("a heatmap needs rows")
    cells = cells_of(rows, across)
    models, columns = list(dict.fromkeys(model for model, _ in cells)), sorted({column for _, column in cells})
    succeeded = [row for row, _ in cells.values() if row]
    by_mfu = bool(succeeded) and all(known(row["mfu_pct"]) for row in succeeded)
    width = min(WIDTH, max(5.5, 2.2 + 1.3 * len(columns)))
    figure, axes = plt.subplots(figsize=(width, 1.5 + 0.85 * len(models)))
    values = shades_of(cells, models, columns, by_mfu)
    highest = max((value for line in values for value in line if not math.isnan(value)), default=1.0)
    image = axes.imshow(values, cmap=SHADES, aspect="auto", vmin=0, vmax=highest)
    for (model, column), (row, count) in cells.items():
        x, y = columns.index(column), models.index(model)
        if row is None:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="//", edgecolor=LIGHT, linewidth=0))
        color = "black" if row is None else ink_on(to_hex(SHADES(values[y][x] / highest)))
        axes.text(x, y, cell_text(row, count, by_mfu, predicted), ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(columns)), [f"{column:,}" for column in columns])
    axes.set_yticks(range(len(models)), models)
    axes.set_xlabel(across)
    quantity = ("predicted " if predicted else "") + ("MFU" if by_mfu else "tokens/s per rank")
    runs = "" if predicted else "1 run: " if len(rows) == 1 else f"{len(rows):,} runs: "
    axes.set_title(f"{source}\n{runs}the fastest layout of each cell, and its {quantity}")
    figure.colorbar(image, ax=axes, label="MFU, %" if by_mfu else "% of the row's best")
    return figure
