"""course_lib.train: packed batches are one order of windows, whatever the number of ranks, and no token is lost. Needs
no GPU.
"""

import json
import random

import numpy as np
import pytest
import torch

from course_lib.recompute.modes import IGNORED
from course_lib.train.batches import HeldOut, Mixture, PackedBatches, next_sources
from course_lib.train.settings import Settings
from course_lib.train.streams import Shard, TokenStream
from course_lib.train.text import open_text
from course_lib.train.windows import Windows, batch_of, shuffled

NONE = IGNORED


def stream_of(*documents: list[int], per_shard: int = 2) -> TokenStream:
    """A stream of documents, a few of them in each shard."""
    shards = []
    for first in range(0, len(documents), per_shard):
        chosen = documents[first : first + per_shard]
        ends = np.cumsum([len(document) for document in chosen])
        shards.append(Shard(np.concatenate(chosen).astype(np.uint16), ends.astype(np.int64)))
    return TokenStream("documents", shards, 0, [])


def numbered(lengths: list[int], first: int = 0) -> TokenStream:
    """A stream of documents of these lengths, whose tokens are first, first + 1, first + 2, …"""
    bounds = first + np.cumsum([0, *lengths])
    return stream_of(*[list(range(start, end)) for start, end in zip(bounds, bounds[1:], strict=False)])


def mixture(*streams: TokenStream, seq: int, shares: list[float] | None = None, masks: bool = True) -> Mixture:
    shares = shares or [1 / len(streams)] * len(streams)
    return Mixture([Windows(stream, seq, masks) for stream in streams], shares, seq, masks, 0, 0)


# The order.


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 100, 1000, 4097])
def test_the_shuffle_is_a_permutation(size):
    orders = [shuffled(np.arange(size), size, *key).tolist() for key in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1))]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert size < 100 or len({*map(tuple, orders), tuple(range(size))}) == 5
    assert shuffled(np.arange(size), size, 0, 0, 0).tolist() == orders[0]


def test_the_shuffle_is_even():
    """Each number goes to each position about equally often; neighbors do not stay neighbors."""
    orders = np.stack([shuffled(np.arange(7), 7, seed, 0, 0) for seed in range(3_500)])
    counts = np.array([[(orders[:, position] == number).sum() for number in range(7)] for position in range(7)])
    assert abs(counts - 500).max() < 110
    order = shuffled(np.arange(100_000), 100_000, 0, 0, 0)
    assert (np.abs(np.diff(order)) == 1).sum() < 20 and abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02


def test_the_shuffle_of_many_windows_takes_no_memory():
    size = 10**12 + 7
    images = shuffled(np.arange(1000) + size - 1000, size, -(10**30), 3, 0)
    assert len({*images.tolist()}) == 1000 and images.min() >= 0 and images.max() < size


def test_every_prefix_has_each_source_within_one_sample_of_its_share():
    generator = random.Random(0)
    cases = [[0.5, 0.5], [0.7, 0.3], [1 / 3] * 3, [0.9, 0.05, 0.05], [1e-4, 1 - 1e-4], [1.0], [0.125] * 8]
    for count in range(2, 9):
        weights = [generator.random() ** 3 + 1e-3 for _ in range(count)]
        cases.append([weight / sum(weights) for weight in weights])
    for shares in cases:
        drawn, chosen = [0] * len(shares), []
        for count in (1, 2, 700, 1297):  # in calls of any length
            chosen += next_sources(shares, drawn, count)
        sums = np.cumsum(np.eye(len(shares))[chosen], axis=0)  # [samples, sources]
        assert sums[-1].tolist() == drawn
        assert np.abs(sums - np.outer(np.arange(1, 2001), shares)).max() < 1


# Windows.


def test_masks_positions_and_targets_by_hand():
    stream = stream_of([1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12])
    windows = Windows(stream, 5, masks=True)
    inputs, targets, positions = batch_of([(windows, number) for number in range(3)], 5, True)
    assert inputs.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 0, 0, 0]]
    assert targets.tolist() == [[2, 3, NONE, NONE, 6], [7, 8, 9, 10, NONE], [12, NONE, NONE, NONE, NONE]]
    assert positions.tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]
    assert windows.count == 3 and windows.most_documents() == 3 and windows.targets == 8
    assert {inputs.dtype, targets.dtype, positions.dtype} == {torch.int64}


def test_without_masks_documents_predict_each_other():
    windows = Windows(stream_of([1, 2, 3], [4], [5, 6, 7]), 4, masks=False)
    inputs, targets, positions = batch_of([(windows, 0), (windows, 1)], 4, False)
    assert inputs.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]] and positions is None
    assert targets.tolist() == [[2, 3, 4, 5], [6, 7, NONE, NONE]]
    assert windows.most_documents() == 1 and windows.targets == 6


@pytest.mark.parametrize("masks", [True, False])
def test_windows_of_random_documents(masks):
    """No token is lost, and the batches have as many targets and documents as `Windows` counts."""
    generator = random.Random(1)
    for seq in (1, 2, 3, 8, 50):
        for _ in range(10):
            lengths = [generator.choice([1, 1, 2, 3, 10, 40]) for _ in range(generator.randint(1, 12))]
            stream = numbered(lengths, first=1)
            windows = Windows(stream, seq, masks)
            batch = batch_of([(windows, number) for number in range(windows.count)], seq, masks)
            inputs, targets = batch.inputs.flatten().tolist(), batch.targets.flatten().tolist()
            pairs = [pair for pair in zip(inputs, targets, strict=True) if pair[1] != NONE]
            ends = set(np.cumsum(lengths).tolist())
            expected = [(n, n + 1) for n in range(1, stream.tokens) if not masks or n not in ends]
            assert pairs == expected and windows.targets == len(expected)
            documents = (batch.positions == 0).sum(1) if masks else torch.ones(windows.count)
            most = int(documents.max()) if windows.count else 1
            assert windows.most_documents() == most
            halves = Windows(stream, seq, masks, 0, windows.count // 2), Windows(stream, seq, masks, windows.count // 2)
            assert sum(half.targets for half in halves) == len(expected)
            assert max(half.most_documents() for half in halves) == most


# Batches of ranks.


def rows_of(batches: list[PackedBatches]) -> list[list[list[int]]]:
    """The next inputs, targets and positions of all ranks, in the global order."""
    parts = [next(each) for each in batches]
    return torch.cat([torch.stack(part, 1) for part in parts]).tolist()


def ranks_of(text: Mixture, batch: int, ranks: int, state: dict | None = None) -> list[PackedBatches]:
    batches = [PackedBatches(text, batch // ranks, rank, ranks, seed=5) for rank in range(ranks)]
    for each in batches if state else ():
        each.load_state_dict(json.loads(json.dumps(state)))
    return batches


SOURCES = [numbered([9, 14, 3, 30]), numbered([50], 1000), numbered([4] * 30, 2000)]
MIXED = mixture(*SOURCES, seq=6, shares=[0.5, 0.2, 0.3])


def test_the_order_is_that_of_one_rank_also_with_other_ranks_and_batches():
    """1, 2 and 4 ranks; a batch that grows; a stop in between, after which the ranks are others."""
    ramp = [4, 4, 8, 8, 12, 4, 16]
    expected = []
    (one,) = ranks_of(MIXED, 4, 1)
    for one.batch in ramp:
        expected += rows_of([one])
    assert one.position == sum(ramp)
    for ranks in ([1, 2, 4, 1, 2, 2, 4], [4] * 7, [2, 2, 2, 4, 4, 4, 1]):
        state, rows, running = None, [], []
        for size, batch in zip(ranks, ramp, strict=True):
            if len(running) != size:
                running = ranks_of(MIXED, batch, size, state)
            for each in running:
                each.batch = batch // size
            rows += rows_of(running)
            state = running[-1].state_dict()
            assert all(each.state_dict() == state for each in running)
        assert rows == expected


def test_every_epoch_of_a_source_has_each_window_once_in_another_order():
    (batches,) = ranks_of(mixture(SOURCES[1], seq=6), 3, 1)
    count = batches.text.windows[0].count
    assert count % 3 == 0
    epochs = [[row[0][0] for _ in range(count // 3) for row in rows_of([batches])] for _ in range(4)]
    assert all(sorted(epoch) == list(range(1000, 1050, 6)) for epoch in epochs)
    assert len({*map(tuple, epochs)}) == 4


def test_weights_are_those_of_the_samples():
    (batches,) = ranks_of(MIXED, 50, 1)
    firsts = [row[0][0] for _ in range(4) for row in rows_of([batches])]
    assert np.bincount([first // 1000 for first in firsts]).tolist() == [100, 40, 60]


def test_the_seed_decides_and_a_state_brings_it_back():
    one, two = (PackedBatches(MIXED, 20, seed=seed) for seed in (0, 1))
    state = one.state_dict()
    first = rows_of([one])
    assert first != rows_of([two])
    two.load_state_dict(state)
    assert rows_of([two]) == first
    with pytest.raises(ValueError, match="the state is of 3 sources of text, and there are 1"):
        PackedBatches(mixture(SOURCES[0], seq=6), 1).load_state_dict(state)


@pytest.mark.parametrize("batch, rank, ranks", [(0, 0, 1), (1, 1, 1), (1, -1, 2)])
def test_impossible_batches_and_ranks_are_refused(batch, rank, ranks):
    with pytest.raises(ValueError, match=f"batch {batch}, rank {rank} of {ranks}"):
        PackedBatches(MIXED, batch, rank, ranks)


# Held-out text, and the text of settings.


def test_held_out_windows_are_spread_over_the_sources_by_weight():
    held = [Windows(numbered([101]), 10, True), Windows(numbered([21], 1000), 10, True)]
    for limit, counts in ((4, [2, 2]), (8, [6, 2]), (100, [10, 2])):
        held_out = HeldOut(held, [0.5, 0.5], limit)
        batch = held_out.sequences(0, limit)
        firsts = batch.inputs[: held_out.count, 0]
        assert held_out.count == sum(counts)
        assert [int((firsts < 1000).sum()), int((firsts >= 1000).sum())] == counts
        assert len({*firsts.tolist()}) == held_out.count
        assert (batch.targets[held_out.count :] == NONE).all() and len(batch.inputs) == limit
        parts = [held_out.sequences(first, 3) for first in range(0, limit, 3)]
        assert torch.equal(torch.cat([part.targets for part in parts])[:limit], batch.targets)
    assert sorted(HeldOut(held, [0.9, 0.1], 5).sequences(0, 5).inputs[:, 0].tolist()) == [0, 20, 40, 60, 80]


@pytest.fixture
def settings(tmp_path):
    made = Settings()
    made.data.cache, made.run.seq = str(tmp_path / "cache"), 10
    np.save(tmp_path / "a.npy", np.arange(1001))
    np.save(tmp_path / "b.npy", np.arange(2000, 2301))
    made.data.sources = [{"dataset": str(tmp_path / name)} for name in ("a.npy", "b.npy")]
    return made


def trained_on(text) -> set[int]:
    """The targets of several epochs."""
    batches = PackedBatches(text.train, 100)
    return {token for _ in range(10) for token in next(batches).targets.flatten().tolist()} - {NONE}


def test_the_end_of_each_source_is_held_out(settings):
    everything = {*range(1, 1001), *range(2001, 2301)}
    text = open_text(settings)
    assert text.held_out is None and trained_on(text) == everything and text.vocab == 2301
    assert text.train.tokens == 1302 and text.train.shares == [1001 / 1302, 301 / 1302]
    settings.evaluation.eval_every, settings.evaluation.eval_share = 5, 0.1
    text = open_text(settings)
    held = set(text.held_out.sequences(0, text.held_out.count).targets.flatten().tolist())
    assert text.held_out.count == 13 and held == {*range(901, 1001), *range(2271, 2301)}
    assert trained_on(text) == everything - held
    settings.evaluation.eval_sequences = 4
    text = open_text(settings)
    assert text.held_out.count == 4 and trained_on(text) == everything - held


def test_held_out_text_of_its_own(settings, tmp_path):
    np.save(tmp_path / "c.npy", np.arange(3000, 3100))
    everything, settings.evaluation.eval_dataset = trained_on(open_text(settings)), str(tmp_path / "c.npy")
    assert open_text(settings).held_out is None
    settings.evaluation.eval_every, settings.evaluation.eval_sequences = 1, 3
    text = open_text(settings)
    assert text.held_out.sequences(0, 3).inputs.flatten().tolist() == list(range(3000, 3030))
    assert trained_on(text) == everything and text.vocab == 3100


def test_the_fingerprint_is_that_of_the_text(settings, tmp_path):
    first = open_text(settings).train.fingerprint
    (tmp_path / "moved").mkdir()
    for name in ("a.npy", "b.npy"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    settings.data.sources = [{"dataset": str(tmp_path / "moved" / name)} for name in ("a.npy", "b.npy")]
    assert open_text(settings).train.fingerprint == first
    changed = np.arange(1001)
    changed[500] = 1
    np.save(tmp_path / "moved" / "a.npy", changed)
    assert open_text(settings).train.fingerprint != first


@pytest.mark.parametrize("masks", [True, False])
def test_a_text_without_a_token_to_predict_is_refused(settings, tmp_path, masks):
    settings.data.document_masks, settings.data.sources = masks, []
    settings.data.dataset = str(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.array([7]))
    with pytest.raises(ValueError, match=r"a.npy: 1 tokens in 1 documents leave no token to predict in 0 sequences$"):
        open_text(settings)
    np.save(tmp_path / "a.npy", np.array([0, 0, 0]))
    settings.data.end_token = 0
    if masks:
        with pytest.raises(ValueError, match="3 tokens in 3 documents leave no token to predict in 1 sequences$"):
            open_text(settings)
    np.save(tmp_path / "a.npy", np.array([0, 0, 3, 0]))
    batch = next(PackedBatches(open_text(settings).train, 2))
    assert (batch.targets != NONE).sum() == (2 if masks else 6)
    settings.evaluation.eval_every = 1
    with pytest.raises(
        ValueError, match="4 tokens fill 1 sequence of 10, which cannot be split into training and held"
    ):
        open_text(settings)
