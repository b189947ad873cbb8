"""A dry run: memory and traffic of one rank of thousands, from the program that would run there.

    result = dry_run(PRESETS["llama3-405B"], Layout.parse("dp128,pp16,tp8,sp,zero1"), batch=2048, seq=8192)
    print(result)                        # by category: memory between steps and at the peak; by axis: bytes sent

The tensors are fake: they have a shape, a dtype and a storage of some size, but no memory and no values. The other
ranks are fake too (fake_ranks). All else is real: the layout's transforms, its schedule, the backward, the clipping and
the optimizer's step, so no formula can get them wrong. A mixture's tokens cannot choose experts without values: each
expert gets an even share.

The CPU's program runs, since it can be compared with real ranks anywhere. A GPU runs the same program with other
kernels: attention may save its tensors in another form, and the optimizer may update all parameters at once. The
fragmentation of an allocator's memory (`defragmentation`), NCCL and the CUDA context are not counted.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from course_lib.best_config.expert_time import ranks_per_token
from course_lib.best_config.fake_ranks import axes_of, fake_ranks, mesh_coordinates
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.expert_parallel.exchange import read_sizes
from course_lib.five_d.layouts import Layout, check_layout, coordinates, schedule_of
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import ParallelModel, parallelize
from course_lib.pipeline.runner import PipelineRunner
from course_lib.pipeline.schedules import num_stages
from course_lib.pipeline.transfers import StageInput
from course_lib.single_gpu.config import ModelConfig
from course_lib.single_gpu.profile import CATEGORIES, MemoryProfile


class DryRun(NamedTuple):
    """Memory and traffic of one rank's step, in bytes."""

    layout: Layout
    rank: int
    between_steps: dict[str, int]  # by category
    peak: dict[str, int]  # by category, when their sum is largest
    bytes_sent: dict[tuple[str, str], int]  # per step, by axes of the layout and collective

    @property
    def peak_bytes(self) -> int:
        """Bytes of all categories at the peak."""
        return sum(self.peak.values())

    def __str__(self) -> str:
        """Return two tables, in GiB."""
        lines = [f"rank {self.rank:,} of {self.layout.ranks:,}, {self.layout}"]
        lines.append(f"{'GiB':<26}{'between steps':>14}{'at the peak':>12}")
        rows = [(name, self.between_steps[name], self.peak[name]) for name in CATEGORIES]
        for name, between, peak in [*rows, ("together", sum(self.between_steps.values()), self.peak_bytes)]:
            lines.append(f"{name:<26}{between / 2**30:>14.3f}{peak / 2**30:>12.3f}")
        lines.append("GiB sent per step")
        for (axes, collective), size in self.bytes_sent.items():
            lines.append(f"{axes:<16}{collective:<24}{size / 2**30:>12.3f}")
        return "\n".join(lines)


def axes_between(ranks: tuple[int, ...], layout: Layout) -> str:
    """Return the axes in which these ranks differ, outermost first: "pp", or "dp x cp"; copies and ep together are dp.

    With replicas of ZeRO-3, dp is dp_replicate, dp_shard, or both of them.
    """
    by_axis = zip(axes_of(layout), zip(*(mesh_coordinates(rank, layout) for rank in ranks), strict=True), strict=True)
    differing = [axis for axis, along in by_axis if len(set(along)) > 1]
    if "copies" in differing and (layout.ep == 1 or "ep" in differing):
        size, dp = layout.dp // layout.replicate, {coordinates(rank, layout)["dp"] for rank in ranks}
        groups, inside = {index // size for index in dp}, {index % size for index in dp}
        suffix = "_replicate" if len(inside) == 1 else "_shard" if len(groups) == 1 else ""
        suffix = suffix if layout.replicate > 1 else ""
        differing = [f"dp{suffix}", *(axis for axis in differing if axis not in ("copies", "ep"))]
    return " x ".join(differing)


def bytes_by_axes(traffic: Traffic, layout: Layout) -> dict[tuple[str, str], int]:
    """Return the bytes sent by axes and collective, sorted, without collectives that send nothing."""
    axes = {ranks: axes_between(ranks, layout) for ranks in {record.group for record in traffic.records}}
    total: dict[tuple[str, str], int] = {}
    for record in traffic.records:
        if record.bytes:
            key = axes[record.group], record.collective
            total[key] = total.get(key, 0) + record.bytes
    return dict(sorted(total.items()))


def claim_buffers(profile: MemoryProfile, parallel: ParallelModel) -> None:
    """Assign the tensors to categories that are neither the module's parameters nor the optimizer's state."""
    for category, tensors in parallel.sharding.extra_memory().items():
        if category != "parameters":  # measured_step claims these
            profile.claim(tensors, category)


@contextlib.contextmanager
def after_preparation(runner: PipelineRunner, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` in each step after the runner's own preparation, inside the context."""
    before_step = runner.before_step

    def prepare_and_act() -> None:
        if before_step is not None:
            before_step()
        action()

    runner.before_step = prepare_and_act
    try:
        yield
    finally:
        runner.before_step = before_step


def measured_step(parallel: ParallelModel, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[dict, dict, dict]:
    """Run a step, and return its between_steps, peak and bytes_sent of DryRun; on real ranks too.

    inputs, targets: each [b / dp, s]. Weights that are gathered for a while, and copies in another dtype, count as
    parameters, their gradients as gradients. Collective.
    """
    layout = parallel.layout
    gathered = nn.ParameterList(parallel.sharding.extra_memory().get("parameters", ()))

    def claim_weights() -> None:
        profile.claim(list(parallel.stages.parameters()), "parameters")

    with (
        MemoryProfile(nn.ModuleList([parallel.stages, gathered]), parallel.inner_optimizer) as profile,
        count_traffic() as traffic,
        after_preparation(parallel.runner, claim_weights),
    ):
        claim_buffers(profile, parallel)
        parallel.step(inputs, targets)
        profile.claim([parameter.grad for parameter in parallel.stages.parameters()], "gradients")
        profile.mark("between steps")
    return profile.peak("between steps"), profile.peak(), bytes_by_axes(traffic, layout)


def prepare_step(parallel: ParallelModel, sequences: int, seq: int) -> torch.Tensor:
    """Prepare a step of sequences [b / dp, s], and return tokens for it. Sets the shapes that enter each stage, since
    fake ranks cannot send them to each other: [mb, tokens of this rank, h], in the dtype of the weights.
    """
    layout, runner = parallel.layout, parallel.runner
    runner.use(schedule_of(layout, sequences // layout.micro_batch))
    tokens = seq // layout.cp // (layout.tp if layout.sequence_parallel else 1)
    shape = torch.Size((layout.micro_batch, tokens, parallel.config.hidden))
    entering: list[StageInput | None] = [StageInput(shape, parallel.dtype)] * (num_stages(runner.schedule) - 1)
    runner.shapes[torch.Size((sequences, seq // layout.cp)), torch.float32] = [None, *entering]
    return torch.zeros(sequences, seq, dtype=torch.int64)


def even_sizes(
    rows: torch.Tensor, choices: torch.Tensor, group: dist.ProcessGroup, tokens: int, moe: dict
) -> tuple[list[int], list[int], int]:
    """Return what exchange.read_sizes would if every expert were equally likely and every rank got the mean: fake
    tokens have no values to choose by. tokens: of a rank, in one call.
    """
    n, outgoing = group.size(), torch.stack([rows, choices], 1)
    dist.all_to_all_single(torch.empty_like(outgoing), outgoing, group=group)
    each = round(tokens * float(ranks_per_token(moe, n)) / n)
    return [each] * n, [each] * n, tokens * moe["top_k"]


def even_experts(layout: Layout, seq: int, moe: dict | None) -> AbstractContextManager[None]:
    """Give each expert an even share of the tokens, inside the context."""
    if moe is None:
        return contextlib.nullcontext()
    tokens = layout.micro_batch * seq // layout.cp
    return read_sizes.simulated_by(functools.partial(even_sizes, tokens=tokens, moe=moe))


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
    """Return the memory and traffic of a step on one rank, without that rank, its memory, or a process group. A step of
    few micro-batches runs before it, since at the peak of a first step there are no optimizer states yet.

    batch: sequences of all ranks together; seq: tokens of each. rank: 0 is in the first stage of a pipeline, which has
    the most micro-batches in flight under 1f1b. dtype: of the matmuls; moe: arguments of apply_moe, for a mixture whose
    experts all get the same number of tokens; settings: other arguments of `parallelize`.

    Raises ValueError, and changes nothing, if the layout does not fit the model or the batch, for a rank that does not
    exist, and if there is a process group.
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
                tokens = prepare_step(parallel, min(sequences, few * layout.micro_batch), seq)
                parallel.step(tokens, tokens)
                tokens = prepare_step(parallel, sequences, seq)
                return DryRun(layout, rank, *measured_step(parallel, tokens, tokens))
        finally:
            parallel = mesh = None  # type: ignore[assignment]  # so that they can be collected
            gc.collect()  # hooks and groups are held in cycles
