"""Check of exercise 10.2: impossible layouts are refused, and the message names the numbers."""

from __future__ import annotations

import re
from collections.abc import Callable

from course_lib.five_d import layouts

WRONG_RANKS = (  # layout, ranks, and patterns of the words that the message should have
    ("dp2,pp2,tp2", 16, ["8", "16", "dp 4"]),
    ("dp2,pp2,tp2", 12, ["8", "12", "dp 3"]),
    ("pp2,cp2,tp2", 12, ["12", "divi"]),
    ("dp4,ep3", 4, ["ep 3", "dp 4"]),
    ("dp2,pp2,ep4", 4, ["ep 4", "dp 2"]),
    ("dp2,cp2,ep4", 4, ["ep 4", "dp 2"]),
)
RIGHT_RANKS = ("dp2,pp2,tp2", "dp8,ep4", "dp2,ep2,cp4")  # eight
WRONG_PAIRS = (
    ("zero4", ["zero_stage"]),
    ("zero-1", ["zero_stage"]),
    ("dp2,sp", ["tp", r"sp\b|sequence_parallel"]),
    ("dp2,pp2,zero3", ["zero_stage", "pp 2", "keep"]),
    ("dp2,pp2,zero1,keep", ["keep"]),
    ("dp2,zero3,keep", ["keep"]),
    ("dp2,pp2,zero3,keep,dualpipe", ["dualpipe", "zero_stage"]),
    ("cp2,selective", ["selective", "cp 2"]),
    ("cp4,selective", ["selective", "cp 4"]),
)
RIGHT_PAIRS = (
    "dp2,pp2,zero3,keep,zb-v",
    "dp2,tp2,zero3",
    "tp2,sp",
    "cp2,full",
    "tp2,selective",
    "pp2,dualpipe",
    "zero2,pp2",
)


def parse(text: str) -> layouts.Layout:
    """Return the layout of a spec, or with a ZeRO stage below 0, which no spec has."""
    return layouts.Layout(zero_stage=-1) if text == "zero-1" else layouts.Layout.parse(text)


def unnamed(message: str, words: list[str]) -> list[str]:
    """Return the patterns that no word of the message begins with."""
    return [word for word in words if not re.search(rf"\b({word})", message)]


def message_of(call: Callable, *arguments) -> str | None:
    """Return the message of the call's ValueError; None if it raises none."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return None


def check() -> None:
    """Assert which layouts raise ValueError, what the message says, and which layouts pass."""
    for text, world, spec in WRONG_RANKS:
        message = message_of(layouts.check_ranks, layouts.Layout.parse(text), world)
        assert message, f"{text} on {world} ranks should raise ValueError"
        missing = unnamed(message, spec)
        assert not missing, f"{text} on {world} ranks: the message should have {', '.join(missing)}: {message}"
    for text in RIGHT_RANKS:
        message = message_of(layouts.check_ranks, layouts.Layout.parse(text), 8)
        assert message is None, f"{text} is right for 8 ranks: {message}"
    for text, spec in WRONG_PAIRS:
        message = message_of(layouts.check_pairs, parse(text))
        assert message, f"{text} should raise ValueError"
        missing = unnamed(message, spec)
        assert not missing, f"{text}: the message should name {', '.join(missing)}: {message}"
    for text in RIGHT_PAIRS:
        message = message_of(layouts.check_pairs, layouts.Layout.parse(text))
        assert message is None, f"{text} is a valid layout: {message}"
