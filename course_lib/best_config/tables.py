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
    def of(cls, layouts: Iterable[Layout]) -> LayoutTable:
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

    def where(self, chosen: np.ndarray) -> LayoutTable:
        """The rows that a mask or an array of numbers chooses. A field that is the same in all rows stays one value."""
        rows = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        columns = {name: getattr(self, name) for name in FIELDS}
        return LayoutTable(
            len(rows),
            **{name: column[:1] if column.strides == (0,) else column[rows] for name, column in columns.items()},
        )

    def chunks(self, rows: int) -> list[LayoutTable]:
        """The table in tables of at most `rows` layouts, in order; an empty table in one."""
        numbers = np.arange(len(self))
        return [self.where(numbers[start : start + rows]) for start in range(0, max(1, len(self)), rows)]


def joined(columns: list[dict[str, np.ndarray]], tables: list[LayoutTable]) -> dict[str, np.ndarray]:
    """Return the columns of one table from those of its chunks, by name; a column may be one number for a chunk."""
    return {
        name: np.concatenate([np.broadcast_to(each[name], len(t)) for each, t in zip(columns, tables, strict=True)])
        for name in columns[0]
    }
