"""Check of exercise 08.15: which nodes are kept, and how many nodes the best experts of a token are on."""

from __future__ import annotations

import torch

from course_lib.expert_parallel import router

EXAMPLE = [[9.0, 0, 0, 0, 5, 5, 1, 0, 6, 2, 0, 0]]  # three nodes of four
CASES = (1, 2, [1]), (1, 1, [0]), (2, 2, [0, 2]), (2, 3, [0, 1]), (2, 4, [0, 1]), (3, 2, [0, 1, 2])  # M, k, nodes


def check() -> None:
    """Judge within_nodes."""
    example = torch.tensor(EXAMPLE)
    for limit, k, wanted in CASES:
        result = router.within_nodes(example, 3, limit, k)
        finite = result.isfinite().unflatten(-1, (3, -1))
        where = f"M = {limit}, k = {k}"
        assert torch.equal(finite.all(-1), finite.any(-1)), (
            f"{where}: keeps experts {result.isfinite().nonzero()[:, 1].tolist()}: keep all experts of a node, or none"
        )
        saved = finite.all(-1).nonzero()[:, 1].tolist()
        assert saved == wanted, f"{where}: keeps nodes {saved}, not {wanted}"
        assert torch.equal(result[result.isfinite()], example[result.isfinite()]), (
            f"{where}: kept experts' values change"
        )
    many = torch.randn(3, 50, 32, generator=torch.Generator().manual_seed(4))
    for limit in (1, 2, 3):
        best = router.within_nodes(many, 4, limit, 4).topk(4, dim=-1)
        reached = torch.nn.functional.one_hot(best.indices // 8, 4).any(-2).sum(-1)
        assert reached.max() == limit and best.values.isfinite().all(), f"M = {limit}: a token reaches {reached.max()}"
