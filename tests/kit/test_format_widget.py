"""course_kit.figures.mixed_precision.formats: what formats are; the widget takes anything typed. CPU."""

import math
import struct
import warnings

import ipywidgets
import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from course_kit.figures.mixed_precision.formats import FIELDS, bits, number_in_text, ranges, rounding, stored_number
from course_kit.widgets.formats import format_explorer
from course_kit.widgets.redrawn import png
from course_lib.mixed_precision.formats import E2M1, E4M3, E5M2, FORMATS, FP16, FP32, round_to

SOME = [0.1, -70000.3, 448.0, 1.2345678e-7, -1.2345678e-38, 0.0, -0.0, 1e300, math.inf, -math.inf, math.nan]


def drawn(figure: Figure) -> bytes:
    """Return the figure as a picture, where every warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return png(figure)


def words(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("number", SOME)
def test_stored_numbers_have_the_bits_of_the_processor(number):
    """FP32's and FP16's, as Python packs them."""
    for fmt, packing in ((FP32, ">f"), (FP16, ">e")):
        if math.isfinite(number) and abs(number) > fmt.largest:
            continue  # Python refuses
        digits = "".join(f"{byte:08b}" for byte in struct.pack(packing, number))
        assert "".join(stored_number(number, fmt).fields) == digits
        assert [len(field) for field in stored_number(number, fmt).fields] == [1, fmt.exponent_bits, fmt.mantissa_bits]


@pytest.mark.parametrize("number", SOME)
def test_errors_are_those_of_the_number_stored(number):
    for fmt in FORMATS.values():
        stored = stored_number(number, fmt)
        value = round_to(torch.tensor(number, dtype=torch.float64), fmt).item()
        assert stored.value == value or math.isnan(stored.value) and math.isnan(value)
        if math.isfinite(number) and math.isfinite(value):
            assert stored.error == abs(value - number)
            wanted = abs(value - number) / abs(number) if number else math.nan
            assert stored.relative_error == pytest.approx(wanted, nan_ok=True)
        elif value == number:
            assert stored.error == 0
        else:
            assert math.isnan(stored.error) or math.isinf(stored.error) and math.isinf(value)


@pytest.mark.parametrize(
    "number, fmt, remark",
    [
        (0.5, E4M3, "exact"),
        (-0.0, E4M3, "exact"),
        (0.1, E4M3, "rounded"),
        (2.0**-9, E4M3, "exact, subnormal"),
        (0.003, E4M3, "rounded, subnormal"),
        (1e-5, E4M3, "lost: too small"),
        (460.0, E4M3, "rounded to the largest"),
        (465.0, E4M3, "overflow"),
        (1e5, E5M2, "overflow"),
        (100.0, E2M1, "past the largest"),
        (math.inf, E4M3, "no infinity: NaN"),
        (-math.inf, E2M1, "no infinity: the largest"),
        (math.inf, E5M2, "exact"),
        (math.nan, E5M2, "NaN"),
        (math.nan, E2M1, "no NaN: the largest"),
    ],
)
def test_remarks_say_what_happened(number, fmt, remark):
    assert stored_number(number, fmt).remark == remark


@pytest.mark.parametrize("number", SOME)
def test_the_figure_shows_every_bit_in_its_color_and_the_numbers(number):
    figure = bits(number)
    assert drawn(figure).startswith(b"\x89PNG")
    (axes,) = figure.axes
    squares = {(round(patch.get_x()), int(patch.get_y())): patch for patch in axes.patches}
    places = [(*text.get_position(), text.get_text()) for text in axes.texts]
    digits = {(int(x), int(y)): text for x, y, text in places if 0 < x < 32}
    assert len(axes.patches) == len(squares) == len(digits) == sum(fmt.bits for fmt in FORMATS.values())
    for row, fmt in enumerate(FORMATS.values()):
        stored = stored_number(number, fmt)
        assert "".join(digits[place, row] for place in range(fmt.bits)) == "".join(stored.fields)
        sign, exponent, mantissa = FIELDS.values()
        for place, color in enumerate([sign] + [exponent] * fmt.exponent_bits + [mantissa] * fmt.mantissa_bits):
            assert squares[place, row].get_edgecolor() == to_rgba(color)
            filled = color if digits[place, row] == "1" else "white"
            assert squares[place, row].get_facecolor() == to_rgba(filled)
        cells = [t.get_text() for t in axes.texts if t.get_position()[1] == row + 0.5 and t.get_position()[0] > 35]
        assert len(cells) == 4 and cells[-1] == stored.remark
        if math.isnan(stored.value):
            assert cells[0] == "NaN"
        else:
            assert float(cells[0].replace("−", "-")) == pytest.approx(stored.value, rel=1e-8)


@pytest.mark.parametrize("number", SOME)
def test_no_two_texts_of_a_row_lie_on_each_other(number):
    figure = bits(number)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    for row in range(len(FORMATS)):
        boxes = sorted(t.get_window_extent().extents.tolist() for t in axes.texts if t.get_position()[1] == row + 0.5)
        assert all(left[2] <= right[0] for left, right in zip(boxes, boxes[1:], strict=False))
        assert 0 <= boxes[0][0] and boxes[-1][2] <= figure.bbox.width


# Text.


@pytest.mark.parametrize(
    "text, number",
    [
        ("0.1", 0.1),
        (" -3e5\n", -3e5),
        ("inf", math.inf),
        ("-Infinity", -math.inf),
        ("1_000", 1000),
        ("-1e-320", -1e-320),
    ],
)
def test_numbers_are_read(text, number):
    assert number_in_text(text) == (number, "")


def test_nan_and_the_sign_of_zero_are_read():
    assert math.isnan(number_in_text("nan")[0])
    assert math.copysign(1, number_in_text("-0")[0]) == -1


@pytest.mark.parametrize("text, number, remark", [("1e400", math.inf, "too large"), ("-1e-400", -0.0, "too small")])
def test_what_is_lost_in_float64_is_said(text, number, remark):
    found, words_about_it = number_in_text(text)
    assert found == number and math.copysign(1, found) == math.copysign(1, number)
    assert remark in words_about_it and f"taken as {number}" in words_about_it


@pytest.mark.parametrize(
    "text", ["", "  ", "abc", "1,5", "1e", "--1", "0x10", "1 2", "<b>", "٣x", "\0", "9" * 5000 + "z"]
)
def test_garbage_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match="is not a number: write it as 0.1") as refused:
        number_in_text(text)
    assert len(str(refused.value)) < 120
    assert refused.value.__suppress_context__


# The widget.


def test_the_widget_follows_the_text_and_keeps_its_picture():
    widget = format_explorer()
    (text, line), picture = widget.children[0].children, widget.children[1]
    assert isinstance(text, ipywidgets.Text) and isinstance(picture, ipywidgets.Image)
    assert picture.value == png(bits(0.1)) and line.value == ""
    for typed, number in (("448", 448.0), ("nan", math.nan), ("-inf", -math.inf), ("-0", -0.0), ("1e-9", 1e-9)):
        text.value = typed
        assert picture.value == png(bits(number)) and line.value == ""
    text.value = "1e400"
    kept = picture.value
    assert kept == png(bits(math.inf)) and "too large" in line.value
    text.value = "<script>"
    assert picture.value == kept and "&lt;script&gt;” is not a number" in line.value
    text.value = "2"
    assert picture.value == png(bits(2.0)) and line.value == ""


# Ranges and stairs.


def test_ranges_are_drawn_from_the_smallest_to_the_largest():
    figure = ranges()
    drawn(figure)
    axes, table = figure.axes
    assert axes.get_xscale() == "log"
    bars = {(round(bar.get_y() + 0.3), bar.get_x()): bar.get_x() + bar.get_width() for bar in axes.patches}
    assert len(bars) == 2 * len(FORMATS)
    for row, fmt in enumerate(FORMATS.values()):
        assert bars[row, fmt.smallest_subnormal] == pytest.approx(fmt.smallest_normal)
        assert bars[row, fmt.smallest_normal] == pytest.approx(fmt.largest)
        cells = [float(t.get_text().replace("−", "-")) for t in table.texts if t.get_position()[1] == row]
        wanted = [fmt.smallest_subnormal, fmt.smallest_normal, fmt.largest, fmt.epsilon]
        assert cells == pytest.approx(wanted, rel=5e-3)
    low, high = axes.get_xlim()
    assert low < FP32.smallest_subnormal and high > FP32.largest
    assert {"65504", "448", "57344", "3.4028e+38"} <= set(words(table))


def test_stairs_have_as_many_steps_as_there_are_numbers():
    figure = rounding()
    drawn(figure)
    *panels, errors = figure.axes
    assert len(panels) == len(FORMATS)
    for axes, fmt in zip(panels, FORMATS.values(), strict=True):
        x, rounded = axes.lines[1].get_data()
        assert len(x) == 10_000 and (x[0], x[-1]) == (1, 2)
        assert len(set(rounded.tolist())) == min(fmt.between_one_and_two + 2, 10_000)
        assert abs(rounded - x).max() <= fmt.epsilon / 2
        assert f"{fmt.between_one_and_two:,}\nbetween" in axes.get_title()
    widths = [bar.get_width() for bar in errors.patches]
    assert widths == pytest.approx([fmt.epsilon / 2 for fmt in FORMATS.values()], rel=0.01)


def test_stairs_of_a_few_points_are_refused():
    with pytest.raises(ValueError, match="points=99: the stairs"):
        rounding(99)
    assert len(rounding(100).axes[0].lines[1].get_xdata()) == 100
