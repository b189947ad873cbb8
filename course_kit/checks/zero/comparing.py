"""References for several checks of notebook 05: one process, and cases in groups of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from course_kit.labs.zero import TINY, batch_of, in_group
from course_kit.typed import override
from course_lib.single_gpu.model import ModelConfig, Transformer, loss

ONE_LAYER = dataclasses.replace(TINY, layers=1)
Tensors = dict[str, torch.Tensor]  # by the parameter's name


@functools.cache
def one_process(
    world: int,
    steps: int = 2,
    max_norm: float = 0.4,
    config: ModelConfig = TINY,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.SGD,
    **settings,
) -> tuple[Tensors, list[float]]:
    """Return the weights by name, and the norms of the gradient, of one process that has the batches of all ranks.

    settings: the optimizer's; by default lr 0.5 and momentum 0.9.
    """
    model, norms = Transformer(config), []
    optimizer = optimizer_cls(model.parameters(), **(settings or {"lr": 0.5, "momentum": 0.9}))
    inputs, targets = torch.cat([batch_of(rank, config) for rank in range(world)], dim=1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def each_case(cases: list[tuple]) -> list:
    """Return, on a rank, the result of in_group for each case (n, function, *args)."""
    return [in_group(*case) for case in cases]


def results_of(*calls: list[tuple]) -> Iterator[tuple]:
    """Yield the n ranks' results of each case (n, function, *args), with one call of the ranks for each list of cases.

    The calls are lazy: an error in the first call saves the time of the later ones.
    """
    from course_kit.ranks import shared

    for cases in calls:
        result = zip(*shared(4)(each_case, cases), strict=True)
        yield from (of_ranks[:n] for (n, *_), of_ranks in zip(cases, result, strict=True))


@contextlib.contextmanager
def noted_waits() -> Iterator[list[dist.Work]]:
    """Yield the works that are waited for inside, on a rank."""
    waits, wait = [], dist.Work.wait

    def noted(work: dist.Work, *rest) -> bool:
        waits.append(work)
        return wait(work, *rest)

    override(dist.Work, wait=noted)
    try:
        yield waits
    finally:
        override(dist.Work, wait=wait)
