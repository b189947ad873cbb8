"""The buckets of ZeRO stages 1 and 2: which parameters share one, the memory that they need, and who waits for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from course_lib.data_parallel.buckets import make_buckets
from course_lib.single_gpu.placement import placement_of
from course_lib.zero.optimizer_shards import BufferPool, GradientShard, OptimizerShard
from course_lib.zero.sharded_parameters import find_blocks


def split_into_buckets(module: nn.Module, groups: list[dict], bucket_mb: float) -> list[tuple[int, list[nn.Parameter]]]:
    """Return (number of the parameter group, parameters) per bucket, in the order in which backward completes them."""
    position = {parameter: i for i, parameter in enumerate(module.parameters())}
    buckets = []
    for number, group in enumerate(groups):
        kinds: dict[tuple, list[nn.Parameter]] = {}  # the norm of a bucket is computed as a whole
        for parameter in sorted(group["params"], key=lambda parameter: position[parameter]):
            kinds.setdefault(placement_of(parameter).norm_groups, []).append(parameter)
        buckets += [(number, each) for alike in kinds.values() for each in make_buckets(alike, bucket_mb * 1e6)]
    return sorted(buckets, key=lambda bucket: -position[bucket[1][-1]])


def reserve(gradients: Sequence[GradientShard], numbers: Sequence[int], stage: int) -> None:
    """Preallocate the memory of all gradients; in stage 2, two buffers per kind of bucket, as large as its largest.

    numbers: the parameter group of each bucket. One bucket of a kind is filled at a time, while another one is sent.
    """
    pools: dict[tuple, BufferPool] = {}
    for bucket, number in sorted(zip(gradients, numbers, strict=True), key=lambda pair: -pair[0].layout.padded):
        norm_groups = placement_of(bucket.parameters[0]).norm_groups
        kind = bucket.like.dtype, bucket.like.device, bucket.group, norm_groups, number
        if stage == 2 and kind not in pools:
            pools[kind] = BufferPool(bucket.layout.padded, bucket.like)
        bucket.reserve(pools.get(kind))


def make_shards(
    buckets: Sequence[tuple[int, list[nn.Parameter]]],
    group: dist.ProcessGroup,
    stage: int,
    offload: bool,
    compute_dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
) -> tuple[list[GradientShard], list[OptimizerShard]]:
    """Return this rank's shards of the gradient and of the values, one of each per bucket of `split_into_buckets`."""
    gradients, shards = [], []
    for _, parameters in buckets:
        reduce_group = placement_of(parameters[0]).reduce_group or group
        shards.append(OptimizerShard(parameters, reduce_group, offload, compute_dtype))
        gradients.append(GradientShard(parameters, reduce_group, 1 / group.size(), grad_dtype))
    reserve(gradients, [number for number, _ in buckets], stage)
    return gradients, shards


def shards_by_reader(module: nn.Module, shards: Sequence[OptimizerShard]) -> list[tuple[nn.Module, OptimizerShard]]:
    """Return the modules that read parameters in their forward, each with a shard whose all-gather it must wait for.

    A block may use its layers' parameters without calling the layers: it waits for all of them.
    """
    readers = [(block, [*block.parameters()]) for unit in find_blocks(module) for block in unit]
    readers += [(each, [*each.parameters(recurse=False)]) for each in module.modules()]
    shard_of = {parameter: shard for shard in shards for parameter in shard.parameters}
    return [(reader, s) for reader, params in readers for s in {shard_of[p] for p in params if p in shard_of}]


def remove_hooks(handles: Sequence[RemovableHandle], shards: Sequence[OptimizerShard]) -> None:
    """Leave a model without hooks and with all its values."""
    for handle in handles:
        handle.remove()
    for shard in shards:
        shard.wait()
