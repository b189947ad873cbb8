"""Floating-point formats: their ranges, their steps, and the bits of a number in each of them.

In the bits of one number, FP32, TF32 and BF16 have the same exponent field, and mantissas of different lengths; FP16
and E5M2 have another exponent field, and a smaller range. An exponent field of e bits buys the length of a bar in
`ranges`, 2^e binades minus the top codes'; a mantissa of m bits buys the number of steps in
`rounding`, 2^m per binade. An 8-bit format has 7 bits to divide between the two (Micikevicius et al. 2022, §3).
"""

import math
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_kit.figures.style import KINDS, LIGHT, WIDTH, ink_on, styled
from course_lib.mixed_precision.formats import E2M1, FORMATS, FloatFormat, decode, encode, round_to

FIELDS = {"sign": KINDS[4], "exponent": KINDS[0], "mantissa": KINDS[2]}
NORMAL, SUBNORMAL = KINDS[0], KINDS[1]


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


def draw_bits(axes: Axes, row: float, fields: tuple[str, str, str]) -> None:
    """Draw one square per bit, from the left: sign, exponent, mantissa in their colors; ones are filled, zeros not."""
    x = 0
    for digits, color in zip(fields, FIELDS.values(), strict=True):
        for digit in digits:
            fill = color if digit == "1" else "white"
            square = plt.Rectangle((x + 0.06, row + 0.12), 0.88, 0.76, facecolor=fill, edgecolor=color, linewidth=1)
            axes.add_patch(square)
            axes.text(x + 0.5, row + 0.5, digit, ha="center", va="center", fontsize=8, color=ink_on(fill))
            x += 1


@styled
def bits(value: float) -> Figure:
    """Return the bits of a float64 in each format, the number they stand for, and the error.

    Raises ValueError for text that is not a number.
    """
    number = float(value)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.33 * len(FORMATS) + 1))
    columns = {"stored": 42, "error": 48.5, "relative error": 57, "": 57.8}  # their ends; the last one begins there
    for name, x in columns.items():
        axes.text(x, -0.1, name, ha="right", va="bottom", fontsize=8, weight="bold")
    for row, fmt in enumerate(FORMATS.values()):
        stored = stored_number(number, fmt)
        axes.text(-0.6, row + 0.5, fmt.name, ha="right", va="center", weight="bold")
        draw_bits(axes, row, stored.fields)
        shown = "NaN" if math.isnan(stored.value) else number_as_text(stored.value)
        cells = shown, number_as_text(stored.error, 3), number_as_text(stored.relative_error, 3), stored.remark
        for text, x, side in zip(cells, columns.values(), ("right", "right", "right", "left"), strict=True):
            axes.text(x, row + 0.5, text, ha=side, va="center", fontsize=8)
    handles = [Patch(facecolor=color, label=name) for name, color in FIELDS.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=3)
    title = "NaN" if math.isnan(number) else repr(number).replace("-", "−")
    axes.set_title(f"{title} in each format", loc="left")
    axes.set(xlim=(-3.6, 71), ylim=(len(FORMATS), -0.8))
    axes.axis("off")
    return figure


@styled
def ranges() -> Figure:
    """Return the range of each format on a log axis, subnormal and normal, with its limits as numbers."""
    figure, (axes, table) = plt.subplots(1, 2, figsize=(WIDTH, 3.4), width_ratios=(5, 4), sharey=True)
    headings = ("smallest\nsubnormal", "smallest\nnormal", "largest", "epsilon")
    for column, heading in enumerate(headings):
        table.text(column + 1, -0.75, heading, ha="right", va="bottom", fontsize=8, weight="bold")
    for row, fmt in enumerate(FORMATS.values()):
        numbers = fmt.smallest_subnormal, fmt.smallest_normal, fmt.largest, fmt.epsilon
        for column, number in enumerate(numbers):
            text = number_as_text(number, 5 if number > 1 else 3)
            table.text(column + 1, row, text, ha="right", va="center", fontsize=8)
        parts = ((SUBNORMAL, "subnormal", *numbers[:2]), (NORMAL, "normal", *numbers[1:3]))
        for color, name, low, high in parts:
            axes.barh(row, high - low, left=low, height=0.6, color=color, label=None if row else name)
    axes.set(xscale="log", xlim=(1e-47, 1e41), xlabel="magnitude", ylim=(len(FORMATS) - 0.5, -0.6))
    axes.set_xticks([10.0**power for power in range(-40, 41, 20)])
    axes.minorticks_off()
    axes.set_yticks(range(len(FORMATS)), [f"{fmt.name}, {fmt.bits} bits" for fmt in FORMATS.values()])
    axes.grid(axis="x", color=LIGHT)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    table.set(xlim=(0.2, len(headings) + 0.1))
    table.axis("off")
    return figure


@styled
def rounding(points: int = 10_000) -> Figure:
    """Return evenly spaced points of [1, 2], rounded to each format: stairs with 2^m steps, and the largest errors.

    Raises ValueError for fewer than 100 points, which would show no stairs.
    """
    if points < 100:
        raise ValueError(f"points={points}: the stairs of [1, 2] need 100 or more")
    x = torch.linspace(1, 2, points, dtype=torch.float64)
    figure, grid = plt.subplots(2, 4, figsize=(WIDTH, 4.9))
    panels = grid.flatten()
    largest_errors: dict[str, float] = {}
    for axes, fmt in zip(panels, FORMATS.values(), strict=False):
        rounded = round_to(x, fmt)
        largest_errors[fmt.name] = (rounded - x).abs().max().item()
        axes.plot(x, x, color=LIGHT, linewidth=1)
        axes.plot(x, rounded, ".", markersize=1.5, color=KINDS[0])
        axes.set_title(f"{fmt.name}: {fmt.between_one_and_two:,}\nbetween 1 and 2")
        axes.set(xlim=(0.97, 2.03), ylim=(0.97, 2.03), xticks=(1, 1.5, 2), yticks=(1, 1.5, 2), aspect="equal")
    for axes in panels[4:7]:
        axes.set_xlabel("number")
    for axes in panels[[0, 4]]:
        axes.set_ylabel("rounded")
    errors = panels[-1]
    bars = errors.barh(list(largest_errors), list(largest_errors.values()), color=KINDS[0], height=0.6)
    errors.bar_label(bars, [number_as_text(error, 2) for error in largest_errors.values()], padding=3, fontsize=8)
    errors.set(xscale="log", xlabel="largest error", xlim=(1e-9, 1e5), xticks=(1e-8, 1e-4, 1))
    errors.invert_yaxis()
    return figure
