"""Batches of packed sequences from several sources, in one order that depends on no number of ranks; held-out text.

Sample n comes from the source that Tijdeman's rule (1980, the chairman assignment problem) names: among the sources
that are behind their share, the one that must be drawn soonest. After any number of samples, each source has been drawn
within one sample of its share.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, NamedTuple

import numpy as np

from course_lib.train.windows import Batch, Windows, batch_of, shuffled


def next_sources(shares: list[float], drawn: list[int], count: int) -> list[int]:
    """Return the sources of the next `count` samples, and count them in `drawn`, the samples of each source so far.

    shares: of the sources, 1 in all.
    """
    if len(shares) == 1:
        drawn[0] += count
        return [0] * count
    slack = 1 / (2 * len(shares) - 2)
    order = []
    for n in range(sum(drawn), sum(drawn) + count):
        best, soonest = 0, math.inf
        for source, share in enumerate(shares):
            behind = n * share - drawn[source]
            deadline = (1 - slack - behind) / share
            if behind + share > slack - 1e-6 and deadline < soonest:  # 1e-6: n * share is rounded
                best, soonest = source, deadline
        drawn[best] += 1
        order.append(best)
    return order


class Mixture(NamedTuple):
    """The windows to train on, by source, and each source's share of the samples.

    tokens: of all sources; max_documents: at most in a window, of training or held out; fingerprint: identifies the
    text and how it is cut, whatever the machine.
    """

    windows: list[Windows]
    shares: list[float]
    seq: int
    masks: bool
    tokens: int
    max_documents: int

    @property
    def fingerprint(self) -> list:
        """The number of tokens, and 16 hexadecimal digits."""
        texts = [(each.stream.tokens, each.stream.documents, each.stream.checksum, each.count) for each in self.windows]
        identity = json.dumps([texts, self.shares, self.seq, self.masks])
        return [self.tokens, hashlib.sha256(identity.encode()).hexdigest()[:16]]


class PackedBatches:
    """Endless batches of `text` for one rank; `batch`, its sequences per step, may change between steps.

    Rank r of N has its share of one global order of samples, which depends on the seed alone: a run can continue on
    another number of ranks, with the next sample. Each source's windows are shuffled anew in each of its epochs.
    `position`: the samples that all ranks together have consumed. Raises ValueError for impossible batches or ranks.
    """

    def __init__(self, text: Mixture, batch: int, rank: int = 0, world_size: int = 1, seed: int = 0):
        self.text, self.batch, self.seq = text, batch, text.seq
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.drawn = [0] * len(text.windows)  # samples so far, by source
        self.tokens, self.max_documents, self.fingerprint = text.tokens, text.max_documents, text.fingerprint
        if batch < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"batch {batch}, rank {rank} of {world_size}: batch must be 1 or more, and rank below world_size"
            )

    @property
    def position(self) -> int:
        """Samples that all ranks together have consumed."""
        return sum(self.drawn)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that brings a run back to this sample, on any number of ranks."""
        return {"position": self.position, "seed": self.seed, "drawn": list(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the sample at which `state` was taken. Raises ValueError for another number of sources."""
        if len(state["drawn"]) != len(self.drawn):
            raise ValueError(f"the state is of {len(state['drawn'])} sources of text, and there are {len(self.drawn)}")
        self.seed, self.drawn = state["seed"], list(state["drawn"])

    def __iter__(self) -> PackedBatches:
        return self

    def __next__(self) -> Batch:
        """Return this rank's next sequences, and move `position` on by the samples of all ranks."""
        before, first = list(self.drawn), self.rank * self.batch
        sources = np.array(next_sources(self.text.shares, self.drawn, self.batch * self.world_size))
        rows: list[Any] = [None] * self.batch
        for source, windows in enumerate(self.text.windows):
            samples = np.flatnonzero(sources == source)
            epochs, numbers = np.divmod(before[source] + np.arange(len(samples)), windows.count)
            mine = (samples >= first) & (samples < first + self.batch)
            for epoch in np.unique(epochs[mine]):
                of_epoch = mine & (epochs == epoch)
                order = shuffled(numbers[of_epoch], windows.count, self.seed, int(epoch), source)
                for sample, number in zip(samples[of_epoch], order, strict=True):
                    rows[sample - first] = (windows, int(number))
        return batch_of(rows, self.seq, self.text.masks)


class HeldOut:
    """Windows that are not trained on, at most `limit`, in a fixed order: of each source its share, spread over its
    held-out windows. `count`: how many.
    """

    def __init__(self, held_out: list[Windows], shares: list[float], limit: int):
        left, drawn = [windows.count for windows in held_out], [0] * len(held_out)
        order: list[int] = []
        self.count = min(limit, sum(left))
        while len(order) < self.count:
            with_more = [source for source in range(len(left)) if drawn[source] < left[source]]
            order.append(min(with_more, key=lambda source: (drawn[source] + 1) / shares[source]))
            drawn[order[-1]] += 1
        taken = [
            iter(np.arange(each) * windows.count // max(each, 1)) for each, windows in zip(drawn, held_out, strict=True)
        ]
        self.rows = [(held_out[source], int(next(taken[source]))) for source in order]
        self.seq, self.masks = held_out[0].seq, held_out[0].masks

    def sequences(self, first: int, count: int) -> Batch:
        """Return the sequences first … first + count - 1; those beyond the last one are padding, without targets."""
        return batch_of(self.rows[first : first + count], self.seq, self.masks, count)
