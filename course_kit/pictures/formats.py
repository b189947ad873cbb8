"""Pictures of floating-point formats, and a widget: type a number, and see its bits in each of them.

    format_explorer()       the widget
    bits_figure(value)      its picture: sign, exponent, mantissa of a number in each format, what is stored, the error
    range_figure()          from the smallest to the largest number of each format, on a log axis
    rounding_figure()       10,000 points of [1, 2] rounded to each format

In the bits of one number, FP32, TF32 and BF16 have one exponent field, and mantissas cut at different places; FP16 and
E5M2 have another one, and a smaller range. All that an exponent field of e bits buys is the length of a bar in
`range_figure`, 2^e binades less those of the top codes; all that a mantissa of m bits buys is the number of steps in
`rounding_figure`, 2^m a binade. An 8-bit format has 7 bits to divide between the two (Micikevicius et al. 2022, §3).
"""

import html
import math
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

import torch

from course_kit.pictures.planner import png
from course_lib.mixed_precision.formats import E2M1, FORMATS, FloatFormat, decode, encode, round_to

SIGN_COLOUR, EXPONENT_COLOUR, MANTISSA_COLOUR = "#C44E52", "#DD8452", "#4C72B0"
NORMAL_COLOUR, SUBNORMAL_COLOUR, POINT_COLOUR = "#4C72B0", "#DD8452", "#55A868"
QUIET_COLOUR = "#DDDDDD"


class StoredNumber(NamedTuple):
    """What a format makes of a number."""

    fields: tuple[str, str, str]  # digits 0 and 1 of the sign, the exponent, the mantissa
    value: float
    error: float  # |value - number|; NaN where there is no such difference
    relative_error: float  # error / |number|; NaN where the number is 0, infinite or NaN
    remark: str


def remark_on(number: float, value: float, fmt: FloatFormat) -> str:
    """What happened to a number that is stored as `value`, in a few words."""
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
    """A float64 as the nearest number of the format, without saturation."""
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
    """The float64 nearest to a typed number, and a remark where that has lost it: 1e400 is inf. Raises ValueError for
    what isn't a number.
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
    """9 digits tell all float32 apart."""
    return "–" if math.isnan(number) else f"{number:.{digits}g}".replace("-", "−")


def draw_bits(axes, row: float, fields: tuple[str, str, str]) -> None:
    """One square a bit, from the left: sign, exponent, mantissa in their colours; ones are dark, zeros light."""
    from matplotlib.patches import Rectangle

    place = 0
    for digits, colour in zip(fields, (SIGN_COLOUR, EXPONENT_COLOUR, MANTISSA_COLOUR), strict=True):
        for digit in digits:
            alpha = 1.0 if digit == "1" else 0.3
            axes.add_patch(Rectangle((place, row + 0.12), 1, 0.76, facecolor=colour, edgecolor="white", alpha=alpha))
            style = {"ha": "center", "va": "center", "fontsize": 8.5, "color": "white" if digit == "1" else "black"}
            axes.text(place + 0.5, row + 0.5, digit, **style)
            place += 1


def bits_figure(value: float):
    """A matplotlib Figure: the bits of a float64 in each format, the number they stand for, and the error. Raises
    ValueError for text that is no number.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    number = float(value)
    figure = Figure(figsize=(11.5, 0.36 * len(FORMATS) + 1.1), dpi=72, layout="constrained")
    axes = figure.add_subplot()
    columns = {"stored": 40.5, "error": 45.5, "relative error": 52, "": 53}  # where they end; the last one begins there
    for name, place in columns.items():
        axes.text(place, -0.1, name, ha="right", va="bottom", fontsize=9.5, weight="bold")
    for row, fmt in enumerate(FORMATS.values()):
        stored = stored_number(number, fmt)
        axes.text(-0.6, row + 0.5, fmt.name, ha="right", va="center", fontsize=10, weight="bold")
        draw_bits(axes, row, stored.fields)
        shown = "NaN" if math.isnan(stored.value) else number_as_text(stored.value)
        cells = shown, number_as_text(stored.error, 3), number_as_text(stored.relative_error, 3), stored.remark
        for text, place, side in zip(cells, columns.values(), ("right", "right", "right", "left"), strict=True):
            axes.text(place, row + 0.5, text, ha=side, va="center", fontsize=9.5)
    marks = {"sign": SIGN_COLOUR, "exponent": EXPONENT_COLOUR, "mantissa": MANTISSA_COLOUR}
    handles = [Patch(facecolor=colour, label=name) for name, colour in marks.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9.5)
    title = "NaN" if math.isnan(number) else repr(number).replace("-", "−")
    axes.set_title(f"{title} in each format", fontsize=11, loc="left")
    axes.set(xlim=(-3.2, 62), ylim=(len(FORMATS), -0.8))
    axes.axis("off")
    return figure


def range_figure():
    """A matplotlib Figure: each format's numbers on a log axis, subnormal and normal, with their ends in numbers."""
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
        parts = ((SUBNORMAL_COLOUR, "subnormal", *numbers[:2]), (NORMAL_COLOUR, "normal", *numbers[1:3]))
        for colour, name, low, high in parts:
            axes.barh(row, high - low, left=low, height=0.6, color=colour, label=None if row else name)
    axes.set(xscale="log", xlim=(1e-47, 1e41), xlabel="magnitude", ylim=(len(FORMATS) - 0.5, -0.6))
    axes.set_xticks([10.0**power for power in range(-40, 41, 10)])
    axes.minorticks_off()
    axes.set_yticks(range(len(FORMATS)), [f"{fmt.name}, {fmt.bits} bits" for fmt in FORMATS.values()])
    axes.grid(axis="x", color=QUIET_COLOUR)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=9.5)
    table.set(xlim=(0.2, len(headings) + 0.1))
    table.axis("off")
    return figure


def rounding_figure(points: int = 10_000):
    """A matplotlib Figure: evenly spaced points of [1, 2], rounded to each format: stairs with 2^m steps, and the
    largest errors. Raises ValueError for less than 100 points, with which one would see no stairs.
    """
    from matplotlib.figure import Figure

    if points < 100:
        raise ValueError(f"points={points}: the stairs of [1, 2] need 100 or more")
    x = torch.linspace(1, 2, points, dtype=torch.float64)
    figure = Figure(figsize=(11.5, 5.4), dpi=72, layout="constrained")
    panels = figure.subplots(2, 4).flatten()
    largest_errors = {}
    for axes, fmt in zip(panels, FORMATS.values(), strict=False):
        rounded = round_to(x, fmt)
        largest_errors[fmt.name] = (rounded - x).abs().max().item()
        axes.plot(x, x, color=QUIET_COLOUR, linewidth=1)
        axes.plot(x, rounded, ".", markersize=1.5, color=POINT_COLOUR)
        axes.set_title(f"{fmt.name}: {fmt.between_one_and_two:,} between 1 and 2", fontsize=10)
        axes.set(xlim=(0.97, 2.03), ylim=(0.97, 2.03), xticks=(1, 1.5, 2), yticks=(1, 1.5, 2), aspect="equal")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[4:7]:
        axes.set_xlabel("number")
    for axes in panels[[0, 4]]:
        axes.set_ylabel("rounded")
    errors = panels[-1]
    bars = errors.barh(list(largest_errors), list(largest_errors.values()), color=POINT_COLOUR, height=0.6)
    errors.bar_label(bars, [number_as_text(error, 3) for error in largest_errors.values()], padding=3, fontsize=9)
    errors.set(xscale="log", xlabel="largest error", xlim=(1e-9, 100), xticks=(1e-8, 1e-6, 1e-4, 1e-2, 1))
    errors.invert_yaxis()
    errors.spines[["top", "right"]].set_visible(False)
    return figure


def format_explorer():
    """A widget: `bits_figure` of the number that is typed; what is no number gets a line, and the picture stays."""
    import ipywidgets as w

    text = w.Text(value="0.1", description="number", layout=w.Layout(width="320px"))
    words, picture = w.HTML(), w.Image(format="png", layout=w.Layout(max_width="100%"))

    def draw(_=None):
        try:
            number, remark = number_in_text(text.value)
        except ValueError as error:
            words.value = html.escape(str(error))
            return
        picture.value = png(bits_figure(number))
        words.value = html.escape(remark)

    text.observe(draw, "value")
    draw()
    return w.VBox([w.HBox([text, words]), picture])
