"""course_lib.pipeline.transfers: what each rank sends and receives, and when it starts, without a deadlock. No ranks,
but one mailbox on all four.
"""

import collections
import itertools
import random

import pytest
import torch
import torch.distributed as dist

from course_lib.pipeline.actions import validate
from course_lib.pipeline.schedules import (
    Action,
    afab,
    dualpipe,
    interleaved,
    naive,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from course_lib.pipeline.transfers import (
    MAX_SENDS_IN_FLIGHT,
    P2PBuffers,
    StageInput,
    Transfer,
    find_transfers,
    plan_send_recv,
)


def by_hand(p: int, m: int) -> dict:
    found = {each.__name__: each(p, m) for each in (naive, afab, one_f_one_b, zero_bubble_h1, zero_bubble_h2)}
    found |= {"zero_bubble_v": zero_bubble_v(p, m)}
    if m % p == 0:
        found |= {"interleaved": interleaved(p, m, 2), "breadth first": interleaved(p, m, 3, run=m)}
    if p % 2 == m % 2 == 0 and m >= 2 * p:
        found["dualpipe"] = dualpipe(p, m)
    return found


def at_random(seed: int) -> list[list[Action]]:
    """A valid schedule of any order: stages on any ranks, backwards whole or in halves, several stages a rank."""
    draw = random.Random(seed)
    p, m, stages = draw.randint(2, 5), draw.randint(1, 6), draw.randint(2, 8)
    on = [draw.randrange(p) for _ in range(stages)]
    split = {(s, i): draw.random() < 0.5 for s in range(stages) for i in range(m)}
    schedule, done, left = [[] for _ in range(p)], set(), []
    for (s, i), halves in split.items():
        left += [Action(kind, s, i) for kind in ("FIW" if halves else "FB")]
    eager = draw.random()  # how much forwards are preferred
    while left:
        ready = []
        for kind, s, i in left:
            needs = {"F": [("F", s - 1, i)] * (s > 0), "W": [("I", s, i)]}.get(
                kind, [("F", s, i)] + [("IB", s + 1, i)] * (s < stages - 1)
            )
            if all(any((k, *need[1:]) in done for k in need[0]) for need in needs):
                ready.append(Action(kind, s, i))
        forwards = [action for action in ready if action.kind == "F"]
        chosen = draw.choice(forwards if forwards and draw.random() < eager else ready)
        left.remove(chosen)
        done.add(tuple(chosen))
        schedule[on[chosen.stage]].append(chosen)
    return [actions or [] for actions in schedule]


SCHEDULES = {f"{name} {p} {m}": s for p, m in ((2, 4), (3, 6), (4, 8), (4, 5)) for name, s in by_hand(p, m).items()}
RANDOM = {f"random {seed}": at_random(seed) for seed in range(60)}


def needed(schedule) -> set[tuple]:
    """What has to travel: (kind, stage, micro-batch, source, target), found from who has which stage."""
    on = {(a.stage, a.micro_batch): rank for rank, actions in enumerate(schedule) for a in actions}
    found = set()
    for (stage, i), rank in on.items():
        other = on.get((stage + 1, i), rank)
        if other != rank:
            found |= {("F", stage + 1, i, rank, other), ("B", stage, i, other, rank)}
    return found


def flat(plan) -> list[Transfer]:
    return [transfer for batches in plan for batch in batches for transfer in batch]


@pytest.mark.parametrize("kind", [SCHEDULES, RANDOM], ids=["by hand", "at random"])
def test_each_transfer_is_sent_once_and_received_once(kind):
    for name, schedule in kind.items():
        validate(schedule)
        plans = [plan_send_recv(schedule, rank) for rank in range(len(schedule))]
        sent = [t for rank, plan in enumerate(plans) for t in flat(plan) if t.source == rank]
        received = [t for rank, plan in enumerate(plans) for t in flat(plan) if t.target == rank]
        assert len(sent) == len(received) == len(set(sent)), name
        assert set(sent) == set(received) == needed(schedule), name
        assert all(rank in each[3:] for rank, plan in enumerate(plans) for each in flat(plan)), name


@pytest.mark.parametrize("kind", [SCHEDULES, RANDOM], ids=["by hand", "at random"])
def test_all_ranks_start_their_own_in_one_order(kind):
    for name, schedule in kind.items():
        order = [transfer for _, _, transfer in find_transfers(schedule)]
        assert len(order) == len(set(order))
        for rank in range(len(schedule)):
            own = [transfer for transfer in order if rank in (transfer.source, transfer.target)]
            assert flat(plan_send_recv(schedule, rank)) == own, (name, rank)


@pytest.mark.parametrize("kind", [SCHEDULES, RANDOM], ids=["by hand", "at random"])
def test_a_receive_starts_before_its_action_and_a_send_after_its_producer(kind):
    for name, schedule in kind.items():
        for rank, actions in enumerate(schedule):
            plan = plan_send_recv(schedule, rank)
            assert len(plan) == len(actions) + 1
            places = {t: place for place, batches in enumerate(plan) for batch in batches for t in batch}
            for (kind_of, stage, i, source, _), place in places.items():
                after, before = (k for k, a in enumerate(actions)), (k for k, a in enumerate(actions))
                if source == rank:
                    made_by = (kind_of == "F", stage - 1 if kind_of == "F" else stage + 1, i)
                    made = next(k for k in after if actions[k].kind != "W" and made_by == key_of(actions[k]))
                    assert place > made, (name, rank, place)
                else:
                    used = next(
                        k for k in before if actions[k].kind != "W" and (kind_of == "F", stage, i) == key_of(actions[k])
                    )
                    assert place <= used, (name, rank, place)


@pytest.mark.parametrize("kind", [SCHEDULES, RANDOM], ids=["by hand", "at random"])
def test_what_comes_is_on_its_way_while_the_action_before_runs(kind):
    """A receive starts an action ahead of its use, or, later than that, right after a send that goes before it."""
    for name, schedule in kind.items():
        for rank, actions in enumerate(schedule):
            uses, made = {key_of(a): k for k, a in enumerate(actions) if a.kind != "W"}, 0
            for place, batches in enumerate(plan_send_recv(schedule, rank)):
                for transfer in (t for batch in batches for t in batch):
                    if transfer.source == rank:
                        made = place
                    else:
                        used = uses[transfer.kind == "F", transfer.stage, transfer.micro_batch]
                        assert place <= max(0, used - 1, made), (name, rank, transfer)


def key_of(action: Action) -> tuple:
    return action.kind == "F", action.stage, action.micro_batch


def rendezvous(schedule, plans, blocking: bool) -> bool:
    """Whether all ranks get to their end where nothing is ever buffered: a rank's batches are under way one after the
    other, as on NCCL's stream. A transfer moves when both sides have come to its batch. An action waits for the whole
    batch of what it takes; blocking: a rank also waits for each batch with a send before it goes on.
    """
    p = len(schedule)
    programs = []  # of each rank: ("start", batch), ("take", transfer) and ("do", index)
    for rank, actions in enumerate(schedule):
        comes = {t[:3]: t for t in flat(plans[rank]) if t.target == rank}
        program = []
        for place, batches in enumerate(plans[rank]):
            for batch in batches:
                program.append(("start", batch))
                program += [("take", t) for t in batch if blocking and t.source == rank]
            if place < len(actions):
                kind, *rest = actions[place]
                key = ("F" if kind == "F" else "B", *rest)
                program += [("take", comes[key])] if kind != "W" and key in comes else []
        programs.append(program + [("take", t) for t in flat(plans[rank]) if t.source == rank])
    at, streams, arrived = [0] * p, [collections.deque() for _ in range(p)], set()
    whole = {(rank, t): tuple(b) for rank in range(p) for batches in plans[rank] for b in batches for t in b}
    moved = True
    while moved:
        moved = False
        for rank in range(p):
            while at[rank] < len(programs[rank]):
                what, which = programs[rank][at[rank]]
                if what == "start":
                    streams[rank].append(tuple(which))
                elif not set(whole[rank, which]) <= arrived:
                    break
                at[rank], moved = at[rank] + 1, True
            if streams[rank]:
                for t in streams[rank][0]:
                    other = t.target if t.source == rank else t.source
                    if t not in arrived and streams[other] and t in streams[other][0]:
                        arrived.add(t)
                        moved = True
                if set(streams[rank][0]) <= arrived:
                    streams[rank].popleft()
                    moved = True
    return all(at[rank] == len(programs[rank]) for rank in range(p))


@pytest.mark.parametrize("kind", [SCHEDULES, RANDOM], ids=["by hand", "at random"])
def test_no_deadlock_where_a_send_waits_for_its_receive(kind):
    for name, schedule in kind.items():
        plans = [plan_send_recv(schedule, rank) for rank in range(len(schedule))]
        for blocking in (False, True):
            assert rendezvous(schedule, plans, blocking), (name, blocking)


def test_the_rendezvous_sees_a_deadlock():
    """1F1B as it is often drawn: a rank sends its hidden state before it starts to receive a gradient."""
    schedule = one_f_one_b(2, 3)
    plans = []
    for rank, actions in enumerate(schedule):
        plan = [[] for _ in range(len(actions) + 1)]
        for t in flat(plan_send_recv(schedule, rank)):
            if t.source == rank:
                made = (t.kind == "F", t.stage - 1 if t.kind == "F" else t.stage + 1, t.micro_batch)
                plan[[key_of(a) for a in actions].index(made) + 1].append([t])
            else:
                plan[[key_of(a) for a in actions].index((t.kind == "F", *t[1:3]))].append([t])
        plans.append([sorted(batches, key=lambda batch: batch[0].source != rank) for batches in plan])
    assert not rendezvous(schedule, plans, blocking=True)


def test_receives_do_not_start_long_before_they_are_needed():
    """Few wait, since a receive starts no more than an action ahead, or where a send that comes later must start. In
    breadth-first order the first of a run wait for the others.
    """
    for p, m in ((2, 8), (4, 16)):
        for name, schedule in by_hand(p, m).items():
            for rank, actions in enumerate(schedule):
                waiting, most = set(), 0
                for place, batches in enumerate(plan_send_recv(schedule, rank)):
                    waiting |= {t[:3] for batch in batches for t in batch if t.target == rank}
                    most = max(most, len(waiting))
                    if place < len(actions) and actions[place].kind != "W":
                        waiting.discard(("F" if actions[place].kind == "F" else "B", *actions[place][1:]))
                assert most <= (m if name == "breadth first" else 3), (name, rank, most)
                assert not waiting


def test_how_much_travels():
    """2 (p - 1) m hidden states and gradients; 2 (p v - 1) m; where a V turns nothing does."""
    for p, m in ((2, 4), (4, 8)):
        for schedule, boundaries in (
            (afab(p, m), p - 1),
            (one_f_one_b(p, m), p - 1),
            (zero_bubble_h2(p, m), p - 1),
            (interleaved(p, m, 2), 2 * p - 1),
            (interleaved(p, m, 3), 3 * p - 1),
            (zero_bubble_v(p, m), 2 * p - 2),
            (dualpipe(p, m), p - 1),
        ):
            assert len(find_transfers(schedule)) == 2 * boundaries * m
    assert find_transfers(one_f_one_b(1, 4)) == [] and plan_send_recv(one_f_one_b(1, 2), 0) == [[]] * 5


def delivered(schedule) -> tuple[list[str], int]:
    """On a rank: what arrives as something else than what was sent, by a P2PBuffers; and how much is left in it."""
    group = dist.group.WORLD
    stages = 1 + max(action.stage for actions in schedule for action in actions)
    shapes = [StageInput((2, 3 + stage), torch.float32 if stage % 2 else torch.bfloat16) for stage in range(stages)]
    p2p = P2PBuffers(plan_send_recv(schedule, group.rank()), group, shapes, torch.device("cpu"))
    wrong = []

    def made(kind: str, stage: int, i: int) -> torch.Tensor:
        shape, dtype = shapes[stage + (kind == "B")]
        return torch.full(shape, 10.0 * stage + i + (kind == "B") / 2, dtype=dtype).t().contiguous().t()  # in any order

    for place, (kind, stage, i) in enumerate(schedule[group.rank()]):
        p2p.start(place)
        wrong += [f"{len(p2p.in_flight)} sends under way"] * (len(p2p.in_flight) > MAX_SENDS_IN_FLIGHT)
        if kind == "W":
            continue
        way = "F" if kind == "F" else "B"
        if (stage > 0) if way == "F" else (stage < stages - 1):
            came = p2p.wait_recv(way, stage, i)
            same = came.dtype == made(way, stage, i).dtype and torch.equal(came, made(way, stage, i))
            wrong += [f"{way} {stage} {i}"] * (not same)
        if (stage < stages - 1) if way == "F" else (stage > 0):
            p2p.post_send(way, stage + (1 if way == "F" else -1), i, made(way, stage + (1 if way == "F" else -1), i))
    p2p.start(len(schedule[group.rank()]))
    p2p.wait_for_sends(0)
    return wrong, len(p2p.in_flight) + len(p2p.incoming) + len(p2p.outgoing)


def test_everything_arrives(ranks):
    """On four ranks, by hand and at random, tensors of several dtypes that are not contiguous; nothing is left."""
    of_four = [s for s in RANDOM.values() if len(s) == 4 and all(s)][:6]
    assert len(of_four) >= 4
    for schedule in itertools.chain(by_hand(4, 8).values(), of_four):
        assert ranks(delivered, schedule) == [([], 0)] * 4


def test_a_tensor_that_is_not_there_is_named_with_those_that_are(ranks):
    """On four ranks: what rank 0 says where an action asks for a tensor that was posted under another key, and where it
    is to send one that was not posted.
    """
    received, sent = ranks(misplaced)[0]
    assert "rank 0 has no tensor for B of stage 0, micro-batch 1. It has: F of stage 0, micro-batch 0" in received
    assert (
        "no tensor for F of stage 1, micro-batch 0. It has: F of stage 1, micro-batch 1, to send; F of stage 0" in sent
    )
    assert "It has: none" in ranks(nothing_posted)[0]


def misplaced() -> tuple[str, str]:
    """On a rank: both messages."""
    shapes = [StageInput(torch.Size((1,)), torch.float32)] * 4
    group = dist.group.WORLD
    p2p = P2PBuffers(plan_send_recv(afab(4, 2), group.rank()), group, shapes, torch.device("cpu"))
    if group.rank() > 0:
        return "", ""
    p2p.post_send("F", 0, 0, torch.ones(1))  # not the next stage's
    with pytest.raises(KeyError) as received:
        p2p.wait_recv("B", 0, 1)
    p2p.post_send("F", 1, 1, torch.ones(1))
    with pytest.raises(KeyError) as sent:
        p2p.start(1)
    return str(received.value), str(sent.value)


def nothing_posted() -> str:
    """On a rank: the message where there is no tensor at all."""
    p2p = P2PBuffers([[], []], dist.group.WORLD, [None], torch.device("cpu"))
    return p2p.no_tensor(("F", 0, 0))
