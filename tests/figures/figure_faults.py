"""What a reader could not read in a figure."""

import itertools

import numpy as np
from matplotlib.axis import Tick, XTick
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from course_kit.figures.style import contrast

SMALLEST_PT, WIDEST_IN, LEAST_CONTRAST = 8, 8.6, 4.5


def in_view(tick: Tick) -> bool:
    """A tick beyond the ends of its axis is not drawn."""
    axis = tick.axes.xaxis if isinstance(tick, XTick) else tick.axes.yaxis
    low, high = sorted(axis.get_view_interval())
    return low <= tick.get_loc() <= high


def visible_texts(figure: Figure) -> list[Text]:
    """The texts that are drawn."""
    hidden = {id(child) for axes in figure.axes if not axes.axison for child in (axes.xaxis, axes.yaxis)}
    found = []

    def visit(artist) -> None:
        if not artist.get_visible() or id(artist) in hidden:
            return
        if isinstance(artist, Tick) and not in_view(artist):
            return
        if isinstance(artist, Text) and artist.get_text().strip():
            found.append(artist)
        for child in artist.get_children():
            visit(child)

    visit(figure)
    return found


def pixels(figure: Figure) -> np.ndarray:
    """[height, width, 3], row 0 at the bottom."""
    canvas = FigureCanvasAgg(figure)  # a closed figure has none that keeps its pixels
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[::-1, :, :3] / 255


def faults(figure: Figure) -> list[str]:
    """Text that is too small, overlaps other text, or has too little contrast; and a figure wider than a column."""
    figure.canvas.draw()
    figure.set_layout_engine("none")  # the axes stay where they are while the texts are hidden
    found = []
    size = figure.get_tightbbox()
    if size.width > WIDEST_IN:
        found.append(f"{size.width:.1f} inches wide")
    texts = visible_texts(figure)
    canvas = figure.bbox
    boxes = []
    for text in texts:
        box = text.get_window_extent()
        clipped = text.axes is not None and text.get_clip_on() and not text.axes.bbox.overlaps(box)
        if clipped or not canvas.overlaps(box):
            continue
        boxes.append((text, box))
        if text.get_fontsize() < SMALLEST_PT:
            found.append(f"{text.get_text()!r}: {text.get_fontsize():.1f} points")
    straight = [(text, box) for text, box in boxes if text.get_rotation() % 90 == 0]
    for (one, box), (other, under) in itertools.combinations(straight, 2):
        width = min(box.x1, under.x1) - max(box.x0, under.x0)
        height = min(box.y1, under.y1) - max(box.y0, under.y0)
        if width > 1.5 and height > 2.5:  # boxes have room for letters that go below the line
            found.append(f"{one.get_text()!r} overlaps {other.get_text()!r}")
    for text, _ in boxes:
        text.set_visible(False)
    empty = pixels(figure)
    for text, _ in boxes:
        text.set_visible(True)
    for text, box in boxes:
        patch = text.get_bbox_patch()
        if patch is not None and patch.get_facecolor()[3] > 0.5:
            under = np.array([patch.get_facecolor()[:3]])
        else:
            x0, x1, y0, y1 = (max(0, round(edge)) for edge in (box.x0, box.x1, box.y0, box.y1))
            under = empty[y0:y1, x0:x1].reshape(-1, 3)
        if len(under) == 0:
            continue
        ground = np.median(under, axis=0)
        if (ratio := contrast(to_hex(text.get_color()), to_hex(ground))) < LEAST_CONTRAST:
            found.append(f"{text.get_text()!r}: contrast {ratio:.1f}")
    return found
