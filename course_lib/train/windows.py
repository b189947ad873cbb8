"""A stream of tokens, cut into windows of `seq` inputs and their next tokens; and a shuffled order of the windows.

With document masks, positions restart at 0 where a document begins, and a document's last token has no target: no
document predicts the first token of the next one. The last window is padded. The padding has no targets, and with
masks it is a document of its own.

The order is a Feistel network (Luby and Rackoff 1988), a permutation of 2^(2k) numbers that is computed for one number
at a time: left, right = right, left xor hash(right, key), a few times. A result that is not below the number of windows
goes through it again, until it is (cycle walking), which leaves a permutation of the windows. It takes no memory, for
any number of windows.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import torch

from course_lib.recompute.modes import IGNORED
from course_lib.train.streams import TokenStream

FEISTEL_STEPS = 6


class Batch(NamedTuple):
    """inputs, targets: [b, s], int64; a target of IGNORED is not trained on. positions: [b, s], int64, or None for
    0 … s-1 in each sequence.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Return a hash of each number, uint64 (the finalizer of splitmix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def shuffled(numbers: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Return the images of `numbers` [n], below `size`, under the permutation of 0 … size-1 that `key` selects."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    round_keys = np.frombuffer(hashlib.blake2b(repr(key).encode(), digest_size=8 * FEISTEL_STEPS).digest(), "<u8")

    def network(numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> half, numbers & mask
        for round_key in round_keys:
            left, right = right, left ^ (mixed(right + round_key) & mask)
        return (left << half) | right

    images = network(numbers.astype(np.uint64))
    while (outside := images >= size).any():
        images[outside] = network(images[outside])
    return images.astype(np.int64)


class Windows:
    """The windows first … first + count - 1 of a stream; without `count`, all from `first` on. masks: whether its
    documents are masked from each other.
    """

    def __init__(self, stream: TokenStream, seq: int, masks: bool, first: int = 0, count: int | None = None):
        self.stream, self.seq, self.masks, self.first = stream, seq, masks, first
        every = -(-max(stream.tokens - 1, 0) // seq)
        self.count = every - first if count is None else min(count, every - first)

    @property
    def targets(self) -> int:
        """The number of tokens to predict."""
        start, stop = self.first * self.seq, (self.first + self.count) * self.seq
        if not self.masks:
            return min(stop, self.stream.tokens - 1) - start
        return min(stop, self.stream.tokens) - start - self.stream.count_ends(start, stop)

    def most_documents(self) -> int:
        """Return the largest number of documents in a window, the padding included; 1 without masks."""
        most, last, in_last = 0, -1, 0  # the window in which the ends so far stop, and the ends in it
        start, stop = self.first * self.seq, (self.first + self.count) * self.seq
        for ends in self.stream.ends_in(start, stop) if self.masks else ():
            for begin in range(0, len(ends), 2**20):
                chunk = ends[begin : begin + 2**20]
                inside = chunk[(chunk % self.seq != 0) & (chunk < stop)] // self.seq
                windows, counts = np.unique(inside, return_counts=True)
                if not len(windows):
                    continue
                counts[0] += in_last if windows[0] == last else 0
                most, last, in_last = max(most, int(counts.max())), int(windows[-1]), int(counts[-1])
        return most + 1

    def fill(self, number: int, inputs: np.ndarray, targets: np.ndarray, starts: np.ndarray) -> None:
        """Write window `number` to inputs, 0 before, and targets, IGNORED before, each [s]. starts: [s], 0 before; gets
        the position of each document's first token.
        """
        start = (self.first + number) * self.seq
        tokens = self.stream.read(start, start + self.seq + 1)
        inputs[: len(tokens)] = tokens[: self.seq]
        targets[: len(tokens) - 1] = tokens[1:]
        for ends in self.stream.ends_in(start, start + self.seq) if self.masks else ():
            targets[ends - start - 1] = IGNORED
            inside = ends[ends < start + self.seq] - start
            starts[inside] = inside


def batch_of(rows: list[tuple[Windows, int]], seq: int, masks: bool, size: int | None = None) -> Batch:
    """Return a batch of windows, by number; padding rows without targets fill it up to `size` rows."""
    size = len(rows) if size is None else size
    inputs, starts = (np.zeros((size, seq), np.int64) for _ in range(2))
    targets = np.full((size, seq), IGNORED, np.int64)
    for row, (windows, number) in enumerate(rows):
        windows.fill(number, inputs[row], targets[row], starts[row])
    positions = torch.from_numpy(np.arange(seq) - np.maximum.accumulate(starts, axis=1)) if masks else None
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), positions)
