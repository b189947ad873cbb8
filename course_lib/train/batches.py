"""Packed batches: windows of a stream of documents, in an order that does not depend on the number of ranks.

    inputs      a b c END d e          positions   0 1 2 3 0 1
    targets     b c END - e f          -: IGNORED, since no document predicts the next one

A stream is cut into windows of `seq` tokens; the last one is padded, so no token is left out. Several sources are mixed
by weight: sample n is from the source that is furthest behind its share. Windows are shuffled anew in each epoch by a
function of their number, which takes no memory: a Feistel network (Luby and Rackoff 1988) whose results beyond the
number of windows are put in again until they are within it (cycle walking; Black and Rogaway 2002).
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import torch

from course_lib.recompute.modes import IGNORED
from course_lib.train.shards import TokenStream


class Batch(NamedTuple):
    """inputs, targets: each [batch, seq], int64; positions: the same, None if documents are not masked."""

    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None


class Windows:
    """Windows first to last - 1 of a stream; masks: positions restart at each document."""

    def __init__(self, stream: TokenStream, seq: int, masks: bool, first: int = 0, last: int | None = None):
        self.stream, self.seq, self.masks, self.first = stream, seq, masks, first
        self.last = window_count(stream, seq) if last is None else last

    def __len__(self) -> int:
        return self.last - self.first

    def read(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return inputs, targets and positions of a window, [seq] each, int64."""
        seq, start = self.seq, (self.first + number) * self.seq
        stop = min(start + seq, len(self.stream) - 1)
        tokens = self.stream.tokens(start, stop + 1)
        inputs, targets = np.zeros(seq, np.int64), np.full(seq, IGNORED, np.int64)
        inputs[: stop - start], targets[: stop - start] = tokens[:-1], tokens[1:]
        places = np.arange(seq)
        if not self.masks:
            return inputs, targets, places
        ends = self.stream.ends(start, stop) - start
        targets[ends - 1] = IGNORED
        begins = np.zeros(seq, np.int64)
        ends = np.append(ends, stop - start)  # padding is a document of its own
        begins[ends[ends < seq]] = ends[ends < seq]
        return inputs, targets, places - np.maximum.accumulate(begins)


def window_count(stream: TokenStream, seq: int) -> int:
    """Return the number of windows of a stream: each of its tokens but the first is a target of one."""
    return -(-(len(stream) - 1) // seq)


def as_batch(rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]], masks: bool) -> Batch:
    """Return windows as a batch."""
    inputs, targets, positions = (torch.from_numpy(np.stack(each)) for each in zip(*rows, strict=True))
    return Batch(inputs, targets, positions if masks else None)


def shuffled(numbers: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return the images of numbers below `size`, int64, under a permutation of 0 … size - 1 that `key` chooses."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(zlib.crc32(f"{key} {i}".encode()) | zlib.crc32(f"{i} {key}".encode()) << 32) for i in range(6)]

    def once(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for each in keys:
            mixed = (right ^ each) * np.uint64(0x9E3779B97F4A7C15)  # modulo 2^64
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(32))) & mask)
        return (left << half) | right

    images = once(numbers.astype(np.uint64))
    while (outside := images >= size).any():
        images[outside] = once(images[outside])
    return images.astype(np.int64)


class PackedBatches:
    """Endless batches for one rank. sources: each with its weight; batch: sequences of this rank.

    The order depends on the seed alone. `position`: samples that all ranks together have consumed. Raises ValueError
    for a source without a window.
    """

    def __init__(
        self,
        sources: list[tuple[Windows, float]],
        batch: int,
        seq: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ):
        self.windows = [windows for windows, _ in sources]
        total = sum(weight for _, weight in sources)
        self.weights = [weight / total for _, weight in sources]
        self.batch, self.seq, self.rank, self.world_size, self.seed = batch, seq, rank, world_size, seed
        self.position, self.drawn = 0, [0] * len(sources)

    @property
    def tokens(self) -> int:
        """Number of tokens in one epoch of all sources."""
        return sum(min(len(each) * each.seq, len(each.stream)) for each in self.windows)

    @property
    def fingerprint(self) -> list:
        """The number of tokens, and a checksum, which identify the text, its sources' weights and held-out part."""
        sums = [
            (len(w), w.seq, w.stream.checksum(), weight) for w, weight in zip(self.windows, self.weights, strict=True)
        ]
        return [self.tokens, zlib.crc32(repr(sums).encode())]

    def state_dict(self) -> dict:
        """Return the state that brings a run back to this sample, on any number of ranks."""
        return {"position": self.position, "seed": self.seed, "drawn": list(self.drawn)}

    def load_state_dict(self, state: dict) -> None:
        """Continue from the sample at which `state` was taken."""
        self.position, self.seed, self.drawn = state["position"], state["seed"], list(state["drawn"])

    def draw(self) -> tuple[int, int]:
        """Return the source of the next sample, and how many of its samples came before."""
        position = sum(self.drawn) + 1
        behind = [weight * position - drawn for weight, drawn in zip(self.weights, self.drawn, strict=True)]
        source = max(range(len(behind)), key=behind.__getitem__)
        self.drawn[source] += 1
        return source, self.drawn[source] - 1

    def window_of(self, source: int, number: int) -> int:
        """Return the window of a source's sample: all of them in each epoch, in another order."""
        epoch, within = divmod(number, len(self.windows[source]))
        key = zlib.crc32(f"{self.seed} {epoch} {source}".encode())
        return int(shuffled(np.array([within]), len(self.windows[source]), key)[0])

    def __iter__(self) -> PackedBatches:
        return self

    def __next__(self) -> Batch:
        """Return this rank's next batch, and move `position` on by the samples of all ranks."""
        samples = [self.draw() for _ in range(self.batch * self.world_size)]
        self.position += len(samples)
        local = samples[self.rank * self.batch : (self.rank + 1) * self.batch]
        rows = [self.windows[source].read(self.window_of(source, number)) for source, number in local]
        return as_batch(rows, self.windows[0].masks)


class HeldOut:
    """Windows that are not trained on, at most `most`, from several sources in turn."""

    def __init__(self, sources: list[Windows], most: int):
        turns = [(number, windows) for number in range(most) for windows in sources if number < len(windows)]
        self.rows, self.seq, self.masks = turns[:most], sources[0].seq, sources[0].masks
        self.count = len(self.rows)

    def sequences(self, first: int, count: int) -> Batch:
        """Return `count` sequences from number `first` on; those beyond the last are padding, with IGNORED targets."""
        rows = [windows.read(number) for number, windows in self.rows[first : first + count]]
        blank = np.zeros(self.seq, np.int64), np.full(self.seq, IGNORED, np.int64), np.arange(self.seq)
        return as_batch([*rows, *[blank] * (count - len(rows))], self.masks)
