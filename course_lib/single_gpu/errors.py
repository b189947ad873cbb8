"""Messages of other libraries' errors, on one line."""

from __future__ import annotations


def one_line_message(error: BaseException) -> str:
    """Return an error's message on one line; without a message, the name of its class."""
    return " ".join(str(error).split()) or type(error).__name__
