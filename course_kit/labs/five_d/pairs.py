"""Every pair of techniques on four ranks, one step each, against one process."""

from __future__ import annotations

import dataclasses
import itertools

from course_kit.labs.five_d.models import ADAMW, MOE, SHALLOW, Steps, after_steps, differences
from course_kit.ranks import Ranks
from course_lib import five_d
from course_lib.five_d.layouts import Layout, check_layout

FEATURES = ["tp2", "sp", "cp2", "pp2", "ep2", "zero1", "zero2", "zero3"]


def paired(one: str, other: str) -> str:
    """Return the spec of a layout with two features on four ranks. sp implies tp2; zero3 under pp gathers once."""
    tokens = {one, other} | ({"tp2"} if "sp" in (one, other) else set())
    tokens |= {"keep"} if {"zero3", "pp2"} <= tokens else set()
    used = 2 ** len(tokens & {"tp2", "cp2", "pp2"})
    micro_batch = used if "pp2" in tokens else 2 * used  # two of them under pp
    return ",".join([f"dp{4 // used}", *sorted(tokens), f"mb{micro_batch}"])


def trained_on_one_mesh(texts: list[str], moe: dict | None) -> list[Steps]:
    """On a rank: take a step of each of these layouts, which have the same groups."""
    mesh = five_d.build_mesh(Layout.parse(texts[0]))
    return [after_steps(five_d.parallelize(SHALLOW, Layout.parse(text), mesh, moe=moe, **ADAMW), 1) for text in texts]


def all_pairs(ranks: Ranks) -> dict[tuple[str, str], float | str]:
    """Return, for each pair of FEATURES, the relative difference of a step on four ranks from one process, or the
    reason why there is no layout.
    """
    results: dict[tuple[str, str], float | str] = {}
    meshes: dict[Layout, dict[tuple[str, str], str]] = {}
    for one, other in itertools.combinations(FEATURES, 2):
        try:
            layout = Layout.parse(paired(one, other))
            check_layout(SHALLOW, layout, 4, 8, 16, MOE if layout.ep > 1 else None)
            layout_without_zero = dataclasses.replace(layout, zero_stage=0, gather_once=False)
            meshes.setdefault(layout_without_zero, {})[one, other] = str(layout)
        except ValueError as error:
            results[one, other] = str(error)
    for layout_without_zero, texts in meshes.items():
        moe = MOE if layout_without_zero.ep > 1 else None
        by_layout = zip(*ranks(trained_on_one_mesh, list(texts.values()), moe), strict=True)
        for (pair, text), of_ranks in zip(texts.items(), by_layout, strict=True):
            results[pair] = max(differences(of_ranks, text, moe, 1, SHALLOW))
    return results
