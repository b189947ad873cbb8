"""Check of exercise 10.1: coordinates and groups of ranks against a tensor of ranks with an axis for each degree."""

from __future__ import annotations

import math

import torch

from course_lib.five_d import layouts

AXES = ("dp", "pp", "cp", "tp")
LAYOUTS = ("dp2,pp2,cp2,tp2", "dp3,pp2,tp4", "cp5,tp2", "pp7", "dp1")


def check() -> None:
    """Assert the coordinates of each rank, and all groups along one axis and several."""
    for text in LAYOUTS:
        layout = layouts.Layout.parse(text)
        position = torch.arange(layout.ranks).view(layout.dp, layout.pp, layout.cp, layout.tp)
        for rank in range(layout.ranks):
            result = layouts.coordinates(rank, layout)
            assert list(result) == [*AXES], f"coordinates should name dp, pp, cp, tp in this order: {result}"
            assert position[tuple(result.values())] == rank, f"{text}: rank {rank} is not at {result}"
        for axes in (("tp",), ("dp",), ("dp", "cp"), ("pp", "tp"), AXES):
            numbers = [AXES.index(axis) for axis in axes]
            others = [n for n in range(4) if n not in numbers]
            size = math.prod(position.shape[n] for n in numbers)
            wanted = position.permute(*others, *numbers).reshape(-1, size).tolist()
            groups = layouts.groups_along(layout, *axes)
            assert sorted(groups) == sorted(map(sorted, wanted)), f"{text}, along {axes}: {groups}, not {wanted}"
