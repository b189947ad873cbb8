"""Ranks inside a notebook: `Ranks(4)` starts four processes, `ranks(function, *args)` runs a function on each."""

from course_kit.ranks.calls import Ranks, choose_backend, shared
from course_kit.ranks.report import BadCall, Interrupted, RankError, RanksHung

__all__ = ["BadCall", "Interrupted", "RankError", "Ranks", "RanksHung", "choose_backend", "shared"]
