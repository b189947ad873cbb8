"""Count the traffic of a rank: calls and bytes by collective, group and rank, on any backend.

Every way to communicate ends in an operator that PyTorch's dispatcher runs: `torch.distributed`'s functions, autograd
functions, functional collectives, DistributedDataParallel, FSDP, DTensor. A dispatch mode sees them. It counts each
call when it is issued, and changes nothing; a rank outside of the group is a ValueError. (Symmetric memory
on GPUs works without collectives: not counted.)

Bytes are counted as if each shard went directly from the rank that has it to the rank that needs it (for a sum: to the
rank that sums this shard). With N ranks and K bytes on each, a rank sends

    all_reduce              2 (N-1)/N K         reduce_scatter   K less its own shard
    all_gather              (N-1) x its shard   all_to_all       K less the shard for itself
    broadcast, scatter      at the root: the others' shards; elsewhere 0
    reduce, gather          at the root: 0; elsewhere its tensor
    send                    its tensor          recv, barrier    0

The sum over the ranks is the same for rings and trees; they spread it in other ways. (Thakur, Rabenseifner and Gropp
2005, "Optimization of collective communication operations in MPICH".)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
    "recv", "barrier",
)  # fmt: skip
# The parts of an operator's name that differ by variant: c10d::_allgather_base_, all_gather_into_tensor, ...
VARIANT = re.compile("_(coalesced|single|into_tensor|tensor|base|out|any_source)(?=_|$)|^monitored|^i(?=send|recv)|_")


class Record(NamedTuple):
    """One call of one rank."""

    collective: str  # as in torch.distributed
    group: tuple[int, ...]  # the global ranks of the group
    rank: int  # the global rank that called
    bytes: int  # that it sends
    peer: int | None  # global rank: of the root, or of the other side of a send or recv


class Traffic:
    """The traffic of one or more ranks, as `records` in the order of issue."""

    def __init__(self, records: Iterable[Record] = ()):
        self.records = list(records)

    def select(
        self, collective: str | None = None, group: tuple[int, ...] | None = None, rank: int | None = None
    ) -> Traffic:
        """Return the Traffic of one collective, one group (its global ranks), one rank, or a combination of them."""
        wanted = (collective, None if group is None else tuple(group), rank)
        return Traffic(
            record for record in self.records if all(w in (None, has) for w, has in zip(wanted, record, strict=False))
        )

    @property
    def calls(self) -> int:
        return len(self.records)

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.records)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.records + other.records)

    def __str__(self) -> str:
        """Return a table: a line for each collective, group and rank."""
        lines = [f"{'collective':<16}{'group':<16}{'rank':>6}{'calls':>8}{'bytes sent':>16}"]
        for key in sorted({record[:3] for record in self.records}):
            part = self.select(*key)
            lines.append(f"{key[0]:<16}{shown(key[1]):<16}{key[2]:>6}{part.calls:>8}{part.bytes:>16,}")
        return "\n".join(lines)


def shown(group: tuple[int, ...]) -> str:
    """Return a group's ranks in a few characters: 0-3, or 0,2."""
    consecutive = len(group) > 2 and group == tuple(range(group[0], group[-1] + 1))
    text = f"{group[0]}-{group[-1]}" if consecutive else ",".join(map(str, group))
    return text if len(text) <= 15 else text[:12] + "..."


class count_traffic(TorchDispatchMode):
    """Context manager that counts this rank's communication, forward and backward: `with count_traffic() as traffic:`.

    It does not see what other threads of the program start. Do not time inside it: each operator takes some
    microseconds longer.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch's default, True, imports torch._dynamo at the first operator: seconds on each rank

    def __enter__(self) -> Traffic:
        super().__enter__()
        self.traffic = Traffic()
        return self.traffic

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor: it turns into plain tensors and collectives, which come here again
        if function.namespace in ("c10d", "_c10d_functional"):
            names = (argument.name for argument in function._schema.arguments)
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.traffic.records += records_of(function._schema.name.split("::")[1], given)
        return function(*args, **(kwargs or {}))


def records_of(operator: str, given: dict) -> list[Record]:
    """Return the records of one operator: one, or the records of a batch of sends and receives; none for a wait."""
    group = given["process_group"] if "process_group" in given else given.get("group_name")
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(cast(Any, group))
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    if operator == "batch_p2p_ops":
        each = zip(given["op_list"], given["peer_list"], given["tensors"], strict=True)
        calls = [(name, {"group_name": group, "dst": peer, "tensor": tensor}) for name, peer, tensor in each]
        return [record for call in calls for record in records_of(*call)]
    plain = VARIANT.sub("", operator)
    collective = next((name for name in COLLECTIVES if name.replace("_", "") == plain), None)
    if collective is None:
        return []
    assert group is not None, "every collective names its group"
    members = tuple(dist.get_process_group_ranks(group))
    peer = next((given[name] for name in ("root_rank", "src", "dst") if name in given), None)
    if peer is not None and not 0 <= peer < len(members):  # gloo would end the process
        raise ValueError(f"rank {peer} is not part of the group, which has {len(members)}")
    nbytes = bytes_sent(collective, given, group.rank(), len(members), peer)
    return [Record(collective, members, members[group.rank()], nbytes, None if peer is None else members[peer])]


def bytes_sent(collective: str, given: dict, rank: int, world_size: int, peer: int | None) -> int:
    """Return the bytes that `rank` sends (ranks of the group), by the rules at the top of this module."""
    names = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")
    tensors = next(given[name] for name in names if name in given)
    full, local = size_of(tensors), size_of(tensors) // world_size  # local: the shard of the vector that stays here
    if isinstance(tensors, (list, tuple)) and tensors and isinstance(tensors[0], (list, tuple)):
        # A list of shards, as of reduce_scatter and scatter.
        local = size_of(tensors[0][rank])
    elif collective == "all_to_all" and isinstance(tensors, (list, tuple)):
        local = size_of(tensors[rank])
    elif splits := given.get("input_split_sizes"):
        local = full // max(1, sum(splits)) * splits[rank]
    return {
        "all_reduce": 2 * (world_size - 1) * full // world_size,
        "all_gather": (world_size - 1) * full,
        "reduce_scatter": full - local,
        "all_to_all": full - local,
        "broadcast": (world_size - 1) * full if rank == peer else 0,
        "scatter": full - local if rank == peer else 0,
        "reduce": 0 if rank == peer else full,
        "gather": 0 if rank == peer else full,
        "send": full,
    }.get(collective, 0)


def size_of(tensors) -> int:
    """Return the bytes of a tensor, or of all tensors in lists of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(size_of(tensor) for tensor in tensors)
