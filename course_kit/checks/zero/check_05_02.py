"""Check of exercise 05.2: which elements of each tensor a rank owns."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from course_lib.zero import shards


class Group:
    """A rank's view of a group, without any other rank."""

    def __init__(self, rank: int, size: int):
        self.local_rank, self.world = rank, size

    def rank(self) -> int:
        """Return this rank."""
        return self.local_rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self.world


def check() -> None:
    """Assert the spans of several lists of tensors on 1 to 7 ranks against the elements of each rank's shard."""
    for sizes in ((15, 3, 16, 3), (1, 1), (0, 5, 0), (7,), (64, 128, 64), (3, 1, 4, 1, 5, 9)):
        for world, rank in [(n, rank) for n in (1, 2, 3, 4, 7) for rank in range(n)]:
            layout = shards.FlatLayout(
                [torch.zeros(size) for size in sizes], cast(dist.ProcessGroup, Group(rank, world))
            )
            mine = range(rank * layout.shard_numel, (rank + 1) * layout.shard_numel)
            for i, size in enumerate(sizes):
                span = layout.span(i)
                where = f"tensors of {sizes} elements, rank {rank} of {world}, tensor {i}"
                assert isinstance(span, tuple) and [type(end) for end in span] == [int, int], (
                    f"{where}: return two integers, as a tuple, not {span}"
                )
                assert 0 <= span[0] <= span[1] <= size, f"{where}: {span} is not in order, between 0 and {size}"
                owned = [element for element in range(size) if layout.starts[i] + element in mine]
                expected = (owned[0], owned[-1] + 1) if owned else "the same number twice"
                assert list(range(*span)) == owned, (
                    f"{where}: this rank has {mine.start} to {mine.stop} of the buffer, the tensor begins at "
                    f"{layout.starts[i]}: {expected}, not {span}"
                )
