"""Check of exercise 08.13: a mixture whose experts are on several ranks, against one process; bytes, rows, rounding."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_kit.checks.expert_parallel.ways import NAMES
from course_kit.checks.expert_parallel.work import Additions, Work, noted_exchanges
from course_kit.labs.expert_parallel.experts import by_token, some_choices, some_experts
from course_kit.labs.tensor_parallel.models import in_groups, relative_error
from course_kit.ranks import shared
from course_kit.typed import grad_of
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.expert_parallel import exchange
from course_lib.expert_parallel.experts import Experts
from course_lib.tensor_parallel.by_hand import cut


def all_by_all(experts: Experts, x: torch.Tensor, gates: torch.Tensor, choices: int) -> torch.Tensor:
    """Every expert on every token, times its gate: the formula, and E/k times the work."""
    gate, up, down = (part.weight for part in (experts.gate_proj, experts.up_proj, experts.down_proj))
    inside = F.silu(torch.einsum("th,efh->tef", x, gate)) * torch.einsum("th,efh->tef", x, up)
    return torch.einsum("tef,ehf,te->th", inside, down, gates)


def local_experts(group: dist.ProcessGroup, module: Experts) -> Experts:
    """Return this rank's shard of some experts."""
    local = Experts(len(module.gate_proj.weight) // group.size(), 32, 24, all_by_all)
    for mine, full in zip(local.parameters(), module.parameters(), strict=True):
        mine.data = cut(full.detach(), group, 0).clone()
    return local


class Noting:
    """Experts that note how many rows and choices they are given, and the shape of the gates."""

    def __init__(self, experts: Experts):
        self.experts = experts
        self.calls: list = []

    def __call__(self, rows: torch.Tensor, gates: torch.Tensor, choices: int) -> torch.Tensor:
        self.calls.append((len(rows), choices, tuple(gates.shape)))
        return self.experts(rows, gates, choices)


ENOUGH_IN_BF16 = 2 * 9 * 8 * 2 + 9 * 2 * 4 + 2 * 8 * 3  # bytes: rows there and back, gates, sizes


def rounding_trial(group: dist.ProcessGroup) -> tuple[dict[str, torch.Tensor], set[torch.dtype], list[str], list]:
    """Results of three tokens of ones in BF16 where rank 0 multiplies by 256, the others by 1, and their gradient;
    dtypes of sums; in which order forward starts, waits, and calls overlap_with; dtypes and bytes under autocast.
    """
    factor = 256.0 if group.rank() == 0 else 1.0
    x = torch.ones(3, 8, dtype=torch.bfloat16, requires_grad=True)
    with Additions() as additions:
        with noted_exchanges() as events:
            beside = functools.partial(events.append, "overlap_with")
            out = exchange.dispatch_and_combine(
                x, torch.ones(3, 8), None, group, lambda rows, gates, choices: factor * rows, beside
            )
        out.backward(torch.ones_like(out))
    cast = []
    for given in (x.detach(), x.detach().float()):
        with count_traffic() as traffic, torch.autocast("cpu", torch.bfloat16):
            mine = exchange.dispatch_and_combine(
                given, torch.ones(3, 8), None, group, lambda rows, gates, choices: rows
            )
        cast.append((mine.dtype, traffic.bytes))
    return {"out": out.detach(), "x's gradient": grad_of(x)}, additions.dtypes, events, cast


class RankResult(NamedTuple):
    """One rank's results of an exchanged mixture."""

    errors: dict[str, float]
    traffic: tuple[Traffic, Traffic]  # of forward and backward
    enough: tuple[int, int]  # bytes
    calls: list[tuple]  # of compute: rows, choices, shape of the gates
    arrived: tuple  # what it should get
    read: list[str]  # on the host


def exchange_trial(group: dist.ProcessGroup, kind: str, sizes: tuple[int, ...]) -> RankResult:
    """sizes: how many tokens each rank has."""
    rank, n, tokens = group.rank(), group.size(), sum(sizes)
    module, (x, gates, choices) = some_experts(), some_choices(kind, tokens)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    weight = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(2))
    expected = by_token(module, x, gates)
    right = torch.autograd.grad(expected, [x, gates, *module.parameters()], weight)
    local = local_experts(group, module)
    noting = Noting(local)
    rows, row_gates = (each.detach()[mine].clone().requires_grad_() for each in (x, gates))
    with count_traffic() as forward, Work() as work:
        out = exchange.dispatch_and_combine(rows, row_gates, choices, group, noting)
    with count_traffic() as backward:
        grads = torch.autograd.grad(out, [rows, row_gates, *local.parameters()], weight[mine], allow_unused=True)
    selected = (gates.detach()[mine] != 0).float()
    wanted = [expected[mine], right[0][mine], right[1][mine] * selected, *(cut(w, group, 0) for w in right[2:])]
    got = [out, grads[0], None if grads[1] is None else grads[1] * selected, *grads[2:]]
    errors = {name: relative_error(a, b) for name, a, b in zip(NAMES, got, wanted, strict=True)}
    goes = (gates.detach().unflatten(1, (n, -1)) != 0).any(2)  # [all tokens, n]
    output = goes[mine].sum().item() - goes[mine, rank].sum().item()
    come = goes[:, rank].sum().item() - goes[mine, rank].sum().item()
    row, gate_row, numbers = 4 * 32, 4 * 8 // n, 2 * 8 * (n - 1)
    enough = output * (row + gate_row) + come * row + numbers, output * row + come * (row + gate_row)
    arrived = goes[:, rank].sum().item(), (cut(gates.detach(), group, 1) != 0).sum().item()
    return RankResult(errors, (forward, backward), enough, noting.calls, (*arrived, (arrived[0], 8 // n)), work.read)


def judge(n: int, kind: str, sizes: tuple[int, ...]) -> None:
    """Judge groups of n ranks, with so many tokens each, against one process."""
    for rank, report in enumerate(shared(4)(in_groups, n, exchange_trial, kind, sizes)):
        where = f"{n} ranks, {kind}, rank {rank}"
        for word, traffic, least in zip(("forward", "backward"), report.traffic, report.enough, strict=True):
            ways = {record.collective for record in traffic.records}
            assert ways <= {"all_to_all"}, f"{where}, {word}: sends by {', '.join(sorted(ways))}: exchange the tokens"
            assert traffic.bytes <= least, (
                f"{where}, {word}: {traffic.bytes} bytes are sent, {least} are enough: send a token once to each rank "
                "that holds one of its experts"
            )
        assert report.read == ["tolist"], (
            f"{where}: the host reads by {', '.join(report.read)}: the one tolist of read_sizes is enough"
        )
        assert report.calls == [report.arrived], (
            f"{where}: compute gets (rows, choices, gates) {report.calls}, not {[report.arrived]}"
        )
        for name, error in report.errors.items():
            wrong = "is not one process's" if math.isfinite(error) else "is missing, of another shape or NaN"
            assert error < 1e-5, f"{where}: {name} {wrong}"


def judge_rounding() -> None:
    """Judge sums in BF16, and the order of starts and waits."""
    for result, dtypes, events, cast in shared(4)(in_groups, 4, rounding_trial):
        for (dtype, size), given in zip(cast, ("bfloat16", "float32"), strict=True):
            assert dtype == torch.bfloat16 and size <= ENOUGH_IN_BF16, (
                f"x in {given}, under autocast in BF16: the output is {dtype}, and {size} bytes are sent; "
                f"{ENOUGH_IN_BF16} are enough: cast x before it is sent"
            )
        for name, sums in result.items():
            assert sums.dtype == torch.bfloat16, f"x is bfloat16, {name} is {sums.dtype}: it should be as x"
            assert (sums == 260).all(), f"{name} of 256 + 1 + 1 + 1 is {sums[0, 0]}, not 260: add up in float32"
        assert dtypes <= {torch.float32}, f"rows are added up in {dtypes}: a GPU rounds each sum; add up in float32"
        present = events[events.index("wait") + 1 : -2]  # after read_sizes and before the way back
        assert present == ["start", "start", "overlap_with", "wait", "wait"], (
            f"dispatch: start both, call overlap_with, then wait for both: not {present}"
        )


def check() -> None:
    """Judge dispatch_and_combine on 2 and 4 ranks."""
    with shared(4).within(20):
        judge(4, "plain", (5, 5, 0, 7))
        judge_rounding()
        judge(2, "plain", (9, 6))
        judge(4, "empty experts", (4, 4, 4, 4))
        judge(4, "one expert takes all", (3, 6, 1, 2))
