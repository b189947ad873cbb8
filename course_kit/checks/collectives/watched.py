"""Further properties that checks of notebook 03 ask of an answer: memory, groups, neighbors, steps and bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.collectives.traffic import Traffic

RANKS = 4  # that the checks share with the notebook
SECONDS = 10  # that an answer has before it is stopped
SHAPES_OF_RINGS = (
    (4, (12,), torch.float32),
    (4, (2, 501), torch.int64),
    (3, (2,), torch.bfloat16),
    (1, (5,), torch.float32),
)


class Made(TorchDispatchMode):
    """Memory of an answer: the bytes of its largest tensor, and of all at once, at most. Views do not count."""

    def __enter__(self) -> Made:
        self.tensors: list = []
        self.largest, self.held = 0, 0
        return super().__enter__()

    def __torch_dispatch__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        result = function(*args, **(kwargs or {}))
        given = [t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.tensors.append((weakref.ref(tensor), tensor.untyped_storage().nbytes()))
                self.largest = max(self.largest, self.tensors[-1][1])
        self.held = max(self.held, sum(size for tensor, size in self.tensors if tensor() is not None))
        return result

    def too_much(self, shard: int) -> str:
        """Describe a tensor larger than a shard, or tensors larger than two in total; 256 bytes more are allowed."""
        if self.largest > shard + 256:
            return f"makes a tensor of {self.largest:,} bytes; a shard has {shard:,}"
        too_much = self.held > 2 * shard + 256
        return f"holds {self.held:,} bytes at once; two shards have {2 * shard:,}" if too_much else ""


def members(n: int) -> tuple[int, ...]:
    """Return the ranks of the group that `among` makes."""
    return tuple(range(RANKS - n, RANKS))


def in_the_group(traffic: Traffic, n: int) -> bool:
    """Return whether a rank has communicated in that group alone."""
    return all(record.group == members(n) for record in traffic.records)


def neighbors_only(traffic: Traffic, rank: int, n: int) -> bool:
    """Return whether a rank has sent to the next one and received from the previous one alone."""
    sends, receives = traffic.select("send"), traffic.select("recv")
    right = {record.peer for record in sends.records} <= {members(n)[(rank + 1) % n]}
    right = right and {record.peer for record in receives.records} <= {members(n)[rank - 1]}
    return right and traffic.calls == sends.calls + receives.calls


def check_ring(what: str, outcomes: list[tuple[str, Traffic]], steps: int, expected_bytes: list[int]) -> None:
    """Assert that each rank's result is right, and that its sends follow the ring, in number and bytes."""
    n = len(outcomes)
    for rank, (wrong, traffic) in enumerate(outcomes):
        assert not wrong, f"{what}: group rank {rank} {wrong}"
        assert in_the_group(traffic, n), f"{what}: group rank {rank} sends on the default group; pass group on"
        others = {record.collective for record in traffic.records} - {"send", "recv"}
        assert not others, f"{what}: group rank {rank} calls {min(others)}; the ring needs exchange only"
        assert neighbors_only(traffic, rank, n), f"{what}: group rank {rank} should send to the next rank only"
        assert traffic.select("send").calls == steps, (
            f"{what}: group rank {rank} sent {traffic.select('send').calls} times, not {steps}"
        )
        assert traffic.bytes == expected_bytes[rank], (
            f"{what}: group rank {rank} sent {traffic.bytes} bytes, {expected_bytes[rank]} are enough: "
            "one chunk per step"
        )
