"""Check of exercise 10.4: copies against models on eight ranks, whose equal bits are counted."""

from __future__ import annotations

import functools
from collections.abc import Callable

from course_kit.checks.five_d.references import reference_models
from course_kit.labs.five_d.counts import counted_copies
from course_kit.ranks import shared
from course_lib.five_d.layouts import Layout

LAYOUTS = ("dp4,ep2,tp2", "dp2,ep2,cp2,tp2,sp", "dp4,ep2,pp2")


@functools.cache
def counted(text: str) -> dict[str, tuple[int, int]]:
    """Return copies and size of the group that sums the gradient, by kind of weight, as the reference builds them."""
    with reference_models(), shared(8).within(40):
        return next(result for result in shared(8)(counted_copies, text) if result)


def check(copies: Callable[[str, Layout], tuple[int, int]]) -> None:
    """Judge copies(kind, layout)."""
    copies("matrix", Layout.parse("dp8"))  # where it is blank, nothing is counted
    for text in LAYOUTS:
        for kind, wanted in counted(text).items():
            result = copies(kind, Layout.parse(text))
            assert result == wanted, f"{text}, {kind}: counted {wanted} (copies, summed over), and copies says {result}"
