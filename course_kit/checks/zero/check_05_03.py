"""Check of exercise 05.3: two steps of stage 1 by hand against one process, with their traffic and states."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_kit.checks.tensor_parallel.memory import AtOnce
from course_kit.checks.watchers import SizesFit
from course_kit.checks.zero.comparing import Tensors, one_process
from course_kit.labs.zero import TINY, batch_of, farthest, in_group
from course_kit.typed import grad_of
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.single_gpu.model import Transformer, loss
from course_lib.zero import by_hand
from course_lib.zero.shards import FlatLayout


class Momentum:
    """SGD with momentum over a tensor; notes how much state it keeps, and how often it is called."""

    def __init__(self):
        self.velocity, self.calls = torch.zeros(0), 0

    @torch.no_grad()
    def __call__(self, values: torch.Tensor, gradient: torch.Tensor, lr: float = 0.5) -> None:
        """Update `values` in place."""
        self.velocity = 0.9 * self.velocity + gradient if self.calls else gradient.clone()
        self.calls += 1
        values -= lr * self.velocity


def stage_1_trial(group: dist.ProcessGroup, steps: int = 2) -> tuple[Tensors, Traffic, int, int, int]:
    """Return this rank's weights by name, the last step's traffic, and the elements of the optimizer's state, its calls
    and the elements of a shard.
    """
    model, update = Transformer(TINY), Momentum()
    parameters = list(model.parameters())
    layout = FlatLayout([*parameters], group)
    values, gradient = torch.zeros(layout.padded), torch.zeros(layout.padded)
    for parameter, view in zip(parameters, layout.views(values), strict=True):
        parameter.data = view.copy_(parameter.detach())
    inputs, targets = batch_of(dist.get_rank(group), TINY)
    for _ in range(steps):
        model.zero_grad()
        loss(model(inputs), targets).backward()
        for parameter, view in zip(parameters, layout.views(gradient), strict=True):
            view.copy_(grad_of(parameter))
        with SizesFit(), count_traffic() as traffic:
            by_hand.zero_1_step(layout, values, gradient, update)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, traffic, update.velocity.numel(), update.calls, layout.shard_numel


def bf16_trial(group: dist.ProcessGroup) -> tuple[bool, Traffic, torch.dtype, int]:
    """Step once in BF16. Return whether the values are right, the traffic, the dtype of the gradient that the optimizer
    gets, and how many tensors of the buffers' size are made at once.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    layout = FlatLayout([torch.zeros(30, 7, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)], group)
    values = torch.ones(layout.padded, dtype=torch.bfloat16)
    gradient = torch.full_like(values, 2.0 * n * (rank + 1))
    dtypes = []

    def update(shard: torch.Tensor, mean: torch.Tensor) -> None:
        dtypes.append(mean.dtype)
        shard -= mean

    with SizesFit(), count_traffic() as traffic, AtOnce(values.nbytes) as large:
        by_hand.zero_1_step(layout, values, gradient, update)
    return bool((values == 1 - n * (n + 1)).all()), traffic, dtypes[0], large.most


def check() -> None:
    """Assert weights after two steps on 3 ranks, one call of the optimizer in each, its state and two collectives."""
    from course_kit.ranks import shared

    ranks = shared(4)
    with ranks.within(20):
        for n in (2, 4):
            for rank, (right, traffic, dtype, large) in enumerate(ranks(in_group, n, bf16_trial)[:n]):
                where = f"{n} ranks, rank {rank}, values and gradients in BF16"
                assert right, f"{where}: not the values less the mean gradient, on each of {n} ranks"
                assert dtype in (torch.bfloat16, torch.float32), f"{where}: the optimizer gets a gradient in {dtype}"
                enough = 2 * 2 * -(-213 // n) * (n - 1)
                assert traffic.bytes == enough, (
                    f"{where}: {traffic.bytes} bytes sent, {enough} are enough: send in the dtype of the buffers"
                )
                assert n == 2 or not large, (  # on 2 ranks a shard in float32 is as large
                    f"{where}: {large} more tensors as large as `values`: a step needs room for shards only; "
                    "send from `gradient`, and gather into `values`"
                )
        expected, _ = one_process(3, max_norm=1e9)
        for rank, (weights, traffic, states, calls, shard) in enumerate(ranks(in_group, 3, stage_1_trial)[:3]):
            where = f"3 ranks, rank {rank}"
            assert calls == 2, f"{where}: update() has been called {calls} times in 2 steps"
            assert states == shard, f"{where}: the optimizer keeps {states:,} elements; this rank's shard has {shard:,}"
            bytes_sent = [record.collective for record in traffic.records]
            assert sorted(bytes_sent) == ["all_gather", "reduce_scatter"], (
                f"{where}: a step sends by {', '.join(bytes_sent) or 'nothing'}; it needs "
                "a reduce-scatter and an all-gather"
            )
            name, error = farthest(weights, expected)
            assert error < 1e-4, (
                f"{where}: after 2 steps {name} is not one process's: the mean over the ranks of layout.group? this "
                "rank's shard updated, in place, before it is gathered?"
            )
