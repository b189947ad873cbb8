"""Type a number, and see its bits in each floating-point format (notebook 14)."""

import html

from course_kit.figures.mixed_precision.formats import bits, number_in_text
from course_kit.widgets.redrawn import Drawing, png


def format_explorer() -> Drawing:
    """Return a widget: the bits of the typed number; other text gets a message, and the picture stays."""
    import ipywidgets as w

    text = w.Text(value="0.1", description="number", layout=w.Layout(width="320px"))
    remark_line, picture = w.HTML(), w.Image(format="png")

    def draw(_=None):
        try:
            number, remark = number_in_text(text.value)
        except ValueError as error:
            remark_line.value = html.escape(str(error))
            return
        figure = bits(number)
        picture.value, picture.width = png(figure), f"{figure.get_figwidth() * figure.dpi:.0f}"
        remark_line.value = html.escape(remark)

    text.observe(draw, "value")
    draw()
    return Drawing([w.HBox([text, remark_line]), picture])
