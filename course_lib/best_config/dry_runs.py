"""A dry run: memory and traffic of one rank of thousands, from the program that would run there.

    found = dry_run(PRESETS["llama3-405B"], Layout.parse("dp128,pp16,tp8,sp,zero1"), batch=2048, seq=8192)
    print(found)                                     # by category: at rest, at the peak; by axis: what is sent a step

The tensors are fake: they have a shape, a dtype and a storage of some size, but no memory behind it and no numbers. The
other ranks are fake too (fake_ranks). All else is real: the layout's verbs, its schedule, the backward, the clipping
and the optimizer's step, so nothing has to be known of them that a formula could get wrong. A mixture's tokens can't
choose experts without numbers: each expert gets its even share.

It is the CPU's program, the one that can be held against real ranks anywhere. A GPU runs the same program with other
kernels: attention may keep its numbers in another form, and the optimizer may work on all parameters at once. Nothing
says how an allocator cuts its memory up (`defragmentation`), nor what NCCL and the CUDA context take.
"""

from __future__ import annotations

import functools
import gc
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from course_lib.best_config.expert_time import ranks_per_token
from course_lib.best_config.fake_ranks import axes_of, fake_ranks, place_of
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.expert_parallel import exchange
from course_lib.five_d.layouts import Layout, check_layout, coordinates, schedule_of
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import ParallelModel, parallelize
from course_lib.pipeline.schedules import num_stages
from course_lib.single_gpu.model import ModelConfig
from course_lib.single_gpu.profile import CATEGORIES, MemoryProfile


class DryRun(NamedTuple):
    """What a step of one rank takes, in bytes."""

    layout: Layout
    rank: int
    at_rest: dict[str, int]  # by category: after a step
    peak: dict[str, int]  # by category: when their sum is largest
    bytes_sent: dict[tuple[str, str], int]  # a step, by axes of the layout and collective

    @property
    def peak_bytes(self) -> int:
        """All categories at the peak."""
        return sum(self.peak.values())

    def __str__(self) -> str:
        """Two tables, in GiB."""
        lines = [f"rank {self.rank:,} of {self.layout.ranks:,}, {self.layout}"]
        lines.append(f"{'GiB':<28}{'at rest':>12}{'at peak':>12}")
        both = [(name, self.at_rest[name], self.peak[name]) for name in CATEGORIES]
        for name, *sizes in [*both, ("together", sum(self.at_rest.values()), self.peak_bytes)]:
            lines.append(f"{name:<28}" + "".join(f"{size / 2**30:>12.3f}" for size in sizes))
        lines.append("GiB sent in a step")
        for (axes, collective), sent in self.bytes_sent.items():
            lines.append(f"{axes:<16}{collective:<24}{sent / 2**30:>12.3f}")
        return "\n".join(lines)


def axes_between(ranks: tuple[int, ...], layout: Layout) -> str:
    """The axes in which these ranks differ, outermost first: "pp", or "dp x cp"; copies and ep together are dp.

    With replicas of ZeRO-3, dp is dp_replicate, dp_shard, or both of them.
    """
    places = zip(axes_of(layout), zip(*(place_of(rank, layout) for rank in ranks), strict=True), strict=True)
    differing = [axis for axis, along in places if len(set(along)) > 1]
    if "copies" in differing and (layout.ep == 1 or "ep" in differing):
        size, dp = layout.dp // layout.replicate, {coordinates(rank, layout)["dp"] for rank in ranks}
        groups, inside = {place // size for place in dp}, {place % size for place in dp}
        part = "_replicate" if len(inside) == 1 else "_shard" if len(groups) == 1 else ""
        part = part if layout.replicate > 1 else ""
        differing = [f"dp{part}", *(axis for axis in differing if axis not in ("copies", "ep"))]
    return " x ".join(differing)


def by_axes(traffic: Traffic, layout: Layout) -> dict[tuple[str, str], int]:
    """Bytes sent by axes and collective, sorted; without what goes nowhere."""
    sent, axes = {}, {ranks: axes_between(ranks, layout) for ranks in {record.group for record in traffic.records}}
    for record in traffic.records:
        if record.bytes:
            key = axes[record.group], record.collective
            sent[key] = sent.get(key, 0) + record.bytes
    return dict(sorted(sent.items()))


def claim_buffers(profile: MemoryProfile, parallel: ParallelModel) -> None:
    """Tell the profile whose the tensors are that neither the module's parameters nor the optimizer's state name."""
    for category, tensors in parallel.sharding.extra_memory().items():
        if category != "parameters":  # measured_step names these
            profile.claim(tensors, category)


def measured_step(parallel: ParallelModel, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[dict, dict, dict]:
    """Take a step, and return DryRun's at_rest, peak and bytes_sent of it; on real ranks too.

    inputs, targets: each [b / dp, s]. Weights that are gathered for a while, and copies in another dtype, count as
    parameters, their gradients as gradients. Collective.
    """
    layout, before_step = parallel.layout, parallel.runner.before_step
    gathered = nn.ParameterList(parallel.sharding.extra_memory().get("parameters", ()))

    def prepared() -> None:
        if before_step is not None:
            before_step()
        profile.claim(list(parallel.stages.parameters()), "parameters")

    with (
        MemoryProfile(nn.ModuleList([parallel.stages, gathered]), parallel.inner_optimizer) as profile,
        count_traffic() as traffic,
        mock.patch.object(parallel.runner, "before_step", prepared),
    ):
        claim_buffers(profile, parallel)
        parallel.step(inputs, targets)
        profile.claim([parameter.grad for parameter in parallel.stages.parameters()], "gradients")
        profile.mark("at rest")
    return profile.peak("at rest"), profile.peak(), by_axes(traffic, layout)


def settle_shapes(parallel: ParallelModel, sequences: int, seq: int) -> torch.Tensor:
    """Get ready for a step of sequences [b / dp, s], and return tokens for it. What enters each stage is said here,
    since ranks that are not there can't tell each other: [mb, tokens of this rank, h], in the dtype of the weights.
    """
    layout, runner = parallel.layout, parallel.runner
    runner.use(schedule_of(layout, sequences // layout.micro_batch))
    tokens = seq // layout.cp // (layout.tp if layout.sequence_parallel else 1)
    shape = torch.Size((layout.micro_batch, tokens, parallel.config.hidden))
    entering = [None] + [(shape, parallel.dtype)] * (num_stages(runner.schedule) - 1)
    runner.shapes[torch.Size((sequences, seq // layout.cp)), torch.float32] = entering
    return torch.zeros(sequences, seq, dtype=torch.int64)


def even_sizes(rows: torch.Tensor, choices: torch.Tensor, group, tokens: int, moe: dict) -> tuple:
    """In the place of exchange.read_sizes, where tokens have no numbers to choose by: every expert is as likely, and
    every rank gets the mean. tokens: of a rank, in one call.
    """
    n, sent = group.size(), torch.stack([rows, choices], 1)
    dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
    each = round(tokens * float(ranks_per_token(moe, n)) / n)
    return [each] * n, [each] * n, tokens * moe["top_k"]


def even_experts(layout: Layout, seq: int, moe: dict | None):
    """While it lasts, experts get their even shares."""
    tokens = layout.micro_batch * seq // layout.cp
    return mock.patch.object(exchange, "read_sizes", functools.partial(even_sizes, tokens=tokens, moe=moe))


def dry_run(
    config: ModelConfig,
    layout: Layout,
    batch: int,
    seq: int,
    *,
    rank: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    moe: dict | None = None,
    **settings,
) -> DryRun:
    """What a step takes on one rank, without that rank, its memory, or a process group. It is not the first step, at
    whose peak there are no optimizer states yet: a step of few micro-batches comes before.

    batch: sequences of all ranks together; seq: tokens of each. rank: 0 is in the first stage of a pipeline, which
    under 1f1b holds most micro-batches. dtype: of the matrix products; moe: arguments of apply_moe, for a mixture whose
    experts all get the same number of tokens; settings: others of `parallelize`.

    Raises ValueError, and changes nothing, where the layout does not fit the model or the batch, for a rank that is
    none, and where there is a process group.
    """
    check_layout(config, layout, None, batch, seq, moe)
    with fake_ranks(layout, rank), even_experts(layout, seq, moe):
        try:
            mesh = build_mesh(layout, "cpu")
            with FakeTensorMode():
                parallel = parallelize(config, layout, mesh, moe=moe, dtype=dtype, **settings)
                parallel.reads_flags = False
                sequences = batch // layout.dp
                few = 1 if layout.schedule == "1f1b" else 2 * layout.pp  # the others do not take any number
                tokens = settle_shapes(parallel, min(sequences, few * layout.micro_batch), seq)
                parallel.step(tokens, tokens)
                tokens = settle_shapes(parallel, sequences, seq)
                return DryRun(layout, rank, *measured_step(parallel, tokens, tokens))
        finally:
            parallel = mesh = None
            gc.collect()  # hooks and groups are held in cycles
