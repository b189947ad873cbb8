"""Spans of a profile over time, as rows of bars. What all notebooks that measure a step share."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from course_kit.figures.style import ink_on
from course_lib.recompute.profiling import Span

OTHER = "#BBBBBB"  # operators without a color of their own
THIN = 100  # more bars than this in one row would vanish under their white edges


def draw_spans(
    axes: Axes,
    shown: Sequence[Span],
    colors: dict[str, str] | None = None,
    labels: Sequence[str] = (),
    length_ms: float = 0.0,
) -> None:
    """Draw a row of bars per lane. colors: by the beginning of a span's name; labels: names to write on wide bars;
    length_ms: of the axis, if it is longer than the spans.
    """
    lanes = list(dict.fromkeys(span.lane for span in shown))
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    wide = 0.085 * max([length_ms, *(span.end_ms for span in shown)])
    for span in shown:
        row, length = lanes.index(span.lane), span.end_ms - span.start_ms
        color = next((c for start, c in (colors or {}).items() if span.name.startswith(start)), OTHER)
        bars.setdefault((row, color), []).append((span.start_ms, length))
        if span.name in labels and length > wide:
            axes.text(span.start_ms + length / 2, row, span.name, ha="center", va="center", color=ink_on(color))
    for (row, color), intervals in bars.items():
        edge = 0.5 if len(intervals) < THIN else 0
        axes.broken_barh(intervals, (row - 0.35, 0.7), facecolor=color, edgecolor="white", linewidth=edge)
    axes.set(yticks=range(len(lanes)), yticklabels=lanes, xlabel="ms")
    axes.invert_yaxis()
