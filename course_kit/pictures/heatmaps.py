"""The best layout of each model at each size, as a heatmap from rows of runs: the figure of the playbook's chapter 9.

Rows are dictionaries with the columns of a sweep (`course_kit.sweep.runs`) or of the published runs: numbers as
numbers, blanks as nan. The best of a cell is the one with the most tokens/s of a device, since that is what was
measured; MFU is derived from it, and with which FLOPs differs by source (some count a tied embedding twice where there
is a pipeline). Rows of one name must be of one model, not of a variant with other sizes.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

AXES = ("nodes", "ranks")
DEGREES = ("dp", "pp", "cp", "tp", "ep")
SHOWN = {"zero_stage": "zero", "micro_batch": "mb"}  # column: word


def ranks_of(row: dict) -> int:
    """How many ranks a row's layout takes; published rows have no cp."""
    return row["dp"] * row["tp"] * row["pp"] * row.get("cp", 1)


def layout_words(row: dict) -> str:
    """A row's layout in two lines: the degrees above 1, and ZeRO's stage and the micro-batch."""
    degrees = [f"{name}{row[name]}" for name in DEGREES if row.get(name, 1) > 1] or ["dp1"]
    settings = [f"{word}{row[name]}" for name, word in SHOWN.items() if row[name]]
    return " ".join(degrees) + "\n" + " ".join(settings)


def known(value: object) -> bool:
    """Whether a cell of a row has a number."""
    return isinstance(value, (int, float)) and not math.isnan(value)


def cells_of(rows: Sequence[dict], across: str) -> dict[tuple[str, int], tuple[dict | None, int]]:
    """By model and column: the best row, None where all failed, and how many runs there were.

    Raises ValueError where rows of one model differ in the batch or the length, and so can't be compared.
    """
    groups, sizes = defaultdict(list), defaultdict(set)
    for row in rows:
        groups[row["model"], ranks_of(row) if across == "ranks" else row["nodes"]].append(row)
        sizes[row["model"]].add((row["global_batch_seqs"], row.get("seq"), row.get("options", "")))
    for model, found in sizes.items():
        if len(found) > 1:
            batches = ", ".join(f"{batch} x {seq} {options}".strip() for batch, seq, options in sorted(found, key=str))
            raise ValueError(f"{model} has rows of several batches, sequences x tokens: {batches}; choose one")
    best = {}
    for place, group in groups.items():
        ran = [row for row in group if row["ok"] and known(row["tokens_per_s_per_gpu"])]
        best[place] = max(ran, key=lambda row: row["tokens_per_s_per_gpu"], default=None), len(group)
    return best


def shades_of(cells: dict, models: Sequence[str], columns: Sequence[int], by_mfu: bool) -> list[list[float]]:
    """What the colour of each cell stands for: MFU in percent, or the share of the model's best tokens/s in percent."""
    top = {}
    for (model, _), (row, _) in cells.items():
        if row:
            top[model] = max(top.get(model, 0), row["tokens_per_s_per_gpu"])

    def value(model, column):
        row, _ = cells.get((model, column), (None, 0))
        if row is None:
            return math.nan
        return row["mfu_pct"] if by_mfu else 100 * row["tokens_per_s_per_gpu"] / top[model]

    return [[value(model, column) for column in columns] for model in models]


def cell_text(row: dict | None, count: int, by_mfu: bool) -> str:
    """What stands in a cell."""
    if row is None:
        return f"none of {count}\nran" if count > 1 else "did not\nrun"
    value = f"{row['mfu_pct']:.1f}%" if by_mfu else f"{row['tokens_per_s_per_gpu']:,.0f}"
    return f"{value}\n{layout_words(row)}"


def heatmap(rows: Sequence[dict], source: str, across: str = "nodes"):
    """A figure: a row a model, a column a number of nodes or ranks (`across`), in each cell the best layout and its
    MFU, or its tokens/s where the peak of the device is not known. Cells in which every run failed are hatched, cells
    without a run empty. source: where the rows are from, for the title. Models stand in the order of the rows.

    Raises ValueError where there is nothing to show, or what can't be compared.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    if across not in AXES:
        raise ValueError(f"across {across!r}: it is one of {', '.join(AXES)}")
    if not rows:
        raise ValueError("no rows, so no heatmap")
    cells = cells_of(rows, across)
    models, columns = list(dict.fromkeys(model for model, _ in cells)), sorted({column for _, column in cells})
    ran = [row for row, _ in cells.values() if row]
    by_mfu = bool(ran) and all(known(row["mfu_pct"]) for row in ran)
    figure = Figure(figsize=(max(5.5, 2.2 + 1.15 * len(columns)), 1.8 + 0.95 * len(models)), layout="constrained")
    axes = figure.add_subplot()
    values = shades_of(cells, models, columns, by_mfu)
    highest = max((value for line in values for value in line if not math.isnan(value)), default=1.0)
    image = axes.imshow(values, cmap="viridis", aspect="auto", vmin=0, vmax=highest)
    for (model, column), (row, count) in cells.items():
        x, y = columns.index(column), models.index(model)
        if row is None:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="//", edgecolor="0.75", linewidth=0))
        colour = "black" if row is None or values[y][x] > 0.6 * highest else "white"
        text = cell_text(row, count, by_mfu)
        axes.text(x, y, text, ha="center", va="center", fontsize=8, linespacing=1.3, color=colour)
    axes.set_xticks(range(len(columns)), [str(column) for column in columns])
    axes.set_yticks(range(len(models)), models)
    axes.set_xlabel(across)
    shown = "MFU" if by_mfu else "tokens/s of a rank"
    axes.set_title(f"{source}\nthe fastest layout of each cell, {len(rows):,} runs: its {shown}", fontsize=10)
    figure.colorbar(image, ax=axes, label="MFU, %" if by_mfu else "% of the row's best")
    return figure
