"""Check of exercise 07.2: GatheredMatmul against one process, and a diary of its backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_kit.checks.sequence_parallel.cases import Case, results_of
from course_kit.checks.sequence_parallel.diary import Diary, Event, total, unfinished
from course_kit.labs.tensor_parallel.models import relative_error
from course_kit.ranks import shared
from course_kit.typed import grad_of
from course_lib.collectives.traffic import count_traffic
from course_lib.sequence_parallel import model as sequence
from course_lib.tensor_parallel.by_hand import cut

WISHES = (True, (1, 1, 1)), (False, (1, 1, 1)), (True, (0, 1, 0)), (True, (0, 0, 0))


class RankResult(NamedTuple):
    """One rank's results of a backward."""

    errors: dict[str, float]  # by name
    events: list[Event]
    sent: dict[str, int]  # bytes by collective
    spoiled: bool  # it changes its arguments
    matmul_dtypes: set[torch.dtype]


def gathered_trial(
    group: dist.ProcessGroup, wants_x: bool, wants: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> RankResult:
    """Try GatheredMatmul.

    wants: which of three weights want a gradient.
    """
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 8, 6, generator=generator).to(dtype)
    weights = [torch.randn(size, 6, generator=generator).to(dtype) for size in (16, 8, 8)]
    grads = [torch.randn(2, 8, len(weight), generator=generator).to(dtype) for weight in weights]
    full = [t.double().requires_grad_() for t in (x, *weights)]
    torch.autograd.backward([F.linear(full[0], w) for w in full[1:]], [g.double() for g in grads])
    expected = [cut(grad_of(full[0]), group, 1), *(cut(grad_of(w), group, 0) for w in full[1:])]
    local = [cut(x, group, 1).clone(), *(cut(w, group, 0).clone() for w in weights)]
    wanted = [t.requires_grad_() for t, want in zip(local, (wants_x, *wants), strict=True) if want]
    outs = sequence.GatheredMatmul.apply(local[0], group, *local[1:])
    given = [cut(g, group, -1).clone() for g in grads]
    copies = [g.clone() for g in given]
    with Diary() as diary, count_traffic() as traffic:
        got = iter(torch.autograd.grad(outs, wanted, given))
    named = zip(("x", "weight 0", "weight 1", "weight 2"), expected, (wants_x, *wants), strict=True)
    errors = {name: relative_error(next(got).double(), right) for name, right, want in named if want}
    spoiled = not all(torch.equal(g, c) for g, c in zip(given, copies, strict=True))
    sent = {r.collective: r.bytes for r in sorted(traffic.records, key=lambda r: r.collective)}
    if len(sent) < len(traffic.records):
        sent = {f"{number}. {r.collective}": r.bytes for number, r in enumerate(traffic.records, start=1)}
    return RankResult(errors, diary.events, sent, spoiled, diary.matmul_dtypes)


def check() -> None:
    """Judge GatheredMatmul.backward on 2 and 4 ranks."""
    cases: list[Case] = [(n, gathered_trial, *wish) for n in (2, 4) for wish in WISHES]
    cases.append((*cases[0], torch.bfloat16))
    with shared(4).within(20):
        for (n, _, wants_x, wants, *dtype), report in zip(cases, results_of(cases[:1], cases[1:]), strict=True):
            for rank, result in enumerate(report):
                where = f"{n} ranks, rank {rank}, gradients for {'x and ' if wants_x else ''}weights {wants}"
                judge(where + ", in BF16" * bool(dtype), n, wants_x, wants, result, *dtype)


def judge(
    where: str,
    n: int,
    wants_x: bool,
    wants: tuple[int, ...],
    result: RankResult,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Judge what one rank did in one case."""
    errors, events, sent, spoiled, matmul_dtypes = result
    each = [16 * 6 * size // n for size in (16, 8, 8)]  # multiplications of one matmul
    assert not unfinished(events), f"{where}: a transfer is never waited for"
    for name, error in errors.items():
        assert error < (1e-5 if dtype == torch.float32 else 0.02), (
            f"{where}: the gradient of {name} is not one process's"
        )
    assert not spoiled, f"{where}: a gradient passed to backward has changed"
    wanted = ["all_gather"] * any(wants) + ["reduce_scatter"] * wants_x
    assert list(sent) == wanted, (
        f"{where}: backward sends {', '.join(sent) or 'nothing'}; {' and '.join(wanted) or 'nothing'} is wanted"
    )
    enough = 2 * 8 * 6 * dtype.itemsize * (n - 1) // n
    for name, bytes_sent in sent.items():
        assert bytes_sent == enough, f"{where}: the {name} sends {bytes_sent} bytes, {enough} are enough: in {dtype}"
    assert matmul_dtypes <= {dtype}, f"{where}: matmuls in {', '.join(map(str, matmul_dtypes))}: stay in {dtype}"
    names, done = [word for word, _ in events], total(events, "matmul")
    of_weights = sum(e for e, want in zip(each, wants, strict=True) if want)
    assert done == wants_x * sum(each) + of_weights, (
        f"{where}: {done} multiplications, {wants_x * sum(each) + of_weights} are enough: who needs them?"
    )
    if not (wants_x and any(wants)):
        return
    for name, word, enough in (("all-gather", "gather", sum(each)), ("reduce-scatter", "scatter", of_weights)):
        beside = total(events[names.index(f"start {word}") : names.index(f"wait {word}")], "matmul")
        assert beside >= enough, (
            f"{where}: {beside} multiplications while the {name} is in flight, {enough} could hide it"
        )
