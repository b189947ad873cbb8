"""Pictures of floating-point formats, and a widget: type a number, and see its bits in each of them.

    format_explorer()       the widget
    bits_figure(value)      its picture: sign, exponent, mantissa of a number in each format, what is stored, the error
    range_figure()          from the smallest to the largest number of each format, on a log axis
    rounding_figure()       10,000 points of [1, 2] rounded to each format

In the bits of one number, FP32, TF32 and BF16 have the same exponent field, and mantissas of different lengths; FP16
and E5M2 have another exponent field, and a smaller range. An exponent field of e bits buys the length of a bar in
`range_figure`, 2^e binades minus the top codes'; a mantissa of m bits buys the number of steps in
`rounding_figure`, 2^m per binade. An 8-bit format has 7 bits to divide between the two (Micikevicius et al. 2022, §3).
"""

import html
import math
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

import torch

from course_kit.figures.planner import png
from course_lib.mixed_precision.formats import E2M1, FORMATS, FloatFormat, decode, encode, round_to

SIGN_COLOR, EXPONENT_COLOR, MANTISSA_COLOR = "#C44E52", "#DD8452", "#4C72B0"
NORMAL_COLOR, SUBNORMAL_COLOR, POINT_COLOR = "#4C72B0", "#DD8452", "#55A868"
QUIET_COLOR = "#DDDDDD"


class StoredNumber(NamedTuple):
    """A number as a format stores it."""

    fields: tuple[str, str, str]  # digits 0 and 1 of the sign, the exponent, the mantissa
    value: float
    error: float  # |value - number|; NaN if the difference is undefined
    relative_error: float  # error / |number|; NaN if the number is 0, infinite or NaN
    remark: str


def remark_on(number: float, value: float, fmt: FloatFormat) -> str:
    """Return a short remark on a number that is stored as `value`."""
    if math.isnan(number):
        return "NaN" if math.isnan(value) else "no NaN: the largest"
    if math.isinf(number) and value != number:
        return "no infinity: " + ("NaN" if math.isnan(value) else "the largest")
    if not math.isfinite(value) and value != number:
        return "overflow"
    if math.isfinite(number) and abs(number) > fmt.largest:
        return "past the largest" if fmt is E2M1 else "rounded to the largest"
    subnormal = 0 < abs(value) < fmt.smallest_normal
    if value == number:
        return "exact, subnormal" if subnormal else "exact"
    if value == 0:
        return "lost: too small"
    return "rounded, subnormal" if subnormal else "rounded"


def stored_number(number: float, fmt: FloatFormat) -> StoredNumber:
    """Return a float64 as the nearest number of the format, without saturation."""
    code = encode(torch.tensor(number, dtype=torch.float64), fmt)
    value = decode(code, fmt).item()
    digits = f"{code.item():0{fmt.bits}b}"
    fields = digits[0], digits[1 : 1 + fmt.exponent_bits], digits[1 + fmt.exponent_bits :]
    error = 0.0 if value == number else abs(value - number)
    if math.isinf(number) and value != number:
        error = math.nan
    relative = error / abs(number) if number and math.isfinite(number) else math.nan
    return StoredNumber(fields, value, error, relative, remark_on(number, value, fmt))


def number_in_text(text: str) -> tuple[float, str]:
    """Return the float64 nearest to a typed number, and a remark if float64 cannot hold it: 1e400 is inf. Raises
    ValueError for text that is not a number.
    """
    shown = text.strip() if len(text.strip()) <= 40 else text.strip()[:40] + "…"
    try:
        number, exact = float(text), Decimal(text.strip())
    except (ValueError, InvalidOperation):
        raise ValueError(f"“{shown}” is not a number: write it as 0.1, -3e5, inf or nan") from None
    if exact.is_finite() and math.isinf(number):
        return number, f"{shown} is too large even for 64 bits: taken as {number}"
    if exact.is_finite() and exact and number == 0:
        return number, f"{shown} is too small even for 64 bits: taken as {number}"
    return number, ""


def number_as_text(number: float, digits: int = 9) -> str:
    """Return a number as text, by default with 9 digits, which distinguish all float32 numbers."""
    return "–" if math.isnan(number) else f"{number:.{digits}g}".replace("-", "−")


def draw_bits(axes, row: float, fields: tuple[str, str, str]) -> None:
    """Draw one square per bit, from the left: sign, exponent, mantissa in their colors; ones are dark, zeros light."""
    from matplotlib.patches import Rectangle

    x = 0
    for digits, color in zip(fields, (SIGN_COLOR, EXPONENT_COLOR, MANTISSA_COLOR), strict=True):
        for digit in digits:
            alpha = 1.0 if digit == "1" else 0.3
            axes.add_patch(Rectangle((x, row + 0.12), 1, 0.76, facecolor=color, edgecolor="white", alpha=alpha))
            style = {"ha": "center", "va": "center", "fontsize": 8.5, "color": "white" if digit == "1" else "black"}
            axes.text(x + 0.5, row + 0.5, digit, **style)
            x += 1


def bits_figure(value: float):
    """Return a matplotlib Figure: the bits of a float64 in each format, the number they stand for, and the error.
    Raises ValueError for text that is not a number.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    number = float(value)
    figure = Figure(figsize=(11.5, 0.36 * len(FORMATS) + 1.1), dpi=72, layout="constrained")
    axes = figure.add_subplot()
    columns = {
        "stored": 40.5,
        "error": 45.5,
        "relative error": 52,
        "": 53,
    }  # where each column ends; the last one begins there
    for name, x in columns.items():
        axes.text(x, -0.1, name, ha="right", va="bottom", fontsize=9.5, weight="bold")
    for row, fmt in enumerate(FORMATS.values()):
        stored = stored_number(number, fmt)
        axes.text(-0.6, row + 0.5, fmt.name, ha="right", va="center", fontsize=10, weight="bold")
        draw_bits(axes, row, stored.fields)
        shown = "NaN" if math.isnan(stored.value) else number_as_text(stored.value)
        cells = shown, number_as_text(stored.error, 3), number_as_text(stored.relative_error, 3), stored.remark
        for text, x, side in zip(cells, columns.values(), ("right", "right", "right", "left"), strict=True):
            axes.text(x, row + 0.5, text, ha=side, va="center", fontsize=9.5)
    marks = {"sign": SIGN_COLOR, "exponent": EXPONENT_COLOR, "mantissa": MANTISSA_COLOR}
    handles = [Patch(facecolor=color, label=name) for name, color in marks.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9.5)
    title = "NaN" if math.isnan(number) else repr(number).replace("-", "−")
    axes.set_title(f"{title} in each format", fontsize=11, loc="left")
    axes.set(xlim=(-3.2, 62), ylim=(len(FORMATS), -0.8))
    axes.axis("off")
    return figure


def range_figure():
    """Return a matplotlib Figure: the range of each format on a log axis, subnormal and normal, with its limits as
    numbers.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 3.4), dpi=72, layout="constrained")
    axes, table = figure.subplots(1, 2, width_ratios=(6, 5), sharey=True)
    headings = ("smallest\nsubnormal", "smallest\nnormal", "largest", "epsilon")
    for column, heading in enumerate(headings):
        table.text(column + 1, -0.75, heading, ha="right", va="bottom", fontsize=9.5, weight="bold")
    for row, fmt in enumerate(FORMATS.values()):
        numbers = fmt.smallest_subnormal, fmt.smallest_normal, fmt.largest, fmt.epsilon
        for column, number in enumerate(numbers):
            text = number_as_text(number, 5 if number > 1 else 3)
            table.text(column + 1, row, text, ha="right", va="center", fontsize=9.5)
        parts = ((SUBNORMAL_COLOR, "subnormal", *numbers[:2]), (NORMAL_COLOR, "normal", *numbers[1:3]))
        for color, name, low, high in parts:
            axes.barh(row, high - low, left=low, height=0.6, color=color, label=None if row else name)
    axes.set(xscale="log", xlim=(1e-47, 1e41), xlabel="magnitude", ylim=(len(FORMATS) - 0.5, -0.6))
    axes.set_xticks([10.0**power for power in range(-40, 41, 10)])
    axes.minorticks_off()
    axes.set_yticks(range(len(FORMATS)), [f"{fmt.name}, {fmt.bits} bits" for fmt in FORMATS.values()])
    axes.grid(axis="x", color=QUIET_COLOR)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=9.5)
    table.set(xlim=(0.2, len(headings) + 0.1))
    table.axis("off")
    return figure


def rounding_figure(points: int = 10_000):
    """Return a matplotlib Figure: evenly spaced points of [1, 2], rounded to each format: stairs with 2^m steps, and
    the largest errors. Raises ValueError for fewer than 100 points, which would show no stairs.
    """
    from matplotlib.figure import Figure

    if points < 100:
        raise ValueError(f"points={points}: the stairs of [1, 2] need 100 or more")
    x = torch.linspace(1, 2, points, dtype=torch.float64)
    figure = Figure(figsize=(11.5, 5.4), dpi=72, layout="constrained")
    panels = figure.subplots(2, 4).flatten()
    largest_errors: dict[str, float] = {}
    for axes, fmt in zip(panels, FORMATS.values(), strict=False):
        rounded = round_to(x, fmt)
        largest_errors[fmt.name] = (rounded - x).abs().max().item()
        axes.plot(x, x, color=QUIET_COLOR, linewidth=1)
        axes.plot(x, rounded, ".", markersize=1.5, color=POINT_COLOR)
        axes.set_title(f"{fmt.name}: {fmt.between_one_and_two:,} between 1 and 2", fontsize=10)
        axes.set(xlim=(0.97, 2.03), ylim=(0.97, 2.03), xticks=(1, 1.5, 2), yticks=(1, 1.5, 2), aspect="equal")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[4:7]:
        axes.set_xlabel("number")
    for axes in panels[[0, 4]]:
        axes.set_ylabel("rounded")
    errors = panels[-1]
    bars = errors.barh(list(largest_errors), list(largest_errors.values()), color=POINT_COLOR, height=0.6)
    errors.bar_label(bars, [number_as_text(error, 3) for error in largest_errors.values()], padding=3, fontsize=9)
    errors.set(xscale="log", xlabel="largest error", xlim=(1e-9, 100), xticks=(1e-8, 1e-6, 1e-4, 1e-2, 1))
    errors.invert_yaxis()
    errors.spines[["top", "right"]].set_visible(False)
    return figure


def format_explorer():
    """Return a widget: `bits_figure` of the typed number; other text gets a message, and the picture stays."""
    import ipywidgets as w

    text = w.Text(value="0.1", description="number", layout=w.Layout(width="320px"))
    remark_line, picture = w.HTML(), w.Image(format="png", layout=w.Layout(max_width="100%"))

    def draw(_=None):
        try:
            number, remark = number_in_text(text.value)
        except ValueError as error:
            remark_line.value = html.escape(str(error))
            return
        picture.value = png(bits_figure(number))
        remark_line.value = html.escape(remark)

    text.observe(draw, "value")
    draw()
    return w.VBox([w.HBox([text, remark_line]), picture])
