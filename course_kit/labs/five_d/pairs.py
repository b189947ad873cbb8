"""Every pair of techniques on four ranks, a step each, against one process."""

from __future__ import annotations

import dataclasses
import itertools

from course_kit.labs.five_d.models import ADAMW, MOE, SHALLOW, Steps, after_steps, differences
from course_kit.ranks import Ranks
from course_lib import five_d
from course_lib.five_d.layouts import Layout, check_layout

FEATURES = ["tp2", "sp", "cp2", "pp2", "ep2", "zero1", "zero2", "zero3"]


def paired(one: str, other: str) -> str:
    """Return the layout of two features, on four ranks. sp comes with tp2, zero3 under pp keeps what it gathers."""
    words = {one, other} | ({"tp2"} if "sp" in (one, other) else set())
    words |= {"keep"} if {"zero3", "pp2"} <= words else set()
    used = 2 ** len(words & {"tp2", "cp2", "pp2"})
    micro_batch = used if "pp2" in words else 2 * used  # two of them under pp
    return ",".join([f"dp{4 // used}", *sorted(words), f"mb{micro_batch}"])


def trained_on_one_mesh(texts: list[str], moe: dict | None) -> list[Steps]:
    """On a rank: a step of each of these layouts, which have the same groups."""
    mesh = five_d.build_mesh(Layout.parse(texts[0]))
    return [after_steps(five_d.parallelize(SHALLOW, Layout.parse(text), mesh, moe=moe, **ADAMW), 1) for text in texts]


def all_pairs(ranks: Ranks) -> dict[tuple[str, str], float | str]:
    """Return for each pair of FEATURES how far a step on four ranks is from one process, or why there is no layout."""
    found, meshes = {}, {}
    for one, other in itertools.combinations(FEATURES, 2):
        try:
            layout = Layout.parse(paired(one, other))
            check_layout(SHALLOW, layout, 4, 8, 16, MOE if layout.ep > 1 else None)
            alike = dataclasses.replace(layout, zero_stage=0, gather_once=False)
            meshes.setdefault(alike, {})[one, other] = str(layout)
        except ValueError as error:
            found[one, other] = str(error)
    for alike, texts in meshes.items():
        moe = MOE if alike.ep > 1 else None
        by_layout = zip(*ranks(trained_on_one_mesh, list(texts.values()), moe), strict=True)
        for (pair, text), of_ranks in zip(texts.items(), by_layout, strict=True):
            found[pair] = max(differences(of_ranks, text, moe, 1, SHALLOW))
    return found
