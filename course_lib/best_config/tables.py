"""Many layouts as one table of arrays, so that a formula is written once for one layout and for a million.

table = LayoutTable.of([Layout.parse("dp8"), Layout.parse("dp2,tp4,sp")])
table.tp            array([1, 4])                 the names are Layout's
table[1]            Layout(dp=2, tp=4, …)         and one of them is a Layout again
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from course_lib.five_d.layouts import Layout

FIELDS = [field.name for field in dataclasses.fields(Layout)]


class LayoutTable:
    """n layouts; each field of Layout is an array [n] here."""

    def __init__(self, n: int, **columns):
        for field in dataclasses.fields(Layout):
            setattr(self, field.name, np.broadcast_to(np.asarray(columns.get(field.name, field.default)), n))

    @classmethod
    def of(cls, layouts: Iterable[Layout]) -> "LayoutTable":
        """The table of some layouts."""
        layouts = list(layouts)
        return cls(len(layouts), **{name: [getattr(layout, name) for layout in layouts] for name in FIELDS})

    @property
    def ranks(self) -> np.ndarray:
        """How many ranks each takes."""
        return self.dp * self.pp * self.cp * self.tp

    def __len__(self) -> int:
        return len(self.dp)

    def __getitem__(self, row: int) -> Layout:
        return Layout(**{name: getattr(self, name)[row].item() for name in FIELDS})

    def where(self, chosen: np.ndarray) -> "LayoutTable":
        """The rows that a mask or an array of numbers chooses."""
        rows = {name: getattr(self, name)[chosen] for name in FIELDS}
        return LayoutTable(len(rows["dp"]), **rows)

    def times(self, name: str, values: Iterable) -> "LayoutTable":
        """Each row once for each value of a field."""
        values = np.asarray(list(values))
        columns = {field: np.repeat(getattr(self, field), len(values)) for field in FIELDS}
        return LayoutTable(len(self) * len(values), **columns | {name: np.tile(values, len(self))})
