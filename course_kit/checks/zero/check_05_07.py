"""Check of exercise 05.7: buckets alternate between two buffers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves

from course_lib.zero.optimizer_shards import BufferPool


class Sent:
    """A bucket that is being sent, and notes when it is collected."""

    def __init__(self, name: int | str, pool: BufferPool, log: list):
        self.name, self.pool, self.log, self.collected = name, pool, log, 0
        self.buffer: torch.Tensor | None = None

    def collect(self) -> None:
        """Give the buffer back; it may be called twice."""
        self.collected += 1
        assert self.collected < 3, f"bucket {self.name} is collected over and over: it must leave `sending`"
        if self.buffer is not None:
            self.log.append(self.name)
            self.pool.give_back(self.buffer)
            self.buffer = None


def check_in_turn() -> None:
    """Assert that six buckets, each sent once it is full, alternate between the two buffers of __init__."""
    pool = BufferPool(10, torch.zeros(0, dtype=torch.bfloat16))
    log: list[int] = []
    at_first = {buffer.data_ptr() for buffer in pool.free}
    being_sent: list[Sent] = []
    for number in range(6):
        bucket = Sent(number, pool, log)
        bucket.buffer = pool.take()
        assert torch.is_tensor(bucket.buffer), f"take() returns a buffer, not {bucket.buffer}"
        for other in being_sent:
            assert other.buffer is None or other.buffer.data_ptr() != bucket.buffer.data_ptr(), (
                f"bucket {number} has the buffer that bucket {other.name} is sending"
            )
        assert log == list(range(number - 1)), (
            f"bucket {number} takes a buffer, collected so far: {log}; the oldest, and only if none is free"
        )
        assert bucket.buffer.data_ptr() in at_first, f"bucket {number} has a new buffer: the two of __init__ are enough"
        pool.sending.append(cast(Any, bucket))
        being_sent.append(bucket)


def check() -> None:
    """Assert the turns, further buffers if none is being sent, and buckets that were collected already."""
    check_in_turn()
    pool = BufferPool(10, torch.zeros(0, dtype=torch.bfloat16))
    try:
        filling = [pool.take() for _ in range(4)]  # half full, none is being sent
    except IndexError as error:
        raise AssertionError(f"none is free, and none is being sent: make one ({error})") from None
    assert all(b.numel() == 10 and b.dtype == torch.bfloat16 for b in filling), (
        "a further buffer has the size and dtype of the first ones"
    )
    assert len({buffer.data_ptr() for buffer in filling}) == 4, "a buffer that is being filled was taken again"
    for buffer in filling:
        pool.give_back(buffer)
    assert len(pool.free) == 2, f"of four buffers that came back {len(pool.free)} are kept; two are enough"
    done, last = Sent("done", pool, []), Sent("last", pool, [])
    pool.sending.extend(cast(Any, [done, last]))
    last.buffer = pool.take()
    assert len(pool.sending) == 2, "a buffer is free: no bucket has to be collected"
    pool.take()
    try:
        third = pool.take().data_ptr()
    except IndexError:
        third = None
    assert third in {buffer.data_ptr() for buffer in filling} and not pool.sending, (
        "the oldest had given its buffer back already: collect the next one, as long as none is free"
    )
    pool = BufferPool(7, torch.zeros(0, dtype=torch.float16, device="meta"))
    further = [pool.take() for _ in range(3)][-1]
    assert (further.device.type, further.dtype, further.numel()) == ("meta", torch.float16, 7), (
        f"a pool of 7 elements in float16 on another device makes a buffer of {further.numel()} in {further.dtype} on "
        f"{further.device}: all as self.like has it, and self.numel"
    )
    held = {id(leaf) for leaf in tree_leaves([*vars(pool).values()]) if torch.is_tensor(leaf)}
    assert id(further) not in held, "a buffer that was taken is still among the pool's attributes: the bucket has it"
