"""Check of exercise 10.6: losses, gradients, norms and traffic of `ParallelModel.gradients` against one process."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from course_kit.labs.five_d.models import MOE, SHALLOW, TINY, built, local_batch, one_process, relative_difference
from course_kit.ranks import shared
from course_lib.collectives.traffic import count_traffic
from course_lib.five_d.layouts import Layout
from course_lib.pipeline.norm import clip_grad_norm_
from course_lib.single_gpu.model import ModelConfig
from course_lib.single_gpu.placement import placement_of

ONE_LAYER = dataclasses.replace(TINY, layers=1)
CASES = (
    ("pp2,cp2,zero1,mb4", None, SHALLOW),
    ("dp2,tp2,sp,mb2", MOE, ONE_LAYER),
    ("dp2,cp2,contiguous,mb2", None, ONE_LAYER),
)


class RankResult(NamedTuple):
    """A rank's report on its gradients."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]  # of parameters that are not split
    m: int  # micro-batches
    sums: list[int]  # of gradients over the replicas, in a step of one micro-batch and in this one
    raised: bool  # for a sequence too few


def gradients_trial(text: str, moe: dict | None, config: ModelConfig) -> RankResult:
    """On a rank: two calls of gradients, the first with one micro-batch alone, and a third that cannot be cut."""
    layout, mesh, parallel = built(text, config, moe)
    replicas, sums = tuple(dist.get_process_group_ranks(mesh.replicas)), []
    local = local_batch(layout, mesh)
    for sequences in (layout.micro_batch, len(local[0])):
        parallel.optimizer.zero_grad()
        with count_traffic() as traffic:
            loss = parallel.gradients(*(each[:sequences] for each in local))
        assert not cast(Any, parallel.sharding).reducer.unfinished, (
            "gradients are still in flight: finish() sends the rest"
        )
        large = [r.collective for r in traffic.records if r.group == replicas and r.bytes > 64]  # no counts of tokens
        sums.append(large.count("all_reduce") + large.count("reduce_scatter"))
    m, zero = parallel.runner.m, parallel.optimizer if layout.zero_stage else None
    named = [item for stage in parallel.stages.values() for item in stage.named_parameters()]
    full = {
        name: weight.grad.clone()
        for name, weight in named
        if weight.grad is not None and not placement_of(weight).tensor_shard
    }
    norm = clip_grad_norm_(parallel.runner, 1e9, cast(Any, zero)).item()
    try:
        parallel.gradients(*(each[:-1] for each in local))
        raised = False
    except ValueError:
        raised = True
    return RankResult(loss.item(), norm, full, m, sums, raised)


def check() -> None:
    """Assert three layouts on four ranks."""
    for text, moe, config in CASES:
        layout = Layout.parse(text)
        numbers, wanted, _ = one_process(layout, bool(moe), 1, config)
        with shared(4).within(40):
            of_ranks = shared(4)(gradients_trial, text, moe, config)
        for rank, (loss, norm, result, m, sums, raised) in enumerate(of_ranks):
            at, hint = f"{text}, rank {rank}", "; of the micro-batches' balance losses it has the mean" if moe else ""
            hint = hint or f": are tokens and positions in the layout's order, {layout.order}?" * (layout.cp > 1)
            assert abs(loss - numbers[0][0]) < 1e-5 * numbers[0][0], f"{at}: loss {loss}, not {numbers[0][0]}{hint}"
            assert m == 8 // layout.dp // layout.micro_batch, f"{at}: {m} micro-batches; the schedule is for others"
            assert sums[0] == sums[1], (
                f"{at}: {sums[1]} sums of gradients over the replicas in a step of {m} micro-batches, {sums[0]} in one "
                "of a single one; they go once per step"
            )
            for local_name, gradient in result.items():
                name = "embedding.weight" if local_name == "head.weight" else local_name
                off = relative_difference(gradient, wanted[name])
                assert off < 1e-5, f"{at}: the gradient of {name} is {off:.1e} away from one process's{hint}"
            assert abs(norm - numbers[0][1]) < 1e-5 * numbers[0][1], (
                f"{at}: the loss is right, and the norm of all gradients is {norm}, not {numbers[0][1]}"
            )
            assert raised, f"{at}: a sequence less is no multiple of the micro-batch, and should raise ValueError"
