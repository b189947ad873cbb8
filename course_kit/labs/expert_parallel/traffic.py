"""Traffic between ranks that divide the experts: counts for random choices, bytes of dispatch and combine, times."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_kit.labs.expert_parallel.experts import some_experts
from course_kit.labs.expert_parallel.routers import text
from course_kit.labs.tensor_parallel.models import relative_error
from course_kit.typed import grad_of, world
from course_lib.collectives.traffic import count_traffic
from course_lib.expert_parallel import exchange, mixture, router
from course_lib.expert_parallel import experts as library
from course_lib.expert_parallel.experts import Experts
from course_lib.sequence_parallel.model import gather_sequence, reduce_scatter_sequence
from course_lib.single_gpu.data import TokenBatches
from course_lib.single_gpu.model import PRESETS, Transformer
from course_lib.tensor_parallel.by_hand import cut


def top_k_mask(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return True where an expert is among the k best of a token: [t, E]."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.topk(k).indices, True)


def rows_sent(logits: torch.Tensor, n: int = 4, k: int = 2) -> torch.Tensor:
    """Rows from each rank to each, [n, n], of a routing [t, E] whose tokens are dealt out in order."""
    goes = top_k_mask(logits, k).unflatten(1, (n, -1)).any(2)
    return torch.stack([part.sum(0) for part in goes.chunk(n)])


def even_copies(experts: int, k: int, n: int) -> float:
    """Return the mean number of other ranks that a token goes to, if its k choices are even and random."""
    return (n - 1) * (1 - math.comb(experts - experts // n, k) / math.comb(experts, k))


def fresh_routing() -> torch.Tensor:
    """Return the logits [t, E] of a new model's second router, for 2,048 tokens of the corpus."""
    model = mixture.apply_moe(Transformer(PRESETS["debug"]), 8, 2, ffn_hidden=88).eval()
    logits: list[torch.Tensor] = []
    second = router.routers_of(model)[1]
    second.register_forward_hook(lambda r, inputs, out: logits.append(F.linear(inputs[0], r.weight)))
    with torch.no_grad():
        model(next(TokenBatches(text(), batch=16, seq=128))[0])
    return logits[0].flatten(0, 1)


def random_routing(experts: int, hidden: int, tokens: int, k: int, limit: int | None = None) -> tuple:
    """On a rank: x [t, h] and gates [t, E] of even random choices, among the `limit` best of four nodes at most."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    logits, x = (torch.randn(tokens, size, generator=generator) for size in (experts, hidden))
    ranking = router.within_nodes(logits, 4, limit, k) if limit else logits
    return x, router.top_k_gates(logits.softmax(-1), ranking, k)


def gathered(
    x: torch.Tensor, gates: torch.Tensor, choices: int, group: dist.ProcessGroup, compute: Callable
) -> torch.Tensor:
    """Return the result of `dispatch_and_combine`, by an all-gather of all tokens and a reduce-scatter of all sums."""
    rows, all_gates = (gather_sequence(each[None], group)[0] for each in (x, gates))
    local_gates = cut(all_gates, group, 1)
    out = compute(rows, local_gates, int((local_gates != 0).sum()))
    return reduce_scatter_sequence(out[None], group)[0]


def compare_dispatch(
    hidden: int = 256, ffn: int = 176, tokens: int = 512, repeats: int = 9
) -> tuple[dict[str, np.ndarray], dict[str, int], float]:
    """On a rank: milliseconds of each repeat and bytes sent, by way, and how far the results are apart."""
    torch.set_num_threads(1)
    group, results, bytes_sent = world(), {}, {}
    times: list[list[float]] = []
    experts = some_experts(8 // group.size(), hidden, ffn, library.grouped_experts)
    x, gates = random_routing(8, hidden, tokens, 2)
    ways: dict[str, Callable[..., torch.Tensor]] = {
        "all-to-all": exchange.dispatch_and_combine,
        "all-gather": gathered,
        "all-to-all again": exchange.dispatch_and_combine,
    }
    for _ in range(repeats + 1):
        times.append([])
        for name, way in ways.items():
            rows, leaf_gates = (each.clone().requires_grad_() for each in (x, gates))
            dist.barrier()
            start = time.perf_counter()
            with count_traffic() as traffic:
                out = way(rows, leaf_gates, 2 * tokens, group, experts)
                out.square().mean().backward()
            dist.barrier()
            times[-1].append(1e3 * (time.perf_counter() - start))
            results[name], bytes_sent[name] = (out.detach(), grad_of(rows), grad_of(leaf_gates)), traffic.bytes
    mask = (gates != 0).float()
    worst = max(
        relative_error(a * mask, b * mask) if a.shape == mask.shape else relative_error(a, b)
        for a, b in zip(results["all-to-all"], results["all-gather"], strict=True)
    )
    return dict(zip(results, np.array(times[1:]).T, strict=True)), bytes_sent, worst


class AlreadyDone:
    """A placeholder for a transfer that has been waited for."""

    def wait(self) -> bool:
        return True


def timeline(
    group: dist.ProcessGroup, skew: float, tokens: int = 2048, hidden: int = 256, ffn: int = 704, repeats: int = 3
) -> list[tuple[float, float, list[tuple[float, float]]]]:
    """On a rank of two: the end, the begin of backward and the exchanges (start, end) of each repeat, in ms.

    skew: how much more tokens want rank 0's experts.
    """
    torch.set_num_threads(1)
    all_to_all = dist.all_to_all_single
    generator = torch.Generator().manual_seed(dist.get_rank())
    experts = some_experts(2, hidden, ffn, library.grouped_experts)
    logits, x = (torch.randn(tokens, size, generator=generator) for size in (4, hidden))
    logits[:, :2] += skew
    gates = router.top_k_gates(logits.softmax(-1), logits, 2)

    def once() -> tuple[float, float, list[tuple[float, float]]]:
        spans: list[tuple[float, float]] = []
        rows = x.clone().requires_grad_()
        dist.barrier(group)
        zero = time.perf_counter()

        def now() -> float:
            return 1e3 * (time.perf_counter() - zero)

        def noted(*args, async_op=False, **kwargs):
            start, work = now(), all_to_all(*args, async_op=True, **kwargs)
            work.wait()
            spans.append((start, now()))
            return AlreadyDone() if async_op else None

        with mock.patch.object(dist, "all_to_all_single", noted):
            out = exchange.dispatch_and_combine(rows, gates, 2 * tokens, group, experts)
            middle = now()
            out.square().mean().backward()
        return now(), middle, spans

    return [once() for _ in range(repeats)]


def bytes_for(limit: int, hidden: int = 256, tokens: int = 256) -> float:
    """On a rank: bytes that it sends in a forward, per token, with 32 experts on 4 nodes of one rank, and 8 choices."""
    x, gates = random_routing(32, hidden, tokens, 8, limit if limit < 4 else None)
    with count_traffic() as traffic, torch.no_grad():
        exchange.dispatch_and_combine(x, gates, 8 * tokens, world(), lambda rows, gates, choices: rows)
    return traffic.bytes / tokens


def crossings(limit: int, nodes: int = 8, experts: int = 256, k: int = 8, tokens: int = 20_000) -> list[float]:
    """Return the mean crossings of a token to other nodes: with a copy per node, and with a copy per choice."""
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(5))
    ranking = router.within_nodes(logits, nodes, limit, k) if limit < nodes else logits
    wanted = top_k_mask(ranking, k).unflatten(1, (nodes, -1))[:, 1:]  # tokens of node 0
    return [(wanted.any(2).sum() / tokens).item(), (wanted.sum() / tokens).item()]


def hops_trial(hidden: int = 256, tokens: int = 256, experts: int = 32, k: int = 8) -> tuple[int, int, float]:
    """On one of 2 nodes x 2 ranks: bytes that cross between the nodes by one hop and by two; how far results differ."""
    rank, all_ranks = dist.get_rank(), world()
    nodes = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]  # ranks of the same number in each node
    inside = dist.new_subgroups(group_size=2)[0]
    module = some_experts(experts, hidden, 24)
    local = Experts(experts // 4, hidden, 24, library.grouped_experts)
    for mine, full in zip(local.parameters(), module.parameters(), strict=True):
        mine.data = cut(full.detach(), all_ranks, 0).clone()
    x, gates = random_routing(experts, hidden, tokens, k)
    second_hop = functools.partial(exchange.dispatch_and_combine, group=inside, compute=local)
    with torch.no_grad():
        one = exchange.dispatch_and_combine(x, gates, k * tokens, all_ranks, local)
        with count_traffic() as traffic:
            two = exchange.dispatch_and_combine(x, gates, k * tokens, nodes, second_hop)
    goes = (gates.unflatten(1, (4, -1)) != 0).any(2).sum(0)
    across = [to for to in range(4) if to // 2 != rank // 2]
    flat = goes[across].sum().item() * 4 * (2 * hidden + experts // 4)  # there and back, and the gates
    hops = traffic.select(group=tuple(dist.get_process_group_ranks(nodes))).bytes
    return flat, hops, relative_error(two, one)
