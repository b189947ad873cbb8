"""Check of exercise 06.14: checkpoints in parts against full recomputation: bytes, traffic, gradients, odd sizes."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from course_kit.checks.tensor_parallel.cases import counted, in_case
from course_kit.labs.tensor_parallel.models import TINY, in_groups, relative_error
from course_kit.labs.tensor_parallel.step import checkpoint_trial
from course_kit.ranks import shared
from course_lib.tensor_parallel import partitioned_checkpoints


def has_graph(retained) -> bool:
    """Return whether a kept tensor belongs to an autograd graph."""
    return any(torch.is_tensor(each) and each.requires_grad for each in tree_leaves(retained))


def comes_back(group: dist.ProcessGroup) -> bool | str:
    """Return whether 21 elements in BF16, transposed, are the same after pack and unpack, or what is wrong."""
    odd = torch.arange(21, dtype=torch.bfloat16).view(7, 3).t().requires_grad_()
    parts = partitioned_checkpoints.PartitionedCheckpoint(cast(Any, None), group)
    with in_case("21 elements in BF16, transposed, in parts on 4 ranks"):
        retained = parts.pack(odd)
        if has_graph(retained):
            return "what pack returns belongs to autograd's graph, as the argument does: detach the tensor first"
        back = parts.unpack(retained)
        return back.dtype == odd.dtype and torch.equal(back, odd)


def check() -> None:
    """Judge pack and unpack of PartitionedCheckpoint in a model on 2 ranks, and alone on 4."""
    ranks = shared(4)
    with ranks.within(20):
        in_full = ranks(in_groups, 2, checkpoint_trial, "full", TINY, 2, 32)
        in_parts = ranks(in_groups, 2, checkpoint_trial, "in parts", TINY, 2, 32)
        back = ranks(in_groups, 4, comes_back)
    complete = 2 * 32 * TINY.hidden * 4  # bytes of one checkpoint
    for rank, ((full, bytes_sent, grads), (parts, sent_parts, grads_parts)) in enumerate(
        zip(in_full, in_parts, strict=True)
    ):
        where = f"2 ranks, rank {rank}"
        assert all(relative_error(p, g) < 1e-5 for g, p in zip(grads, grads_parts, strict=True)), (
            f"{where}: the gradients differ from full recomputation's"
        )
        saved, possible = full - parts, complete * TINY.layers / 2
        assert abs(saved / possible - 1) < 0.05, (
            f"{where}: {saved:,} bytes less are kept than with full checkpoints; {possible:,.0f} are possible"
            + "; a view keeps the full tensor alive: clone it" * (abs(saved) < 0.05 * possible)
        )
        counts = Counter(record.collective for record in sent_parts.records if record.bytes)
        gathers = counts["all_gather"]
        assert gathers == TINY.layers, f"{where}: {counted(gathers, 'all-gather')}; one per layer"
        extra, enough = sent_parts.bytes - bytes_sent.bytes, complete * TINY.layers / 2
        assert abs(extra / enough - 1) < 0.05, f"{where}: {extra:,} bytes more are sent, {enough:,.0f} are enough"
    for rank, same in enumerate(back):
        what = f"4 ranks, rank {rank}: 21 elements in BF16, transposed"
        assert same is True, f"{what}, do not survive: {same or 'sizes need not divide, and the dtype stays'}"
