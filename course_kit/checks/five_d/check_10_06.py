"""Check of exercise 10.6: losses, gradients, norms and traffic of `ParallelModel.gradients` against one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from course_kit.labs.five_d.models import MOE, SHALLOW, TINY, built, local_batch, one_process, relative_difference
from course_kit.ranks import shared
from course_lib.collectives.traffic import count_traffic
from course_lib.expert_parallel.router import routers_of
from course_lib.five_d.layouts import Layout
from course_lib.pipeline.norm import clip_grad_norm_
from course_lib.single_gpu.model import ModelConfig
from course_lib.single_gpu.placement import placement_of

ONE_LAYER = dataclasses.replace(TINY, layers=1)
CASES = (
    ("pp2,cp2,zero1,mb4", None, SHALLOW, 16),
    ("dp2,tp2,sp,mb2", MOE, ONE_LAYER, 16),
    ("dp2,cp2,contiguous,mb2", None, ONE_LAYER, 64),  # more target tokens than 16 bits count: 507
    ("dp2,tp2,zero2,mb2", None, ONE_LAYER, 16),
)


class RankResult(NamedTuple):
    """A rank's report on its gradients."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]  # of parameters that are not split
    m: int  # micro-batches
    sums: list[int]  # of gradients over the replicas, in a step of one micro-batch and in this one
    weights: list[float]  # of the routers' balance losses, times the micro-batches: with one, with m, with one again
    raised: bool  # for a sequence too few
    early: bool  # for a token too few, before anything is sent
    narrow: tuple[float, torch.dtype]  # the loss of the model in bfloat16, where the sequence is long


def refused(call: Callable[[], object]) -> bool:
    """Return True if a call raises ValueError before it sends anything."""
    with count_traffic() as traffic:
        try:
            call()
        except ValueError:
            return not traffic.records
    return False


def gradients_trial(text: str, moe: dict | None, config: ModelConfig, seq: int) -> RankResult:
    """On a rank: calls of gradients, the first with one micro-batch alone, and two that cannot be cut."""
    layout, mesh, parallel = built(text, config, moe)
    replicas, sums = tuple(dist.get_process_group_ranks(mesh.replicas)), []
    local = local_batch(layout, mesh, 8, seq)
    routers, weights = routers_of(parallel.stages), []
    for sequences in (layout.micro_batch, len(local[0])):
        parallel.optimizer.zero_grad()
        with count_traffic() as traffic:
            loss = parallel.gradients(*(each[:sequences] for each in local))
        assert not cast(Any, parallel.sharding).reducer.unfinished, (
            "gradients are still in flight: finish() sends the rest"
        )
        weights += [router.loss_weight * sequences / layout.micro_batch for router in routers]
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
    raised = refused(lambda: parallel.gradients(*(each[:-1] for each in local)))
    cut = layout.cp > 1 or layout.sequence_parallel
    early = not cut or refused(lambda: parallel.gradients(*(each[:, :-1] for each in local)))
    if routers:
        parallel.gradients(*(each[: layout.micro_batch] for each in local))
        weights += [router.loss_weight for router in routers]
    narrow = loss if seq <= 16 else built(text, config, moe, dtype=torch.bfloat16)[2].gradients(*local)
    return RankResult(loss.item(), norm, full, m, sums, weights, raised, early, (narrow.item(), narrow.dtype))


def check() -> None:
    """Assert four layouts on four ranks."""
    for text, moe, config, seq in CASES:
        layout = Layout.parse(text)
        numbers, wanted, _ = one_process(layout, bool(moe), 1, config, seq)
        with shared(4).within(40):
            of_ranks = shared(4)(gradients_trial, text, moe, config, seq)
        for rank, (loss, norm, result, m, sums, weights, raised, early, narrow) in enumerate(of_ranks):
            at, hint = f"{text}, rank {rank}", "; of the micro-batches' balance losses it has the mean" if moe else ""
            hint = hint or f": are tokens and positions in the layout's order, {layout.order}?" * (layout.cp > 1)
            assert abs(loss - numbers[0][0]) < 1e-5 * numbers[0][0], f"{at}: loss {loss}, not {numbers[0][0]}{hint}"
            assert m == 8 // layout.dp // layout.micro_batch, f"{at}: {m} micro-batches; the schedule is for others"
            assert layout.zero_stage == 2 or sums[0] == sums[1], (
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
            assert all(abs(weight - 1) < 1e-6 for weight in weights), (
                f"{at}: the routers' balance losses should count 1/m each in every call, whatever m was before; times "
                f"m, they count {weights}"
            )
            assert raised, (
                f"{at}: a sequence less is no multiple of the micro-batch, and should raise ValueError before anything "
                "is sent"
            )
            assert early, (
                f"{at}: {seq - 1} tokens cannot be cut: check_sizes should raise ValueError on all ranks, before "
                "anything is sent"
            )
            assert narrow[1] == torch.float32 and abs(narrow[0] / numbers[0][0] - 1) < 0.02, (
                f"{at}: in bfloat16 the loss is {narrow[0]} as {narrow[1]}, and in float32 {numbers[0][0]}; tokens are "
                "counted, and losses summed, in float32"
            )
