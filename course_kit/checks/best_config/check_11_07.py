"""Check of exercise 11.7: all factorizations into four degrees, each once, and the first reason of each row."""

from __future__ import annotations

import numpy as np

from course_lib.best_config import layouts

FACTORIZATIONS = {1: 1, 8: 20, 12: 40, 16384: 680}  # GPUs: ways to write them as a product of four


def check() -> None:
    """Assert the tables of four numbers of GPUs, and two searches' rules that share a list of reasons."""
    for gpus, wanted in FACTORIZATIONS.items():
        table = layouts.degrees(gpus)
        columns = (table.dp, table.pp, table.cp, table.tp)
        rows = {tuple(map(int, row)) for row in zip(*columns, strict=True)}
        assert len(table) == len(rows) == wanted, (
            f"{gpus} GPUs: {wanted} factorizations, you have {len(table)} rows, {len(rows)} different: pp, cp, tp are "
            "any divisors, and dp is the quotient, where it is an integer"
        )
        assert np.all(table.ranks == gpus), f"{gpus} GPUs: a row has {table.ranks[table.ranks != gpus][0]}"
    reasons = ["fits"]
    both = {"odd": np.array([0, 1, 0, 1], bool), "large": np.array([0, 0, 1, 1], bool)}
    one = {"odd": np.array([0, 0, 1, 0], bool)}
    for rules, statuses in ((both, ["fits", "odd", "large", "odd"]), (one, ["fits", "fits", "odd", "fits"])):
        numbers = layouts.first_reason(rules, reasons)
        assert sorted(reasons) == ["fits", "large", "odd"] and reasons[0] == "fits", (
            f"`reasons` is handed in with 'fits', and each rule's words are added to it, once: {reasons}"
        )
        got = [reasons[int(number)] for number in numbers]
        assert got == statuses, (
            f"four rows, rules {list(rules)}: the reasons are {statuses}, yours {got}: return the index in `reasons` "
            "of the first rule that holds, and 0 if none does"
        )
