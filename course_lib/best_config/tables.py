"""Many layouts as one table of arrays, so that one formula serves a single layout and a million of them.

table = LayoutTable.of([Layout.parse("dp8"), Layout.parse("dp2,tp4,sp")])
table.tp            array([1, 4])                 the names of Layout's fields
table[1]            Layout(dp=2, tp=4, …)         a row is a Layout again
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from course_lib.five_d.layouts import Layout

FIELDS = [field.name for field in dataclasses.fields(Layout)]


class LayoutTable:
    """n layouts; each field of Layout is an array [n]."""

    dp: np.ndarray
    pp: np.ndarray
    cp: np.ndarray
    tp: np.ndarray
    ep: np.ndarray
    zero_stage: np.ndarray
    sequence_parallel: np.ndarray
    micro_batch: np.ndarray
    schedule: np.ndarray
    virtual: np.ndarray
    recompute: np.ndarray
    cp_method: np.ndarray
    cp_order: np.ndarray
    gather_once: np.ndarray
    replicate: np.ndarray

    def __init__(self, n: int, **columns):
        for field in dataclasses.fields(Layout):
            setattr(self, field.name, np.broadcast_to(np.asarray(columns.get(field.name, field.default)), n))

    @classmethod
    def of(cls, layouts: Iterable[Layout]) -> LayoutTable:
        """Return the table of some layouts."""
        layouts = list(layouts)
        return cls(len(layouts), **{name: [getattr(layout, name) for layout in layouts] for name in FIELDS})

    @property
    def ranks(self) -> np.ndarray:
        """The number of ranks of each layout."""
        return self.dp * self.pp * self.cp * self.tp

    def __len__(self) -> int:
        return len(self.dp)

    def __getitem__(self, row: int) -> Layout:
        return Layout(**{name: getattr(self, name)[row].item() for name in FIELDS})

    def where(self, selected: np.ndarray) -> LayoutTable:
        """Return the rows that a mask or an array of row numbers selects. A field with one value in all rows stays a
        broadcast of one value.
        """
        rows = np.flatnonzero(selected) if selected.dtype == bool else selected
        columns = {name: getattr(self, name) for name in FIELDS}
        return LayoutTable(
            len(rows),
            **{name: column[:1] if column.strides == (0,) else column[rows] for name, column in columns.items()},
        )

    def chunks(self, rows: int) -> list[LayoutTable]:
        """Return tables of at most `rows` layouts each, in order; an empty table gives one empty chunk."""
        numbers = np.arange(len(self))
        return [self.where(numbers[start : start + rows]) for start in range(0, max(1, len(self)), rows)]


Layouts = Layout | LayoutTable  # what a formula takes: one layout, or n at once


def joined(columns: list[dict[str, np.ndarray]], tables: list[LayoutTable]) -> dict[str, np.ndarray]:
    """Return the columns of a table from its chunks' columns, by name; a chunk's column may be one number."""
    return {
        name: np.concatenate([np.broadcast_to(each[name], len(t)) for each, t in zip(columns, tables, strict=True)])
        for name in columns[0]
    }
