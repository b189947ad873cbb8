"""course_lib.pipeline.schedules: schedules are valid, hold what they say, and have their bubbles exactly. No torch, no
ranks.
"""

import csv
import itertools
import random
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from course_lib.pipeline.actions import play, validate
from course_lib.pipeline.schedules import (
    Action,
    Overlapped,
    afab,
    dualpipe,
    interleaved,
    naive,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from course_lib.pipeline.simulation import simulate

TIMES = [(Fraction(3), Fraction(4), Fraction(2)), (Fraction(7, 3), Fraction(5, 2), Fraction(2)), (1, 1, 1), (5, 6, 0)]
SIZES = [(p, m) for p in range(1, 8) for m in (1, 2, 3, 4, 5, 7, 8, 12, 13, 14, 16)]
ONE_STAGE = {"naive": naive, "afab": afab, "1f1b": one_f_one_b, "zb-h1": zero_bubble_h1, "zb-h2": zero_bubble_h2}
PUBLISHED = list(csv.DictReader((Path(__file__).parents[2] / "data" / "schedules.csv").open()))


def schedules(p: int, m: int) -> dict:
    """All that are defined for these sizes, by name."""
    found = {name: make(p, m) for name, make in ONE_STAGE.items()} | {"zb-v": zero_bubble_v(p, m)}
    found |= {f"interleaved {v}": interleaved(p, m, v) for v in (1, 2, 3) if v == 1 or m % p == 0}
    if m >= p:
        found["breadth first"] = interleaved(p, m, 2, run=m)
    if p % 2 == m % 2 == 0 and m >= 2 * p:
        found["dualpipe"] = dualpipe(p, m)
    return found


def played(schedule, t_f=1, t_i=1, t_w=1, t_comm=0) -> list[list]:
    """(start, end) of each action, by a way of its own: again and again each rank does what it can, one by one. None
    where it gets stuck.
    """
    of = {"F": t_f, "I": t_i, "W": t_w, "B": t_i + t_w}
    last = max(action.stage for actions in schedule for action in actions)
    ended, spans = {}, [[] for _ in schedule]  # ended: of (kind, stage, micro-batch), the time and the rank

    def there(rank: int, action: Action):
        kind, stage, i = action
        needs = {"F": [("F", stage - 1, i)] * (stage > 0), "W": [("I", stage, i)]}.get(
            kind, [("F", stage, i)] + [("B", stage + 1, i)] * (stage < last)
        )
        if any(need not in ended for need in needs):
            return None
        return max((ended[n][0] + t_comm * (ended[n][1] != rank) for n in needs), default=0)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            while len(spans[rank]) < len(actions):
                first = len(spans[rank])
                pair = actions[first : first + 1 + (type(actions[first]) is Overlapped)]
                times = [there(rank, action) for action in pair]
                if None in times:
                    break
                start = max(*times, spans[rank][-1][1] if first else 0)
                end = start + sum(of[action.kind] for action in pair)
                for kind, stage, i in pair:
                    ended[kind, stage, i] = end, rank
                    if kind in "BI":
                        ended["B", stage, i] = end, rank
                    spans[rank].append((start, end))
                moved = True
    return spans if all(len(a) == len(b) for a, b in zip(spans, schedule, strict=True)) else None


def test_every_schedule_is_valid_and_holds_what_it_says():
    for p, m in SIZES:
        most = {"naive": 1, "afab": m, "1f1b": p, "zb-h1": p, "zb-h2": 2 * p - 1, "zb-v": 2 * p, "dualpipe": p + 1}
        most |= {"interleaved 1": p, "breadth first": 2 * m}
        most |= {f"interleaved {v}": v * p + p - 1 for v in (2, 3)}  # times 1/v: p + (p - 1)/v
        for name, schedule in schedules(p, m).items():
            live, enough = validate(schedule, m), m >= 2 * p
            assert len(live) == len(schedule) == p
            assert max(live) <= most[name], (name, p, m, live)
            if enough and name != "breadth first":
                assert max(live) == most[name], (name, p, m, live)
    assert validate(one_f_one_b(4, 8)) == [4, 3, 2, 1]
    assert validate(zero_bubble_h1(4, 8)) == [4] * 4, "it trades the memory that 1F1B leaves on later ranks"
    assert validate(zero_bubble_v(4, 8)) == [8] * 4 and validate(dualpipe(4, 8)) == [5] * 4


def test_stages_are_where_they_should_be():
    def on(schedule):
        return [sorted({action.stage for action in actions}) for actions in schedule]

    assert on(one_f_one_b(4, 4)) == on(zero_bubble_h2(4, 4)) == [[0], [1], [2], [3]]
    assert on(interleaved(4, 4, 2)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert on(zero_bubble_v(4, 4)) == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert on(dualpipe(4, 8)) == [[0, 3], [1, 2], [1, 2], [0, 3]]


def test_the_simulator_agrees_with_another_one():
    """Unequal times, by stage too, on all schedules; and the times of a link."""
    for p, m in ((2, 4), (3, 6), (4, 8), (5, 5)):
        for t_f, t_i, t_w, t_comm in ((*TIMES[0], 0), (*TIMES[1], Fraction(1, 3)), (2, 5, 3, 1)):
            for name, schedule in schedules(p, m).items():
                simulation = simulate(schedule, t_f, t_i, t_w, t_comm)
                expected = played(schedule, t_f, t_i, t_w, t_comm)
                both = zip(simulation.starts, simulation.ends, strict=True)
                assert [list(zip(*rows, strict=True)) for rows in both] == expected, (name, p, m)
                assert simulation.makespan == max(spans[-1][1] for spans in expected)
                assert simulation.cost == max(spans[-1][1] - spans[0][0] for spans in expected)


def test_times_may_differ_by_stage():
    simulation = simulate(afab(2, 2), [1, 10], [2, 20], [0, 3])
    assert simulation.starts == [[0, 1, 44, 67], [1, 11, 21, 44]]
    assert simulation.busy == [2 * 3, 2 * 33] and simulation.cost == 69 and simulation.bubble == 3


@pytest.mark.parametrize("t_f, t_i, t_w", TIMES)
def test_bubbles_have_their_closed_forms(t_f, t_i, t_w):
    """Exactly: in fractions. Here t_w is at most t_f and t_i, t_f at most t_i."""
    work = t_f + t_i + t_w
    for p, m in SIZES:
        expected = {"naive": (p - 1) * m * work, "afab": (p - 1) * work, "1f1b": (p - 1) * work}
        if m >= p:
            expected["zb-h1"] = (p - 1) * (t_f + t_i - t_w)
        if m >= 2 * p - 1:
            expected["zb-h2"] = (p - 1) * (t_f + t_i - 2 * t_w)
        expected["dualpipe"] = (Fraction(p, 2) - 1) * (t_f + 2 * t_i - t_w)
        all_of_them = schedules(p, m)
        expected |= {name: (p - 1) * work for name in all_of_them if name.startswith(("interleaved", "breadth"))}
        for name in expected.keys() & all_of_them.keys():
            simulation = simulate(all_of_them[name], t_f, t_i, t_w)
            assert simulation.bubble == expected[name], (name, p, m)
            assert simulation.bubble_ratio == simulation.bubble / max(simulation.busy)


def test_bubble_ratios_of_the_papers():
    """(p - 1)/m; with v stages a rank (p - 1)/(v m): with any times, since an action takes 1/v of a rank's."""
    stages = {"afab": 1, "1f1b": 1, "interleaved 2": 2, "interleaved 3": 3, "breadth first": 2}
    for p, m in SIZES:
        found = schedules(p, m)
        for times, name in itertools.product(TIMES[:2], found.keys() & stages.keys()):
            parts = [Fraction(time) / stages[name] for time in times]
            assert simulate(found[name], *parts).bubble_ratio == Fraction(p - 1, stages[name] * m), (name, p, m)
        assert simulate(found["naive"], *TIMES[0]).bubble_ratio == p - 1


def test_zero_bubble_v_has_none_for_equal_times():
    for p in range(1, 9):
        for m in range(2 * p - 1, 2 * p + 9):
            assert simulate(zero_bubble_v(p, m)).bubble == 0, (p, m)


def test_a_pair_that_overlaps_makes_dualpipe_shorter():
    """F & B in less than their sum: the bubble is that of the DualPipe table, the work is less."""
    for p, m in ((2, 4), (4, 8), (4, 12), (6, 12)):
        apart, together = (simulate(dualpipe(p, m), 2, 2, 1, t_pair=t_pair) for t_pair in (None, 4))
        pairs = sum(type(action) is Overlapped for action in dualpipe(p, m)[0])
        assert apart.busy[0] - together.busy[0] == pairs
        assert together.cost < apart.cost
        for row in together.timeline:
            for (action, start, end), (_, next_start, next_end) in itertools.pairwise(row):
                assert type(action) is not Overlapped or (start, end) == (next_start, next_end) == (start, start + 4)


def value(formula: str, **names):
    """Of a formula as in data/schedules.csv."""
    for before, after in (("F&B", "FB"), (")(", ")*("), ("2W", "2*W"), ("3W", "3*W")):
        formula = formula.replace(before, after)
    return eval(formula, {"__builtins__": {}}, names)


def test_the_formulas_of_dualpipes_table():
    rows = [row for row in PUBLISHED if row["source"].startswith("deepseek-ai/DualPipe")]
    ours = {"1F1B": one_f_one_b, "ZB1P": zero_bubble_h1, "DualPipe": dualpipe}
    checked = 0
    for row in rows:
        if row["schedule"] not in ours:
            continue
        for p, m, (t_f, t_i, t_w) in itertools.product((2, 4, 6), (12, 20), TIMES):
            simulation = simulate(ours[row["schedule"]](p, m), t_f, t_i, t_w)
            stages = len({action.stage for action in simulation.schedule[0]})
            found = {
                "bubble time": simulation.bubble,
                "activation per device (microbatches)": max(simulation.peaks),
                "parameters per device": f"{stages}x",
                "devices": p,
            }[row["quantity"]]
            names = {"PP": Fraction(p), "F": t_f, "B": t_i + t_w, "W": t_w, "FB": t_f + t_i + t_w}
            expected = row["value"] if row["value"].endswith("x") else value(row["value"], **names)
            assert found == expected, (row, p, m)
            checked += 1
    assert checked == 3 * 4 * 24


def test_the_rates_of_the_zero_bubble_repository():
    """For equal times; bubbles are over 1F1B's cost, so that a third of its bubble is a third of its rate."""
    rows = {(row["schedule"], row["quantity"]): row["value"] for row in PUBLISHED if "sail-sg/zero" in row["source"]}
    ours = {"1F1B": one_f_one_b, "ZB1P": zero_bubble_h1, "ZB2P": zero_bubble_h2, "ZBV": zero_bubble_v}
    for p, m in ((2, 4), (4, 8), (4, 13), (8, 16)):
        cost = simulate(one_f_one_b(p, m)).cost
        rate = value(rows["1F1B", "bubble rate"].removesuffix("=B"), p=Fraction(p), m=m)
        for name, make in ours.items():
            expected = rate if name == "1F1B" else value(rows[name, "bubble rate"], B=rate)
            parts = 2 if name == "ZBV" else 1
            assert Fraction(simulate(make(p, m)).bubble, parts * cost) == expected, (name, p, m)
            more = int(rows[name, "activation memory vs 1F1B"].removesuffix("x"))
            assert more * p - 1 <= Fraction(max(validate(make(p, m))), parts) <= more * p, (name, p, m)


def test_the_hand_made_order_of_micro_batches():
    """1F1B of Narayanan et al. 2021, figure 4, and interleaving with two stages a rank, of a first rank."""
    words = [" ".join(f"{kind}{i}" for kind, _, i in actions) for actions in one_f_one_b(4, 5)]
    assert words[0] == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert words[3] == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    words = [" ".join(f"{kind}{stage}.{i}" for kind, stage, i in actions) for actions in interleaved(2, 4, 2)]
    begin = "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1"
    assert words[0] == f"{begin} B2.2 B2.3 B0.2 B0.3"
    for actions in (*zero_bubble_h2(4, 8), *zero_bubble_v(4, 8), *dualpipe(4, 8)):
        halves = {kind: [action[1:] for action in actions if action.kind == kind] for kind in "IW"}
        assert halves["W"] == halves["I"], "a W belongs to the oldest I without one"


# What is refused.


def mutations(schedule, seed: int):
    """(what was done, the wrong schedule): one action dropped, done twice, of another kind, on another rank."""
    draw = random.Random(seed)
    for _ in range(12):
        rank = draw.randrange(len(schedule))
        place = draw.randrange(len(schedule[rank]))
        action = schedule[rank][place]
        for name in ("dropped", "twice", "kind", "elsewhere"):
            wrong = [list(actions) for actions in schedule]
            if name == "dropped":
                del wrong[rank][place]
            elif name == "twice":
                wrong[rank].insert(draw.randrange(place + 1), action)
            elif name == "kind":
                wrong[rank][place] = action._replace(kind=draw.choice(sorted(set("FBIW") - {action.kind})))
            else:
                other = draw.choice([each for each in range(len(schedule)) if each != rank])
                wrong[other].insert(draw.randrange(len(wrong[other]) + 1), wrong[rank].pop(place))
            yield name, wrong


def test_what_is_missing_or_twice_or_elsewhere_is_refused():
    for p, m in ((2, 4), (4, 8)):
        for name, schedule in schedules(p, m).items():
            for what, wrong in mutations(schedule, seed=p):
                with pytest.raises(ValueError, match="^stage [0-9]+, micro-batch [0-9]+") as refused:
                    validate(wrong, m)
                expected = "is on more than one rank" if what == "elsewhere" else "not F and B, or F, I and W"
                assert expected in str(refused.value), (name, what)


def test_orders_that_end_in_a_deadlock_are_refused_and_no_others():
    """Two actions of a rank change places, in all ways: another player says which orders can be played."""
    refused = accepted = 0
    for schedule in (one_f_one_b(3, 3), zero_bubble_h1(2, 3), interleaved(2, 2, 2), zero_bubble_v(2, 2)):
        for rank, actions in enumerate(schedule):
            for one, other in itertools.combinations(range(len(actions)), 2):
                wrong = [list(each) for each in schedule]
                wrong[rank][one], wrong[rank][other] = wrong[rank][other], wrong[rank][one]
                if played(wrong) is None:
                    refused += 1
                    for run in (validate, simulate, lambda each: list(play(each))):
                        with pytest.raises(ValueError, match="^a deadlock: all wait for each other, rank [0-9] at "):
                            run(wrong)
                else:
                    accepted += 1
                    validate(wrong)
    assert refused > 100 and accepted > 20


def test_pairs_wait_for_what_both_need():
    """A forward that overlaps with the backward that waits for it can never begin."""
    plain = [[Action("F", 0, 0), Action("B", 0, 0)]]
    validate(plain)
    with pytest.raises(ValueError, match="deadlock: .* rank 0 at F of stage 0, micro-batch 0"):
        validate([[Overlapped("F", 0, 0), Action("B", 0, 0)]])


def test_the_wrong_number_of_micro_batches_is_refused():
    validate(one_f_one_b(2, 4), 4)
    with pytest.raises(ValueError, match="stage 0, micro-batch 4 of 5: has nothing"):
        validate(one_f_one_b(2, 4), 5)
    with pytest.raises(ValueError, match="stage 0, micro-batch 3 of 3: has BF"):
        validate(one_f_one_b(2, 4), 3)


@pytest.mark.parametrize("make", [*ONE_STAGE.values(), zero_bubble_v, dualpipe, lambda p, m: interleaved(p, m, 2)])
def test_sizes_below_one_are_refused(make):
    for p, m in ((0, 4), (2, 0), (-1, 2), (2, -2)):
        with pytest.raises(ValueError, match=f"p = {p}, m = {m}, v = [12]: ranks, micro-batches"):
            make(p, m)


def test_conditions_are_named():
    for p, m in ((3, 8), (4, 9), (4, 6), (2, 2)):
        with pytest.raises(ValueError, match=f"dualpipe: p = {p} and m = {m} must be even, and m at least 2p"):
            dualpipe(p, m)
    with pytest.raises(ValueError, match="interleaved: run = 4 must be at least p = 4, and divide m = 6"):
        interleaved(4, 6, 2)
    with pytest.raises(ValueError, match="run = 2 must be at least p = 4, and divide m = 8"):
        interleaved(4, 8, 2, run=2)
    with pytest.raises(ValueError, match="v = 0: ranks, micro-batches"):
        interleaved(4, 8, 0)


def function_calls(call) -> int:
    """Python functions called by `call()`, itself included."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def test_work_grows_with_the_actions():
    """Eight times the actions, some eight times the function calls: a second look at each would be 64 times.

    64 ranks and 4,096 micro-batches, half a million actions, then take 2 s of a quiet core.
    """
    small, large = one_f_one_b(16, 64), one_f_one_b(16, 512)
    assert simulate(large).bubble_ratio == Fraction(15, 512)
    assert function_calls(lambda: simulate(large)) <= 9 * function_calls(lambda: simulate(small))
