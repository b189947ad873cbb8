"""The best predicted layout of each model at each size, as rows of a sweep: for a heatmap of predictions."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.planner import Ranking, search
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import ModelConfig


def with_degrees(ranking: Ranking, degrees: dict[str, tuple[int, ...]]) -> Ranking:
    """Return the ranking without layouts of other degrees, such as {"cp": (1,)}; `search` tries all degrees."""
    allowed = np.ones(len(ranking.table), bool)
    for name, values in degrees.items():
        allowed &= np.isin(getattr(ranking.table, name), values)
    order, risky = (rows[allowed[rows]] for rows in (ranking.order, ranking.risky))
    return dataclasses.replace(ranking, order=order, risky=risky)


def best_row(name: str, ranking: Ranking, nodes: int, batch: int, seq: int) -> dict:
    """Return the best layout of a search as a row of a sweep; without numbers if none fits."""
    best = ranking.best(1)
    layout, tokens_per_s, mfu, _ = best[0] if best else (Layout(), math.nan, math.nan, math.nan)
    return {
        "model": name,
        "nodes": nodes,
        **dataclasses.asdict(layout),
        "global_batch_seqs": batch,
        "seq": seq,
        "ok": bool(best),
        "tokens_per_s_per_gpu": tokens_per_s,
        "mfu_pct": 100 * mfu,
    }


def best_layouts(
    models: dict[str, ModelConfig],
    nodes: tuple[int, ...],
    cluster: Cluster,
    batch: int,
    seq: int = 4096,
    settings: dict[str, tuple] | None = None,
    degrees: dict[str, tuple[int, ...]] | None = None,
) -> list[dict]:
    """Return the best predicted layout of each model on each number of nodes, as rows of a sweep. settings: as for
    `search`, which takes up to a second per cell if it tries all. degrees: the allowed degrees, such as {"cp": (1,)};
    None: all.

    Raises ValueError if nothing fits anywhere, and the errors of `search`.
    """
    rows = []
    for name, config in models.items():
        for n in nodes:
            ranking = search(config, cluster, n * cluster.gpus_per_node, batch, seq, settings=settings)
            rows.append(best_row(name, with_degrees(ranking, degrees or {}), n, batch, seq))
    if not any(row["ok"] for row in rows):
        raise ValueError(f"batch {batch}, sequences of {seq}: no layout of {', '.join(models)} fits on {cluster.name}")
    return rows
