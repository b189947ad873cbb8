"""course_lib.pipeline.search: never worse than schedules by hand, exact where it says so. No torch, no ranks."""

import itertools
import random
from fractions import Fraction

import pytest

from course_lib.pipeline.actions import validate
from course_lib.pipeline.schedules import Action, one_f_one_b, zero_bubble_h1, zero_bubble_h2
from course_lib.pipeline.search import SMALL, exact_search, search
from course_lib.pipeline.simulation import simulate


def unequal(draw: random.Random, p: int) -> list[list[int]]:
    """Times of F, I and W by rank; those of the first and last one may be long."""
    return [[draw.choice((1, 2, 3, 5, 8, 13)) for _ in range(p)] for _ in range(3)]


def test_it_is_never_worse_than_by_hand():
    """With the same limit of live micro-batches, for random times, by rank and alike, with and without a slow link."""
    draw, better = random.Random(0), 0
    for _ in range(40):
        p, m = draw.randint(2, 5), draw.randint(2, 12)
        times = unequal(draw, p) if draw.random() < 0.6 else [draw.randint(1, 9) for _ in range(3)]
        t_comm = draw.choice((0, 0, 1, 4))
        for make in (one_f_one_b, zero_bubble_h1, zero_bubble_h2):
            by_hand = make(p, m)
            live = max(validate(by_hand, m))
            found = search(p, m, *times, t_comm, live=live)
            assert max(validate(found, m)) <= live
            cost, best = (simulate(each, *times, t_comm).cost for each in (by_hand, found))
            assert best <= cost, (make.__name__, p, m, times, t_comm)
            better += best < cost
    assert better > 40, "for unequal times there is something to gain"


def test_it_finds_the_known_best_for_equal_times():
    for p, m in ((2, 6), (3, 8), (4, 12), (6, 16)):
        assert simulate(search(p, m)).cost <= simulate(zero_bubble_h1(p, m)).cost
        assert simulate(search(p, m, live=2 * p - 1)).bubble == 0


def test_it_holds_no_more_than_it_may():
    """From one micro-batch at a time, where nothing overlaps, to more than there are; more never costs more."""
    times = [3, 2, 4], [2, 5, 3], [1, 2, 2]
    for m in (3, 7):
        costs = []
        for live in range(1, 8):
            found = search(3, m, *times, live=live)
            assert max(validate(found, m)) <= live
            costs.append(simulate(found, *times).cost)
        assert costs[0] > costs[-1]
        if 3 * m <= SMALL:
            assert costs == sorted(costs, reverse=True)
    assert max(validate(search(3, 7, *times))) <= 3, "p, as 1F1B"


# Small ones, against all orders.


def orders(m: int, live: int, any_micro_batch: bool = False) -> list[list[tuple[str, int]]]:
    """All orders of F, I and W of m micro-batches on a rank that holds `live`, each kind by number or as it comes."""
    found, ahead = [], [()]
    while ahead:
        done = ahead.pop()
        if len(done) == 3 * m:
            found.append(list(done))
            continue
        for i in range(m):
            kind = "FIW_"[sum(each == i for _, each in done)]
            if kind == "_" or (kind == "F" and sum({"F": 1, "W": -1}.get(k, 0) for k, _ in done) >= live):
                continue
            if any_micro_batch or i == sum(k == kind for k, _ in done):
                ahead.append((*done, (kind, i)))
    return found


def cost_of(rows: tuple, times: list[list], t_comm) -> float:
    """The longest time of a rank from its first to its last action, each as early as can be; inf for a deadlock."""
    p, ended, at, free, first = len(rows), {}, [0] * len(rows), [0] * len(rows), [None] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank in range(p):
            while at[rank] < len(rows[rank]):
                kind, i = rows[rank][at[rank]]
                source = {"F": rank - 1, "I": rank + 1}.get(kind, -1)
                start = free[rank]
                if 0 <= source < p:
                    if (kind, source, i) not in ended:
                        break
                    start = max(start, ended[kind, source, i] + t_comm)
                first[rank] = start if first[rank] is None else first[rank]
                free[rank] = ended[kind, rank, i] = start + times["FIW".index(kind)][rank]
                at[rank] += 1
                moved = True
    done = all(at[rank] == len(rows[rank]) for rank in range(p))
    return max(end - begin for end, begin in zip(free, first, strict=True)) if done else float("inf")


@pytest.mark.parametrize(
    "p, m, live, cases", [(2, 2, 2, 20), (2, 2, 1, 4), (2, 3, 2, 8), (2, 3, 3, 6), (3, 2, 2, 10), (4, 2, 2, 4)]
)
def test_small_ones_are_as_good_as_the_best_of_all_orders(p, m, live, cases):
    draw = random.Random(p * m + live)
    rows = orders(m, live)
    for _ in range(cases):
        times, t_comm = unequal(draw, p), draw.choice((0, 1, 3))
        best = min(cost_of(each, times, t_comm) for each in itertools.product(rows, repeat=p))
        found = search(p, m, *times, t_comm, live=live)
        assert simulate(found, *times, t_comm).cost == best, (times, t_comm)
        assert max(validate(found, m)) <= live


def test_micro_batches_in_another_order_are_no_better():
    """They are all alike, so that the search lets each kind go by number."""
    draw, rows = random.Random(1), orders(2, 2, any_micro_batch=True)
    assert len(rows) > len(orders(2, 2))
    for _ in range(3):
        times = unequal(draw, 2)
        best = min(cost_of(each, times, 1) for each in itertools.product(rows, repeat=2))
        assert simulate(search(2, 2, *times, 1), *times, 1).cost == best


def test_the_exact_search_says_where_there_is_nothing_better():
    times = {"F": [1, 1], "I": [1, 1], "W": [1, 1]}
    best = exact_search(2, 3, times, 0, 2, bound=float("inf"))
    cost = simulate(best, *times.values()).cost
    assert exact_search(2, 3, times, 0, 2, bound=cost) is None
    assert simulate(exact_search(2, 3, times, 0, 2, bound=cost + 1), *times.values()).cost == cost


def test_times_may_be_fractions_and_numbers_for_all_ranks():
    times = Fraction(3, 2), Fraction(5, 3), Fraction(1, 7)
    found = search(3, 4, *times)
    assert simulate(found, *times).cost == simulate(search(3, 4, *([t] * 3 for t in times)), *times).cost
    assert all(type(action) is Action for actions in found for action in actions)


def test_one_rank_has_no_bubble():
    for m in (1, 5, 20):
        assert simulate(search(1, m, 3, 2, 4), 3, 2, 4).bubble == 0


def test_impossible_sizes_are_refused():
    for live in (0, -1):
        with pytest.raises(ValueError, match=f"live = {live}: a rank must be able to hold 1 micro-batch"):
            search(2, 4, live=live)
    for p, m in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match=f"p = {p}, m = {m}, v = 1: ranks, micro-batches"):
            search(p, m)
