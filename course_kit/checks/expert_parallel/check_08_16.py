"""Check of exercise 08.16: trainings on four ranks, in four layouts, against one process."""

from __future__ import annotations

import numpy as np
import torch

from course_kit.labs.expert_parallel.models import LAYOUTS, Layout, RankResult, one_process, parallel_trial
from course_kit.labs.tensor_parallel.models import relative_error
from course_kit.ranks import shared

WAYS = {
    "none": {"all_to_all"},
    "matrices": {"all_to_all", "all_reduce", "all_gather"},
    "sequence": {"all_to_all", "all_gather", "reduce_scatter"},
}


def check() -> None:
    """Judge apply_expert_parallel in each layout."""
    ranks = shared(4)
    with ranks.within(30):
        for layout in LAYOUTS:
            for rank, result in enumerate(ranks(parallel_trial, *layout)):
                judge(rank, layout, result)


def judge(rank: int, layout: Layout, result: RankResult) -> None:
    """Judge one rank's training in one layout."""
    expected = one_process(layout.routing, layout.rate, layout.steps)
    copies, nodes, inside, tp = layout.sizes
    where = f"dp {copies * nodes * inside}, ep {nodes * inside}, tp {tp} ({layout.tp}), rank {rank}"
    assert set(result.ways) <= WAYS[layout.tp], (
        f"{where}: forward sends by {', '.join(result.ways)}: tokens should be exchanged, and nothing else"
    )
    hops = 2 if nodes > 1 else 1
    assert result.hops == hops, f"{where}: tokens make {result.hops} hops among {nodes} nodes, not {hops}"
    names = sorted(expected.gradients, key=lambda name: (".mlp." not in name, name.startswith("blocks.0"), name))
    for name in names:  # a fault in a mixture spoils the layers before it
        mine, right = result.gradients[name], expected.gradients[name]
        assert mine.shape == right.shape, f"{where}: {name}'s shards make {list(mine.shape)}, not {list(right.shape)}"
        error, factor = relative_error(mine, right), (mine.norm() / right.norm()).item()
        hint = "batch_group, reduce_group, gates through input_gather?" if "router" in name else "cuts, groups, hops?"
        assert error < 2e-5, (
            f"{where}: the gradient of {name} is off by {error:.1%}, its norm is {factor:.2f} times one process's: "
            f"{hint}"
        )
    assert np.allclose(result.losses, expected.losses, rtol=1e-5), (
        f"{where}: losses {result.losses}, one process has {expected.losses}"
    )
    norm = torch.stack([g.norm() for g in expected.gradients.values()]).norm().item()
    assert abs(result.norm / norm - 1) < 1e-4, f"{where}: the norm is {result.norm:.4f}, not {norm:.4f}: norm_groups?"
    assert not result.drifted, f"{where}: {result.drifted[0]} differs from the ranks that should have the same"
    for name, right in expected.weights.items():
        assert relative_error(result.weights[name], right) < 1e-4, (
            f"{where}: {name} after step {layout.steps} is not one process's"
        )
