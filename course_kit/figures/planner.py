"""A figure as an image."""

import io


def png(figure) -> bytes:
    """Return a figure as a PNG image."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
