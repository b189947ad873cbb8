"""Check of exercise 10.1: coordinates and groups of ranks against a tensor of ranks with an axis for each degree."""

from __future__ import annotations

import math

import torch

from course_lib.five_d import layouts

AXES = ("dp", "pp", "cp", "tp")
LAYOUTS = ("dp2,pp2,cp2,tp2", "dp3,pp2,tp4", "cp5,tp2", "pp7", "dp1")


def check() -> None:
    """Assert where each rank stands, and all groups along one axis and several."""
    for text in LAYOUTS:
        layout = layouts.Layout.parse(text)
        place = torch.arange(layout.ranks).view(layout.dp, layout.pp, layout.cp, layout.tp)
        for rank in range(layout.ranks):
            found = layouts.coordinates(rank, layout)
            assert list(found) == [*AXES], f"coordinates should name dp, pp, cp, tp in this order: {found}"
            assert place[tuple(found.values())] == rank, f"{text}: rank {rank} does not stand at {found}"
        for axes in (("tp",), ("dp",), ("dp", "cp"), ("pp", "tp"), AXES):
            numbers = [AXES.index(axis) for axis in axes]
            others = [n for n in range(4) if n not in numbers]
            size = math.prod(place.shape[n] for n in numbers)
            wanted = place.permute(*others, *numbers).reshape(-1, size).tolist()
            found = layouts.groups_along(layout, *axes)
            assert sorted(found) == sorted(map(sorted, wanted)), f"{text}, along {axes}: {found}, not {wanted}"
