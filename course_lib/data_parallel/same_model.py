"""All ranks start from the same model: check that they have built the same one, and broadcast the first rank's values.

A rank that differs in one shape or one argument would wait for the others forever. The check compares hashes, and
sends descriptions only if the hashes differ, so that every rank raises the same error.
"""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from course_lib.collectives.simulation import all_gather_object
from course_lib.single_gpu.placement import placement_of


class Description(NamedTuple):
    """A line about a rank's arguments, or about one parameter or buffer.

    text: must be the same on all ranks. shard: the shard of a split tensor (notebook 06); must be the same on the ranks
    of `reduce_ranks`, which reduce the tensor together; None: on all ranks.
    """

    text: str
    shard: str = ""
    reduce_ranks: tuple[int, ...] | None = None


NOTHING = Description("nothing more")


def describe(module: nn.Module, arguments: dict) -> list[Description]:
    """Return the descriptions of the arguments and of each parameter and buffer, in the same order on all ranks."""
    lines = [Description(f"arguments {arguments}")]
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        facts = [name, str(list(tensor.shape)), str(tensor.dtype), tensor.device.type]
        facts += ["to be trained"] if tensor.requires_grad else []
        reduce_group = placement_of(tensor).reduce_group
        facts += [f"reduced over {reduce_group.size()} ranks"] if reduce_group else []
        shard = placement_of(tensor).tensor_shard  # the shards of one tensor have the same shape
        shard_text = f" from index {shard.start} of {shard.full_size}" if shard else ""
        reduce_ranks = tuple(dist.get_process_group_ranks(reduce_group)) if reduce_group else None
        lines.append(Description(" ".join(facts), shard_text, reduce_ranks))
    return lines


def short_hash(value: object) -> bytes:
    """Return 8 bytes that depend on `repr(value)` alone, the same in every process."""
    return hashlib.sha256(repr(value).encode()).digest()[:8]


def hashes_agree(lines: list[Description], group: dist.ProcessGroup) -> bool:
    """Return True if the descriptions of all ranks agree, by their hashes. Collective; the same result on all ranks.

    A rank sends one hash of all texts, and one hash of the shards for each list of ranks that reduce tensors together.
    """
    shards: dict[tuple[int, ...] | None, list[tuple[int, str]]] = {}
    for index, line in enumerate(lines):
        shards.setdefault(line.reduce_ranks, []).append((index, line.shard))
    hashes: dict[object, bytes] = {short_hash(ranks): short_hash(each) for ranks, each in shards.items()}
    hashes["texts"] = short_hash([line.text for line in lines])
    hashes_of_ranks: list[dict[object, bytes]] = [{}] * group.size()
    all_gather_object(hashes_of_ranks, hashes, group)
    first: dict[object, bytes] = {}
    return all(first.setdefault(key, value) == value for each in hashes_of_ranks for key, value in each.items())


def check_same_model(module: nn.Module, group: dist.ProcessGroup, arguments: dict) -> None:
    """Raise the same ValueError on all ranks of `group` if a rank's model or arguments differ from the first rank's.

    Compared are the names, shapes, dtypes and devices of parameters and buffers, whether they are trained, the size of
    their reduce_group, and, among the ranks of a reduce_group, their shard of a split tensor (notebook 06). Collective.
    """
    lines = describe(module, arguments)
    if hashes_agree(lines, group):
        return
    ranks, lines_of_ranks = dist.get_process_group_ranks(group), [lines] * group.size()
    all_gather_object(lines_of_ranks, lines, group)
    first_shards: dict[tuple, tuple[int, str]] = {}  # by (index, reduce_ranks): the first such rank, and its shard
    for rank, others in zip(ranks, lines_of_ranks, strict=True):
        for index, (line, first) in enumerate(zip_longest(others, lines_of_ranks[0], fillvalue=NOTHING)):
            first_rank, first_shard = first_shards.setdefault((index, line.reduce_ranks), (rank, line.shard))
            if line.text != first.text:
                raise ValueError(
                    f"the ranks differ: rank {rank} has {line.text}{line.shard}, "
                    f"where rank {ranks[0]} has {first.text}{first.shard}"
                )
            if line.shard != first_shard:
                raise ValueError(
                    f"the ranks differ: rank {rank} has {line.text}{line.shard}, "
                    f"where rank {first_rank} has {line.text}{first_shard}"
                )


def broadcast_from_first(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Broadcast the parameters and buffers of the first rank of `group`, or of a parameter's reduce_group."""
    for tensor in [*module.parameters(), *module.buffers()]:  # tied parameters once
        values = tensor.detach().contiguous()
        dist.broadcast(values, group=placement_of(tensor).reduce_group or group, group_src=0)
        if not tensor.is_contiguous():
            tensor.detach().copy_(values)
