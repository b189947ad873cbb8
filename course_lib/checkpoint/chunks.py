"""Which part of which whole tensor a rank has: chunks, in the whole's own indices, whatever the layout.

A rank's part of a weight may be cut by tensor parallelism, by expert parallelism (more than once), and then laid end to
end with others and dealt out by ZeRO. In the whole tensor each such part is a few chunks: an offset and a size in each
dimension. Boxes know nothing of ranks, so what one layout has written another one can read: it asks for its own chunks,
and each is pieced together from those that overlap it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_lib.five_d.model import ParallelModel
from course_lib.single_gpu.model import plain_name
from course_lib.single_gpu.placement import placement_of


class Chunk(NamedTuple):
    """A part of a whole tensor, of as many dimensions: `values`, whose first element is at `offsets`."""

    offsets: tuple[int, ...]
    full_shape: tuple[int, ...]
    values: torch.Tensor


# exercise 10.18
def span_chunks(shape: tuple[int, ...], first: int, last: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return elements first … last - 1 of a tensor stored row by row, as (offsets, sizes) of chunks, in their order.

    At most 2 d - 1 chunks, where the tensor has d dimensions.
    """
    if first >= last:
        return []
    if len(shape) < 2:
        return [((first,) * len(shape), (last - first,) * len(shape))]
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), last // row  # rows top … bottom - 1 are in it whole

    def part(i: int, begin: int, end: int) -> list:
        """Elements begin … end - 1 of row i."""
        return [((i, *offsets), (1, *sizes)) for offsets, sizes in span_chunks(shape[1:], begin, end)]

    if top > bottom:
        return part(bottom, first - bottom * row, last - bottom * row)
    before = part(top - 1, first - (top - 1) * row, row) if first < top * row else []
    whole = [((top,) + (0,) * (len(shape) - 1), (bottom - top, *shape[1:]))] if top < bottom else []
    return before + whole + part(bottom, 0, last - bottom * row)


def local_chunks(weight: nn.Parameter, values: torch.Tensor, span: tuple[int, int] | None = None) -> list[Chunk]:
    """Where `values` are in the whole of `weight`, or of what has its shape, such as an optimizer's state.

    values: all that this rank has of it; or, with a span, these elements of it [elements], as ZeRO deals them out.
    """
    flat, shard = placement_of(weight).flat_shard, placement_of(weight).tensor_shard
    shape, span = (tuple(flat.full_shape), flat.span) if flat else (tuple(weight.shape), span)
    cuts = () if shard is None else getattr(shard, "shards", (shard,))
    whole = tuple(shard.full_shape(torch.empty(shape, device="meta"))) if cuts else shape
    begins = [sum(cut.start for cut in cuts if cut.dim % len(shape) == dim) for dim in range(len(shape))]
    local = [((0,) * len(shape), shape)] if span is None else span_chunks(shape, *span)
    parts = [values] if span is None else values.split([math.prod(sizes) for _, sizes in local]) if local else []
    return [
        Chunk(tuple(map(sum, zip(offsets, begins, strict=True))), whole, part.view(sizes))
        for (offsets, sizes), part in zip(local, parts, strict=True)
        if part.numel()
    ]


def weight_names(parallel: ParallelModel) -> dict[nn.Parameter, str]:
    """This rank's weights, each with its name in the unsplit model; a tied head is the embedding."""
    names = {}
    for stage in parallel.stages.values():
        for name, weight in stage.named_parameters(remove_duplicate=False):
            name = plain_name(name).removeprefix("module.")
            names.setdefault(weight, "embedding.weight" if parallel.config.tied and name == "head.weight" else name)
    return names


def weight_chunks(parallel: ParallelModel) -> dict[str, list[Chunk]]:
    """This rank's chunks of weights, and of buffers of a state_dict, by name: views of the model's memory, in float32
    where the stages compute with less.
    """
    dealt = {}  # by weight: its elements in a tensor that the optimizer updates, and which elements these are
    for updated in parallel.sharding.updated_tensors():
        shards = updated.split(updated.tensor.detach())
        dealt.update(zip(updated.weights, zip(shards, updated.spans, strict=True), strict=True))
    names = weight_names(parallel)
    chunks = {name: local_chunks(w, *dealt.get(w, (w.detach(), None))) for w, name in names.items()}
    for stage in parallel.stages.values():
        kept = stage.state_dict().keys()
        for name, buffer in stage.named_buffers():
            if name in kept:
                name = plain_name(name).removeprefix("module.")
                chunks[name] = [Chunk((0,) * buffer.dim(), tuple(buffer.shape), buffer)]
    return chunks


def state_chunks(
    parallel: ParallelModel, states: dict[torch.Tensor, dict[str, torch.Tensor]]
) -> dict[str, list[Chunk]]:
    """This rank's chunks of an optimizer's states, by name and state: blocks.0.mlp_norm.weight/exp_avg.

    states: of each tensor that it updates (see GradientOwner). A counter is a tensor without dimensions. Raises
    ValueError for a state that is neither that nor of its tensor's shape.
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
            for weight, piece, span in zip(weights, shards, spans, strict=True):
                if span is None or span[0] < span[1]:
                    found = local_chunks(weight, piece, span) if value.dim() else [Chunk((), (), value)]
                    chunks[f"{names[weight]}/{state}"] = found
    return chunks


def split_large(chunk: Chunk, most: int = 2**26) -> list[Chunk]:
    """The same in chunks of at most so many bytes, or of one row: whoever reads a part of a chunk reads all of it."""
    if chunk.values.nbytes <= most:
        return [chunk]
    rows = max(1, most // chunk.values[0].nbytes)
    first, *others = chunk.offsets
    parts = chunk.values.split(rows)
    return [Chunk((first + rows * i, *others), chunk.full_shape, part) for i, part in enumerate(parts)]


# exercise 10.19
def fill(wanted: list[Chunk], saved: list[Chunk]) -> None:
    """Put into the values of wanted chunks what saved chunks of the same tensor have of them."""
    for chunk in wanted:
        for other in saved:
            sides = list(zip(chunk.offsets, chunk.values.shape, other.offsets, other.values.shape, strict=True))
            begins = [max(a, b) for a, _, b, _ in sides]
            ends = [min(a + n, b + m) for a, n, b, m in sides]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                spans = list(zip(begins, ends, strict=True))
                own = tuple(slice(begin - a, end - a) for (begin, end), a in zip(spans, chunk.offsets, strict=True))
                theirs = tuple(slice(begin - b, end - b) for (begin, end), b in zip(spans, other.offsets, strict=True))
                chunk.values[own] = other.values[theirs]


def own_share(chunks: dict[str, list[Chunk]], group: dist.ProcessGroup) -> dict[str, list[Chunk]]:
    """Those chunks that this rank is to write: what several ranks have, the one with the least to write. Collective."""
    own = [(name, chunk.offsets, chunk.values.nbytes) for name, each in chunks.items() for chunk in each]
    of_all: list = [None] * group.size()
    dist.all_gather_object(of_all, own, group=group)
    holders: dict[tuple, list[int]] = {}
    for rank, theirs in enumerate(of_all):
        for key in theirs:
            holders.setdefault(key, []).append(rank)
    loads, mine = [0] * group.size(), set()
    for key in sorted(holders, key=lambda key: (len(holders[key]), -key[2], key)):  # those without a choice first
        writer = min(holders[key], key=loads.__getitem__)
        loads[writer] += key[2]
        if writer == group.rank():
            mine.add(key[:2])
    shares = {name: [chunk for chunk in each if (name, chunk.offsets) in mine] for name, each in chunks.items()}
    return {name: each for name, each in shares.items() if each}
