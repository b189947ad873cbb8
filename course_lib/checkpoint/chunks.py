"""Chunks: the parts of full tensors that a rank has, in the full tensor's own indices, whatever the layout.

Tensor and expert parallelism cut a weight (expert parallelism more than once); ZeRO then lays shards end to end and
divides them among ranks. In the full tensor, each such shard is a few chunks: an offset and a size per dimension. A
chunk does not mention ranks, so any layout can read what another one has written: a rank asks for its own chunks, and
each is assembled from the saved chunks that overlap it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from course_lib.five_d.model import ParallelModel
from course_lib.single_gpu.model import plain_name
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.shards import TensorShard


class Chunk(NamedTuple):
    """A part of a full tensor, with as many dimensions. The first element of `values` is at `offsets`."""

    offsets: tuple[int, ...]
    full_shape: tuple[int, ...]
    values: torch.Tensor


Chunks = dict[str, list[Chunk]]  # by tensor name


# exercise 10.18
def span_chunks(shape: tuple[int, ...], first: int, last: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return elements first … last - 1 of a tensor stored row by row as (offsets, sizes) of chunks, in order.

    For a tensor of d dimensions, at most 2 d - 1 chunks.
    """
    if first >= last:
        return []
    if len(shape) < 2:
        return [((first,) * len(shape), (last - first,) * len(shape))]
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), last // row  # all of rows top … bottom - 1

    def row_chunks(i: int, begin: int, end: int) -> list:
        """Return the chunks of elements begin … end - 1 of row i."""
        return [((i, *offsets), (1, *sizes)) for offsets, sizes in span_chunks(shape[1:], begin, end)]

    if top > bottom:
        return row_chunks(bottom, first - bottom * row, last - bottom * row)
    before = row_chunks(top - 1, first - (top - 1) * row, row) if first < top * row else []
    full_rows = [((top,) + (0,) * (len(shape) - 1), (bottom - top, *shape[1:]))] if top < bottom else []
    return before + full_rows + row_chunks(bottom, 0, last - bottom * row)


def local_chunks(weight: torch.Tensor, values: torch.Tensor, span: tuple[int, int] | None = None) -> list[Chunk]:
    """Return the chunks of the full `weight`, or of a tensor of its shape such as an optimizer state, in `values`.

    values: this rank's tensor-parallel shard; or, with a span, elements span[0] to span[1] - 1 of the shard, as ZeRO
    divides it.
    """
    flat, shard = placement_of(weight).flat_shard, placement_of(weight).tensor_shard
    shape, span = (tuple(flat.full_shape), flat.span) if flat else (tuple(weight.shape), span)
    cuts = () if shard is None else cast(tuple[TensorShard, ...], getattr(shard, "shards", (shard,)))
    full_shape = shape if shard is None else tuple(shard.full_shape(torch.empty(shape, device="meta")))
    starts = [sum(cut.start for cut in cuts if cut.dim % len(shape) == dim) for dim in range(len(shape))]
    local = [((0,) * len(shape), shape)] if span is None else span_chunks(shape, *span)
    sizes = [math.prod(size) for _, size in local]
    flat_values = [values] if span is None else values.split(sizes) if local else []
    return [
        Chunk(tuple(map(sum, zip(offsets, starts, strict=True))), full_shape, each.view(size))
        for (offsets, size), each in zip(local, flat_values, strict=True)
        if each.numel()
    ]


def weight_names(parallel: ParallelModel) -> dict[torch.Tensor, str]:
    """Return the name in the unsplit model of each of this rank's weights. A tied head is named as the embedding."""
    names: dict[torch.Tensor, str] = {}
    for stage in parallel.stages.values():
        for stage_name, weight in stage.named_parameters(remove_duplicate=False):
            name = plain_name(stage_name).removeprefix("module.")
            names.setdefault(weight, "embedding.weight" if parallel.config.tied and name == "head.weight" else name)
    return names


def weight_chunks(parallel: ParallelModel) -> Chunks:
    """Return this rank's chunks of weights, and of the buffers in a state_dict, by name: views of the model's memory,
    in float32 even if the stages compute in a lower precision.
    """
    # By weight: its elements in a tensor that the optimizer updates, and their span in the local weight.
    updated_shards: dict[torch.Tensor, tuple[torch.Tensor, tuple[int, int] | None]] = {}
    for updated in parallel.sharding.updated_tensors():
        shards = updated.split(updated.tensor.detach())
        updated_shards.update(zip(updated.weights, zip(shards, updated.spans, strict=True), strict=True))
    names = weight_names(parallel)
    chunks = {name: local_chunks(w, *updated_shards.get(w, (w.detach(), None))) for w, name in names.items()}
    for stage in parallel.stages.values():
        persistent = stage.state_dict().keys()
        for name, buffer in stage.named_buffers():
            if name in persistent:
                full = Chunk((0,) * buffer.dim(), tuple(buffer.shape), buffer)
                chunks[plain_name(name).removeprefix("module.")] = [full]
    return chunks


def state_chunks(parallel: ParallelModel, states: Mapping[torch.Tensor, dict[str, torch.Tensor]]) -> Chunks:
    """Return this rank's chunks of an optimizer's states, by name and state: blocks.0.mlp_norm.weight/exp_avg.

    states: by the tensor that the optimizer updates (see GradientOwner). A counter is a tensor without dimensions.
    Raises ValueError for a state that is neither a counter nor of its tensor's shape.
    """
    names, chunks = weight_names(parallel), {}
    for updated in parallel.sharding.updated_tensors():
        tensor, weights, spans = updated
        for state, value in states.get(tensor, {}).items():
            if not torch.is_tensor(value) or value.dim() and value.shape != tensor.shape:
                kind = list(value.shape) if torch.is_tensor(value) else type(value).__name__
                raise ValueError(
                    f"state {state} is {kind}: it must be a scalar or have its weight's shape {list(tensor.shape)}"
                )
            shards = updated.split(value) if value.dim() else [value] * len(weights)
            for weight, view, span in zip(weights, shards, spans, strict=True):
                if span is None or span[0] < span[1]:
                    each = local_chunks(weight, view, span) if value.dim() else [Chunk((), (), value)]
                    chunks[f"{names[weight]}/{state}"] = each
    return chunks


def split_large(chunk: Chunk, max_bytes: int = 2**26) -> list[Chunk]:
    """Split a chunk along its rows into chunks of at most `max_bytes`, or of one row. A rank that needs a part of a
    saved chunk reads all of it.
    """
    if chunk.values.nbytes <= max_bytes:
        return [chunk]
    rows = max(1, max_bytes // chunk.values[0].nbytes)
    first, *others = chunk.offsets
    return [
        Chunk((first + rows * i, *others), chunk.full_shape, values)
        for i, values in enumerate(chunk.values.split(rows))
    ]


# exercise 10.19
def fill(wanted: list[Chunk], saved: list[Chunk]) -> None:
    """Copy the elements that saved chunks of the same tensor share with wanted chunks into the wanted chunks."""
    for chunk in wanted:
        for other in saved:
            sides = list(zip(chunk.offsets, chunk.values.shape, other.offsets, other.values.shape, strict=True))
            begins = [max(a, b) for a, _, b, _ in sides]
            ends = [min(a + n, b + m) for a, n, b, m in sides]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                spans = list(zip(begins, ends, strict=True))
                target = tuple(slice(begin - a, end - a) for (begin, end), a in zip(spans, chunk.offsets, strict=True))
                source = tuple(slice(begin - b, end - b) for (begin, end), b in zip(spans, other.offsets, strict=True))
                chunk.values[target] = other.values[source]


def write_assignment(chunks: Chunks, group: dist.ProcessGroup) -> Chunks:
    """Return the chunks that this rank writes. Of the ranks that have a chunk, the one with the fewest bytes to write
    so far is assigned to it. Collective.
    """
    local = [(name, chunk.offsets, chunk.values.nbytes) for name, each in chunks.items() for chunk in each]
    by_rank: list = [None] * group.size()
    dist.all_gather_object(by_rank, local, group=group)
    owners: dict[tuple, list[int]] = {}
    for rank, keys in enumerate(by_rank):
        for key in keys:
            owners.setdefault(key, []).append(rank)
    loads, assigned = [0] * group.size(), set()
    for key in sorted(owners, key=lambda key: (len(owners[key]), -key[2], key)):  # first the chunks with one owner
        writer = min(owners[key], key=loads.__getitem__)
        loads[writer] += key[2]
        if writer == group.rank():
            assigned.add(key[:2])
    local_writes = {name: [c for c in each if (name, c.offsets) in assigned] for name, each in chunks.items()}
    return {name: each for name, each in local_writes.items() if each}
