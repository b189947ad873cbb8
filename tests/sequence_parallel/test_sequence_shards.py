"""course_lib.sequence_parallel.shards: which tokens a rank has, in one process and on one to four ranks. CPU, gloo."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from calls import said
from course_lib.sequence_parallel.shards import (
    ORDERS,
    chunks_of,
    from_order,
    from_zigzag,
    join_by_rank,
    local_positions,
    shard_sequence,
    split_by_rank,
    start_gather,
    start_reduce_scatter,
    to_order,
    to_zigzag,
    unshard_sequence,
    zigzag_shard,
    zigzag_unshard,
)
from split_models import group_of


def rank_of(rank: int, ranks: int) -> SimpleNamespace:
    """What shard_sequence asks of a group."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: ranks)


def test_two_ranks_by_hand():
    tokens = torch.arange(8)[None]
    assert [zigzag_shard(tokens, rank_of(r, 2)).tolist() for r in (0, 1)] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert shard_sequence(tokens, rank_of(1, 2), "contiguous").tolist() == [[4, 5, 6, 7]]
    assert to_zigzag(tokens, 2).tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]]
    assert local_positions(4, rank_of(0, 2)).tolist() == [0, 1, 6, 7]
    assert local_positions(4, rank_of(1, 2), "contiguous").tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_parts_are_chunks_and_make_up_the_whole(order, ranks):
    """Of whole numbers, 16 bits and booleans, in one dimension more or less, and of one token a chunk."""
    numbers = [chunks_of(r, ranks, order) for r in range(ranks)]
    chunks = ranks * len(numbers[0])
    assert sorted(sum(numbers, ())) == list(range(chunks))
    assert all(list(own) == sorted(own) for own in numbers)
    for size, batch, rest, dtype in ((1, 1, (), torch.int64), (3, 2, (5,), torch.bfloat16), (2, 3, (2, 3), torch.bool)):
        whole = torch.randn(batch, chunks * size, *rest, generator=torch.Generator().manual_seed(size)).mul(9).to(dtype)
        parts = [shard_sequence(whole, rank_of(r, ranks), order) for r in range(ranks)]
        for own, part in zip(numbers, parts, strict=True):
            assert torch.equal(part, torch.cat([whole.split(size, 1)[chunk] for chunk in own], 1))
            assert part.is_contiguous() and part.dtype == dtype
        assert torch.equal(from_order(join_by_rank(torch.stack(parts)), ranks, order), whole)
        assert torch.equal(from_order(to_order(whole, ranks, order), ranks, order), whole)
        if order == "zigzag":
            assert torch.equal(from_zigzag(to_zigzag(whole, ranks), ranks), whole)
        assert torch.equal(join_by_rank(split_by_rank(whole, ranks)), whole)


def test_by_rank_is_a_view():
    whole = torch.zeros(2, 6, 3)
    split_by_rank(whole, 3)[1, 0] = 1
    assert whole[0, 2:4].eq(1).all() and whole.sum() == 6


def test_what_cannot_be_split_is_one_line():
    tokens, two = torch.arange(6)[None], rank_of(0, 2)
    assert said(lambda: shard_sequence(tokens, two)) == (
        "ValueError: a sequence of 6 tokens cannot be split into 4 equal shards"
    )
    assert said(lambda: shard_sequence(tokens[:, :5], two, "contiguous")) == (
        "ValueError: a sequence of 5 tokens cannot be split into 2 equal shards"
    )
    assert said(lambda: local_positions(3, two)).startswith("ValueError: a sequence of 6 tokens")
    assert (
        said(lambda: split_by_rank(tokens, 4))
        == "ValueError: a sequence of 6 tokens cannot be split into 4 equal shards"
    )
    for call in (lambda: chunks_of(0, 2, "striped"), lambda: shard_sequence(tokens, two, "striped")):
        assert said(call) == "ValueError: order 'striped': it is one of zigzag, contiguous"


def round_trips(n: int) -> list[str]:
    """On a rank: what is wrong with parts that are sent."""
    group, wrong = group_of(n), []
    rank, size = group.rank(), group.size()
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.float64):
        whole = torch.randn(2, 12 * size, 3, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
        for order in ORDERS:
            part = shard_sequence(whole, group, order)
            wrong += [f"{order} {dtype}"] * (not torch.equal(unshard_sequence(part, group, order), whole))
            strided = part.transpose(0, 1).contiguous().transpose(0, 1)
            wrong += ["strided"] * (not torch.equal(unshard_sequence(strided, group, order), whole))
            places = local_positions(12, group, order)
            wrong += ["positions"] * (not torch.equal(whole[:, places], part))
        wrong += ["zigzag"] * (not torch.equal(zigzag_unshard(zigzag_shard(whole, group), group), whole))
        pieces, work = start_gather(part.transpose(1, 2), group)
        work.wait()
        wrong += ["gather"] * (not torch.equal(pieces.transpose(2, 3), split_by_rank(whole, size)))
        if dtype != torch.int64:
            given = split_by_rank(whole, size) * (rank + 1)
            before = given.clone()
            own, work = start_reduce_scatter(given, group)
            work.wait()
            expected = split_by_rank(whole, size)[rank].double() * sum(range(1, size + 1))
            wrong += [f"sum {dtype}"] * (not torch.allclose(own.double(), expected, rtol=2e-2, atol=1e-1))
            wrong += ["changed"] * (not torch.equal(given, before))
    lets = unshard_sequence(torch.ones(1, 2, requires_grad=True), group)
    wrong += ["a gradient"] * lets.requires_grad
    return wrong


@pytest.mark.parametrize("n", [2, 3, 4])
def test_round_trips_over_ranks(ranks, n):
    """Strided parts too; the last of 3 and 1 is alone in its group."""
    assert ranks(round_trips, n) == [[]] * 4


def by_default() -> tuple[list, bool, int]:
    whole = torch.arange(16)[None]
    return zigzag_shard(whole).tolist(), torch.equal(zigzag_unshard(zigzag_shard(whole)), whole), dist.get_rank()


def test_the_group_is_all_ranks_by_default(ranks):
    for rank, found in enumerate(ranks(by_default)):
        late = 14 - 2 * rank
        assert found == ([[2 * rank, 2 * rank + 1, late, late + 1]], True, rank)
