"""course_lib.checkpoint.chunks against slicing, and small functions: save_interval, fitted, drop_tokens."""

import dataclasses
import itertools
import math
import random

import pytest
import torch
from torch import nn

from course_lib.checkpoint.chunks import Chunk, fill, local_chunks, span_chunks
from course_lib.checkpoint.noise import drop_tokens
from course_lib.checkpoint.save_interval import lost_share, save_interval
from course_lib.expert_parallel.nested_shards import shard_nested
from course_lib.five_d.layouts import Layout, fitted
from course_lib.single_gpu.placement import FlatShard, placement_of
from course_lib.tensor_parallel.shards import TensorShard, shard_parameter
from course_lib.zero.shards import FlatLayout

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (1, 1, 1), (2, 3, 2, 2), (2, 1, 3, 1, 2)]


class Group:
    """What a cut asks of a process group."""

    def __init__(self, rank: int, size: int):
        self.of = rank, size

    def rank(self) -> int:
        return self.of[0]

    def size(self) -> int:
        return self.of[1]


def numbered(*shape: int) -> torch.Tensor:
    """Each element is its own number in the order of memory."""
    return torch.arange(math.prod(shape)).view(shape)


def inside(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))


# Spans.


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_of_every_span_are_its_elements_in_order(shape):
    """All spans of a tensor. Only the empty ones have no chunk; no chunk is empty; there are at most 2 d - 1."""
    whole = numbered(*shape)
    for first, last in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        chunks = span_chunks(shape, first, last)
        values = [whole[inside(*chunk)].flatten() for chunk in chunks]
        found = torch.cat(values) if values else whole.new_empty(0)
        assert found.tolist() == list(range(first, last)), (first, last, chunks)
        assert all(len(offsets) == len(sizes) == len(shape) for offsets, sizes in chunks)
        assert all(math.prod(sizes) > 0 for _, sizes in chunks)
        assert len(chunks) <= max(1, 2 * len(shape) - 1), (first, last, chunks)


def test_the_bound_on_chunks_is_reached_and_full_tensors_are_one_chunk():
    for d in range(1, 6):
        shape = (3,) * d
        assert len(span_chunks(shape, 1, 3**d - 1)) == 2 * d - 1
        assert span_chunks(shape, 0, 3**d) == [((0,) * d, shape)]


def test_spans_before_the_first_and_after_the_last_element_are_empty():
    assert span_chunks((0, 3), 0, 0) == span_chunks((3, 0), 0, 0) == span_chunks((4,), 3, 2) == []


# Weights.


def check_chunks(chunks: list[Chunk], whole: torch.Tensor, values: torch.Tensor) -> None:
    """Assert that each chunk has its elements of the full tensor, and that the chunks are views of all of `values`."""
    for chunk in chunks:
        assert chunk.full_shape == tuple(whole.shape)
        assert torch.equal(chunk.values, whole[inside(chunk.offsets, tuple(chunk.values.shape))])
        assert chunk.values.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    assert sum(chunk.values.numel() for chunk in chunks) == values.numel()


@pytest.mark.parametrize("dim, ranks", [(0, 2), (0, 4), (1, 3), (-1, 2), (2, 5), (-3, 8)])
def test_chunks_of_a_split_weight(dim, ranks):
    """Along any dimension, counted from either end; more ranks than indices leave the last ones without a chunk."""
    whole = numbered(6, 5, 4).float()
    for rank in range(ranks):
        shard = TensorShard.of(whole.shape[dim], Group(rank, ranks), dim)
        weight = shard_parameter(nn.Parameter(whole), shard)
        chunks = local_chunks(weight, weight.detach())
        check_chunks(chunks, whole, weight.detach())
        assert len(chunks) == (weight.numel() > 0)


NESTED = [[(2, 0), (2, 0)], [(2, 0), (3, 1)], [(2, 0), (2, 0), (2, 1)], [(3, -1), (2, 0)], [(2, 1), (2, -2)]]


@pytest.mark.parametrize("cuts", NESTED)
def test_chunks_of_shards_of_shards_make_up_the_full_tensor(cuts):
    """As experts are cut: over nodes, over ranks, along their width."""
    whole, seen = numbered(8, 6, 3).float(), torch.zeros(8, 6, 3)
    for places in itertools.product(*(range(n) for n, _ in cuts)):
        groups = [(Group(place, n), dim) for place, (n, dim) in zip(places, cuts, strict=True)]
        weight = shard_nested(nn.Parameter(whole), groups)
        chunks = local_chunks(weight, weight.detach())
        check_chunks(chunks, whole, weight.detach())
        for chunk in chunks:
            seen[inside(chunk.offsets, tuple(chunk.values.shape))] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("cuts", [[], [(2, 0)], [(3, 1)], *NESTED])
@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_chunks_of_split_weights_that_zero_divides_make_up_the_full_tensor(cuts, ranks):
    """Cut, laid end to end with others, dealt out as ZeRO does: with the span as an argument, or as the weight's."""
    wholes = [numbered(4, 6).float(), numbered(8, 6, 3).float(), numbered(5).float()]
    seen = [torch.zeros_like(whole) for whole in wholes]
    for places in itertools.product(*(range(n) for n, _ in cuts)):
        groups = [(Group(place, n), dim) for place, (n, dim) in zip(places, cuts, strict=True)]
        weights = [nn.Parameter(whole) for whole in wholes]
        weights[1] = shard_nested(weights[1], groups) if groups else weights[1]
        for rank in range(ranks):
            layout = FlatLayout(weights, Group(rank, ranks))
            pieces = layout.local_views(layout.shard_of([weight.detach() for weight in weights]))
            for i, (weight, piece) in enumerate(zip(weights, pieces, strict=True)):
                chunks = local_chunks(weight, piece, layout.span(i))
                check_chunks(chunks, wholes[i], piece)
                for chunk in chunks:
                    seen[i][inside(chunk.offsets, tuple(chunk.values.shape))] += 1
                dealt = nn.Parameter(piece)
                flat = FlatShard(layout.group, layout.span(i), weight.shape)
                dealt.placement = dataclasses.replace(placement_of(weight), flat_shard=flat)
                again = local_chunks(dealt, dealt.detach())
                assert [chunk[:2] for chunk in again] == [chunk[:2] for chunk in chunks]
    copies = math.prod(n for n, _ in cuts)  # of the weights that are not cut
    assert [count.unique().tolist() for count in seen] == [[copies], [1], [copies]]


# From any cut to any other.


def cut_into(whole: torch.Tensor, how: tuple) -> list[Chunk]:
    """Return chunks that make up the full tensor: spans of so many elements, or slices along a dimension; copied."""
    kind, size, dim = how
    if kind == "spans":
        firsts = range(0, whole.numel(), size)
        found = [
            b for first in firsts for b in span_chunks(tuple(whole.shape), first, min(first + size, whole.numel()))
        ]
    else:
        firsts = range(0, whole.shape[dim], size)
        found = []
        for first in firsts:
            offsets, sizes = [0] * whole.dim(), list(whole.shape)
            offsets[dim], sizes[dim] = first, min(size, whole.shape[dim] - first)
            found.append((tuple(offsets), tuple(sizes)))
    return [Chunk(offsets, tuple(whole.shape), whole[inside(offsets, sizes)].clone()) for offsets, sizes in found]


CUTS = [("spans", 1000, 0), ("spans", 7, 0), ("spans", 31, 0), ("slices", 2, 0), ("slices", 3, 1), ("slices", 1, 2)]


@pytest.mark.parametrize("saved, wanted", itertools.product(CUTS, CUTS))
def test_fill_from_any_cut_to_any_other(saved, wanted):
    whole = torch.randn(5, 7, 3)
    chunks = cut_into(whole, wanted)
    for chunk in chunks:
        chunk.values.fill_(torch.nan)
    fill(chunks, cut_into(whole, saved))
    for chunk in chunks:
        assert torch.equal(chunk.values, whole[inside(chunk.offsets, tuple(chunk.values.shape))])


def test_fill_leaves_alone_what_was_not_saved():
    whole = numbered(4, 6)
    target = torch.full((4, 6), -1)
    fill([Chunk((0, 0), (4, 6), target)], [Chunk((1, 2), (4, 6), whole[1:3, 2:5].clone())])
    expected = torch.full((4, 6), -1)
    expected[1:3, 2:5] = whole[1:3, 2:5]
    assert torch.equal(target, expected)
    counter = torch.zeros(())
    fill([Chunk((), (), counter)], [Chunk((), (), torch.tensor(7.0))])
    assert counter == 7


# How often to save.


@pytest.mark.parametrize("save_s, mtbf_s", [(1, 3600), (10, 10_000), (60, 86_400), (30, 1e6)])
@pytest.mark.parametrize("restart_s", [0.0, 300.0])
def test_least_is_lost_at_youngs_interval(save_s, mtbf_s, restart_s):
    """Within a per cent of the least that any interval loses; that is about the square root of 2 save / mtbf."""
    tried = [save_s * 1.02**i for i in range(1200)]
    least = min(lost_share(each, save_s, mtbf_s, restart_s) for each in tried if each < 3 * mtbf_s)
    found = lost_share(save_interval(save_s, mtbf_s), save_s, mtbf_s, restart_s)
    assert 0.999 * least <= found <= 1.01 * least  # between two of those tried may be a better one
    if restart_s == 0:
        assert found == pytest.approx(math.sqrt(2 * save_s / mtbf_s), rel=0.1)


def test_what_is_lost_grows_with_each_cost():
    """No failures: the saves alone are lost. A share is between 0 and 1, larger with failures, saves and restarts."""
    for interval, save in ((100, 5), (1000, 1), (50, 50)):
        assert lost_share(interval, save, 1e9) == pytest.approx(save / (interval + save), rel=1e-3)
        shares = [lost_share(interval, save, mtbf) for mtbf in (100, 1000, 1e4, 1e6)]
        assert shares == sorted(shares, reverse=True) and 0 < shares[-1] < shares[0] < 1
        assert lost_share(interval, 2 * save, 1000) > lost_share(interval, save, 1000)
        assert lost_share(interval, save, 1000, 60) > lost_share(interval, save, 1000)
    assert save_interval(4 * 7.0, 1000) == pytest.approx(2 * save_interval(7.0, 1000))
    assert save_interval(7.0, 4 * 1000) == pytest.approx(2 * save_interval(7.0, 1000))


def test_lost_share_is_that_of_runs_with_failures_drawn_at_random():
    """A run of 20 000 intervals: work is lost back to the last save, and a failure may come in a restart as well."""
    interval, save, mtbf, restart = 50.0, 4.0, 120.0, 10.0
    draw = random.Random(0)
    gaps = iter(lambda: draw.expovariate(1 / mtbf), None)
    took, left, done = 0.0, next(gaps), 0
    while done < 20_000:
        if left >= interval + save:
            took, left, done = took + interval + save, left - interval - save, done + 1
            continue
        took, left = took + left, next(gaps)
        while left < restart:
            took, left = took + left, next(gaps)
        took, left = took + restart, left - restart
    assert lost_share(interval, save, mtbf, restart) == pytest.approx(1 - done * interval / took, rel=0.02)


# Layouts of a job whose size changes.


@pytest.mark.parametrize(
    "words, ranks", [("dp4", 7), ("dp2,tp2,sp", 2), ("dp1,pp2,cp2", 16), ("dp8,pp2,zero3,keep", 4)]
)
def test_fitted_changes_dp_alone(words, ranks):
    before = Layout.parse(words)
    after = fitted(before, ranks)
    assert after.ranks == ranks
    assert {**vars(after), "dp": 0} == {**vars(before), "dp": 0}
    assert fitted(after, before.ranks) == before


@pytest.mark.parametrize("words, ranks", [("dp2,tp2", 3), ("pp2,cp2", 2), ("dp4,pp2,tp4", 12)])
def test_fitted_refuses_ranks_that_do_not_come_out(words, ranks):
    with pytest.raises(ValueError, match=rf"{ranks} ranks are not a multiple of the \d+ that {words} has beside dp"):
        fitted(Layout.parse(words), ranks)


@pytest.mark.parametrize(
    "words, ranks, fits",
    [
        ("dp8,zero3,rep4", 4, "dp4,zero3,rep2"),
        ("dp8,tp2,zero3,rep2", 24, "dp12,tp2,zero3,rep3"),
        ("dp4,zero3,rep2", 3, "dp3,zero3"),
        ("dp4,zero3,rep4", 6, "dp6,zero3,rep6"),
        ("dp4,zero3,rep2", 1, "dp1,zero3"),
        ("dp2,zero3", 4, "dp4,zero3"),
    ],
)
def test_fitted_keeps_the_size_of_a_group_of_replicas(words, ranks, fits):
    assert fitted(Layout.parse(words), ranks) == Layout.parse(fits)


# Tokens that are dropped.


def test_dropped_tokens_depend_on_the_seed_and_the_sample_alone():
    """However the samples are shared out in batches; another seed, and another sample, drop others."""
    inputs = torch.randint(97, (12, 40))
    before = inputs.clone()
    at_once = drop_tokens(inputs, 0.3, 97, 5, 100)
    assert torch.equal(inputs, before) and at_once.dtype == inputs.dtype
    for size in (1, 2, 3, 4, 6):
        parts = [drop_tokens(part, 0.3, 97, 5, 100 + i * size) for i, part in enumerate(inputs.split(size))]
        assert torch.equal(torch.cat(parts), at_once)
    same = torch.zeros(2, 400, dtype=torch.int64)
    one, other = drop_tokens(same, 0.5, 97, 5, 0)
    assert not torch.equal(one, other) and not torch.equal(one, drop_tokens(same, 0.5, 97, 6, 0)[0])


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_a_share_of_the_tokens_is_dropped_and_replaced_by_any(rate):
    inputs = torch.full((50, 400), 97)  # no token of the vocabulary: every replaced one is seen
    global_state = torch.random.get_rng_state()
    found = drop_tokens(inputs, rate, 97, 0, 0)
    assert torch.equal(torch.random.get_rng_state(), global_state)
    dropped = found != 97
    assert abs(dropped.float().mean().item() - rate) <= (0.01 if 0 < rate < 1 else 0)
    if rate:
        assert found[dropped].min() == 0 and found[dropped].max() == 96
        assert found[dropped].bincount(minlength=97).min() > 0
