"""course_kit.labs.tile_walk: each step is exact for the keys so far, and counts what it holds and moves. CPU."""

import math
from typing import NamedTuple

import pytest
import torch

from course_kit.gpu.operation_bytes import BytesMoved
from course_kit.labs.tile_walk import (
    WalkShape,
    exact_head,
    record_walk,
    rows_that_rose,
    skipped_tiles,
    standard_numbers,
    walk_state,
)
from course_lib.flash_attention.tiles import tiles


class Case(NamedTuple):
    s_q: int
    s_k: int
    d: int
    block_q: int
    block_k: int
    causal: bool


CASES = [
    Case(24, 24, 8, 8, 4, True),
    Case(13, 13, 5, 4, 3, True),  # both ends ragged
    Case(13, 13, 5, 4, 3, False),
    Case(7, 12, 4, 3, 5, True),  # keys that nobody sees
    Case(12, 7, 4, 5, 3, True),
    Case(5, 9, 3, 2, 16, False),  # one tile a row
    Case(1, 1, 1, 1, 1, True),
]
of_cases = pytest.mark.parametrize("case", CASES, ids=str)


def walked(case: Case, dtype=torch.float32, scale: float | None = 0.7):
    """q, k, v and the walk."""
    generator = torch.Generator().manual_seed(sum(case))
    shapes = (case.s_q, case.d), (case.s_k, case.d), (case.s_k, case.d)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v, record_walk(q, k, v, case.causal, scale, case.block_q, case.block_k)


def scores(q, k, causal: bool, scale: float = 0.7) -> torch.Tensor:
    """[s, s'] in float64, -inf where a query does not see a key."""
    seen = torch.arange(len(k)) <= torch.arange(len(q))[:, None]
    z = q.double() @ k.double().T * scale
    return z.masked_fill(~seen, -math.inf) if causal else z


def touched(case: Case, row: int) -> int:
    """Keys in the tiles of the block of queries that begins at `row`: all blocks in which one of them sees a key."""
    last = min(row + case.block_q, case.s_q) - 1
    seen = min(last + 1, case.s_k) if case.causal else case.s_k
    return min(-(-seen // case.block_k) * case.block_k, case.s_k)


@of_cases
def test_the_last_step_of_a_row_is_attention_and_no_earlier_one_is_for_all_rows(case):
    q, k, v, steps = walked(case)
    wanted = scores(q, k, case.causal).softmax(-1) @ v.double()
    assert (exact_head(q, k, v, case.causal, 0.7) - wanted).abs().max() < 1e-12
    for step in steps:
        found = step.out.double() / step.total.double()[:, None]
        error = (found - wanted[step.tile.row : step.tile.row_end]).abs().amax(-1)
        torch.testing.assert_close(step.errors[step.tile.row : step.tile.row_end], error, rtol=0, atol=1e-6)
    assert steps[-1].errors.max() == steps[-1].largest_error < 1e-5
    ends = {step.tile.row: number for number, step in enumerate(steps)}  # the last tile of each row of tiles
    for number, step in enumerate(steps):
        is_end = ends[step.tile.row] == number
        assert (step.largest_error < 1e-5) == is_end
        assert step.errors[: step.tile.row_end].isfinite().all() and step.errors[step.tile.row_end :].isnan().all()


@of_cases
def test_in_between_a_row_is_attention_over_the_keys_seen_so_far(case):
    q, k, v, steps = walked(case)
    z = scores(q, k, case.causal)
    for number, step in enumerate(steps, start=1):
        rows, seen = slice(step.tile.row, step.tile.row_end), slice(0, step.tile.column_end)
        p = z[rows, seen].softmax(-1)
        torch.testing.assert_close((step.out / step.total[:, None]).double(), p @ v[seen].double(), rtol=0, atol=1e-5)
        torch.testing.assert_close(step.highest.double(), z[rows, seen].amax(-1), rtol=0, atol=1e-5)
        state = walk_state(steps, number)
        torch.testing.assert_close(state.p[rows, seen], p, rtol=0, atol=1e-6)
        assert state.highest[rows].equal(step.highest.double()) and state.total[rows].equal(step.total.double())
        assert all(x[step.tile.row_end :].isnan().all() for x in state)


@of_cases
def test_p_after_the_last_step_is_the_softmax(case):
    q, k, _, steps = walked(case)
    p, softmax = walk_state(steps, len(steps)).p, scores(q, k, case.causal).softmax(-1)
    visited = ~p.isnan()
    torch.testing.assert_close(p[visited], softmax[visited], rtol=0, atol=1e-6)
    assert (softmax[~visited] == 0).all()  # no query sees these


@of_cases
def test_tiles_come_in_their_order_and_each_pair_once(case):
    *_, steps = walked(case)
    assert [step.tile for step in steps] == tiles(case.s_q, case.s_k, *case[3:])
    visits = torch.zeros(case.s_q, case.s_k, dtype=torch.long)
    for step in steps:
        visits[step.tile.row : step.tile.row_end, step.tile.column : step.tile.column_end] += 1
    for tile in skipped_tiles(case.s_q, case.s_k, *case[3:]):
        visits[tile.row : tile.row_end, tile.column : tile.column_end] += 10
    assert set(visits.unique().tolist()) <= {1, 10}
    if case.causal:
        seen = torch.ones_like(visits).tril() == 1
        assert (visits[seen] == 1).all()


@of_cases
def test_a_step_moves_only_its_own_rows_and_there_by_one_factor_down(case):
    """exp(z - m) of a key changes only where the maximum rises, by e^(m - m'); its weight p never grows."""
    *_, steps = walked(case)
    for number in range(2, len(steps) + 1):
        before, now, tile = walk_state(steps, number - 1), walk_state(steps, number), steps[number - 1].tile
        elsewhere = [row for row in range(case.s_q) if not tile.row <= row < tile.row_end]
        assert all(
            torch.equal(a[elsewhere].nan_to_num(-1), b[elsewhere].nan_to_num(-1))
            for a, b in zip(before, now, strict=True)
        )
        rows, old = slice(tile.row, tile.row_end), slice(0, tile.column)
        torch.testing.assert_close(now.p[rows, : tile.column_end].sum(-1).double(), torch.ones_like(now.total[rows]))
        if tile.column:
            rose = now.highest[rows] > before.highest[rows]
            shrink = torch.exp(before.highest[rows] - now.highest[rows])
            assert (shrink[~rose] == 1).all() and (shrink[rose] < 1).all()
            assert rose.sum() == rows_that_rose(steps, number)
            powers = [state.p[rows, old] * state.total[rows, None] for state in (before, now)]
            torch.testing.assert_close(powers[1], powers[0] * shrink[:, None])
            assert (now.p[rows, old] <= before.p[rows, old]).all()


def test_rows_that_rose_by_hand():
    """Of scores 1, 3, 2, 3, 5 the second and the last raise a maximum: the first sets it, an equal one doesn't."""
    keys = torch.tensor([[1.0], [3.0], [2.0], [3.0], [5.0]])
    steps = record_walk(torch.ones(1, 1), keys, keys, False, 1.0, 4, 1)
    assert [rows_that_rose(steps, number) for number in range(1, 6)] == [0, 1, 0, 0, 1]
    assert [step.highest.item() for step in steps] == [1, 3, 3, 3, 5]
    two = record_walk(torch.tensor([[1.0], [-1.0]]), keys, keys, False, 1.0, 2, 2)  # the second row's scores fall
    assert [rows_that_rose(two, number) for number in (1, 2, 3)] == [0, 0, 1]
    again = record_walk(torch.tensor([[1.0], [2.0]]), keys, keys, False, 1.0, 1, 5)
    assert rows_that_rose(again, 2) == 0  # another row's maximum is not the one before


@of_cases
def test_numbers_moved_are_those_of_the_docstring(case):
    *_, steps = walked(case)
    s, d = case.s_q, case.d
    rows = range(0, s, case.block_q)
    assert steps[-1].read == s * d + 2 * d * sum(touched(case, row) for row in rows)
    assert steps[-1].written == s * (d + 1)
    read = written = 0
    for step in steps:
        tile = step.tile
        read += (tile.row_end - tile.row) * d * (tile.column == 0) + 2 * (tile.column_end - tile.column) * d
        written += (tile.row_end - tile.row) * (d + 1) * (tile.column_end == touched(case, tile.row))
        assert (step.read, step.written) == (read, written)


def test_the_chip_holds_the_same_however_long_the_sequences_are():
    """Blocks of 4 x 2 and heads of 3: q 12, k and v 6 each, scores 8, out 12, m and l 4 each."""
    wanted = {"q tile": 12, "k tile": 6, "v tile": 6, "scores tile": 8, "out": 12, "highest": 4, "total": 4}
    for s in (4, 16, 40):
        *_, steps = walked(Case(s, s, 3, 4, 2, True))
        assert all(step.on_chip == wanted for step in steps)
        tiles_of_a_row = s // 4  # blocks of 2 x 1 of these: s / 4 rows of 2, 4, 6, ... tiles
        assert len(steps) == tiles_of_a_row * (tiles_of_a_row + 1)
    *_, steps = walked(Case(5, 3, 3, 4, 2, False))
    assert steps[-1].on_chip == {
        "q tile": 3, "k tile": 3, "v tile": 3, "scores tile": 1, "out": 3, "highest": 1, "total": 1
    }  # fmt: skip


@pytest.mark.parametrize("s_q, s_k, d", [(24, 24, 8), (7, 13, 4)])
def test_standard_attention_moves_the_numbers_of_the_docstring(s_q, s_k, d):
    q, k, v = (torch.randn(s, d) for s in (s_q, s_k, s_k))
    with BytesMoved() as moved:
        (q @ k.T).softmax(-1) @ v
    assert standard_numbers(WalkShape(s_q, s_k, d, 4, 4, False)) == moved.total // 4
    assert standard_numbers(WalkShape(s_q, s_k, d, 4, 4, True)) == 2 * s_q * d + 2 * s_k * d + 4 * s_q * s_k


@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 1e-13), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_dtypes_and_the_usual_scale(dtype, allowed):
    q, k, v, steps = walked(CASES[1], dtype, None)
    wanted = scores(q, k, True, CASES[1].d ** -0.5).softmax(-1) @ v.double()
    assert steps[-1].largest_error <= allowed * wanted.abs().max()
    state = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for step in steps for x in (step.scores, step.highest, step.total, step.out)} == {state}


def test_inputs_stay_as_they_are_and_no_graph_is_kept():
    q, k, v = (torch.randn(6, 2, requires_grad=True) for _ in range(3))
    before = [x.detach().clone() for x in (q, k, v)]
    steps = record_walk(q, k, v, True, None, 2, 2)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))
    assert not any(step.out.requires_grad for step in steps)
    kept = [step.errors.clone() for step in steps]
    walk_state(steps, len(steps)).p.zero_()
    assert all(torch.equal(a.nan_to_num(), b.errors.nan_to_num()) for a, b in zip(kept, steps, strict=True))


def of_shapes(*shapes, dtype=torch.float32):
    return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)


@pytest.mark.parametrize(
    "inputs, scale, blocks, words",
    [
        (of_shapes((1, 4, 2), (4, 2), (4, 2)), None, (2, 2), "expected .tokens, head_dim. each"),
        (of_shapes((4, 2), (4, 3), (4, 3)), None, (2, 2), "one head_dim"),
        (of_shapes((4, 2), (4, 2), (5, 2)), None, (2, 2), "k has 4 tokens and v 5"),
        (of_shapes((4, 0), (4, 0), (4, 0)), None, (2, 2), "of 1 or more"),
        (of_shapes((0, 2), (4, 2), (4, 2)), None, (2, 2), "no tile to walk through"),
        (of_shapes((4, 2), (0, 2), (0, 2)), None, (2, 2), "no tile to walk through"),
        (of_shapes((4, 2), (4, 2), (4, 2), dtype=torch.int64), None, (2, 2), "expected one dtype"),
        (of_shapes((4, 2), (4, 2), (4, 2)), 0.0, (2, 2), "scale is 0.0"),
        (of_shapes((4, 2), (4, 2), (4, 2)), math.nan, (2, 2), "scale is nan"),
        (of_shapes((4, 2), (4, 2), (4, 2)), None, (0, 2), "blocks of 1 or more"),
        (of_shapes((4, 2), (4, 2), (4, 2)), None, (2, -1), "blocks of 1 or more"),
    ],
)
def test_what_cannot_be_walked_is_told_in_one_line(inputs, scale, blocks, words):
    with pytest.raises(ValueError, match=words) as error:
        record_walk(*inputs, True, scale, *blocks)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("number", [0, -1, 3])
def test_steps_are_counted_from_one(number):
    steps = record_walk(*of_shapes((2, 1), (4, 1), (4, 1)), False, None, 2, 2)
    for function in (walk_state, rows_that_rose):
        with pytest.raises(ValueError, match=f"step {number} of a walk of 2"):
            function(steps, number)
        with pytest.raises(ValueError, match="of a walk of 0"):
            function([], 1)
