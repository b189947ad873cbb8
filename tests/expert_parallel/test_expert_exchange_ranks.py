"""course_lib.expert_parallel.exchange on two to four ranks against one process: results, bytes, order. CPU, gloo."""

import itertools

import torch
import torch.distributed as dist

from course_lib.collectives.traffic import count_traffic
from course_lib.expert_parallel.exchange import dispatch_and_combine, read_sizes, send_rows
from course_lib.expert_parallel.experts import Experts, grouped_experts, loop_experts
from course_lib.expert_parallel.mixture import MoE
from course_lib.single_gpu.model import ModelConfig
from split_models import Additions, differing, group_of

HIDDEN, WIDTH, EXPERTS = 16, 8, 12  # 12 experts go on 2, 3 and 4 ranks


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Rows to other ranks.

SENDS = {  # from each rank to each rank
    "uneven": [[1, 2, 0, 3], [0, 0, 4, 1], [2, 0, 0, 0], [0, 5, 1, 2]],
    "one gets all": [[0, 0, 3, 0]] * 4,
    "nothing": [[0] * 4] * 4,
    "to oneself": [[2 * (i == j) for j in range(4)] for i in range(4)],
}


def exchange(table: list[list[int]], dtype: torch.dtype) -> dict[str, object]:
    """On a rank: what is wrong with what arrives, with its gradients, and with how they are sent."""
    group, found = dist.group.WORLD, {}
    rank, n = group.rank(), group.size()
    sends, receives = table[rank], [row[rank] for row in table]
    rows = {i: [numbers(sum(row), *tail, seed=7 * i + len(tail)).to(dtype) for tail in ((3,), (), (2, 5))]
            for i, row in enumerate(table)}  # fmt: skip

    def arriving(place: int) -> torch.Tensor:
        parts = [rows[i][place].split(row)[rank] for i, row in enumerate(table)]
        return torch.cat(parts)

    mine = [tensor.clone().requires_grad_(place != 2) for place, tensor in enumerate(rows[rank])]
    mine[0] = rows[rank][0].t().contiguous().t().requires_grad_()  # not row by row
    with count_traffic() as traffic:
        came = send_rows(group, sends, receives, *mine)
    found["arrives"] = all(torch.equal(x, arriving(place)) for place, x in enumerate(came))
    wanted = [x for x in came if x.requires_grad]
    back = [numbers(*x.shape, seed=rank + x.dim()).to(dtype) for x in wanted]
    with count_traffic() as backward:
        grads = torch.autograd.grad(wanted[:2], mine[:2], back)
    for place, (grad, tail) in enumerate(zip(grads, ((3,), ()), strict=True)):
        theirs = []  # what each rank gives to rows from this one
        for i in range(n):
            sizes = [row[i] for row in table]
            theirs.append(numbers(sum(sizes), *tail, seed=i + 1 + len(tail)).to(dtype).split(sizes)[rank])
        found[f"gradient {place}"] = torch.equal(grad, torch.cat(theirs))
    away, to_others = (sum(x) - x[rank] for x in (receives, sends))
    for name, log, leaving in (("forward", traffic, to_others), ("backward", backward, away)):
        kinds = {record.collective for record in log.records}
        found[f"{name} kinds"] = kinds == {"all_to_all"}
        least = leaving * (3 + 1 + 10) * dtype.itemsize
        found[f"{name} bytes"] = log.bytes == least, (log.bytes, least)
    found = {name: x if isinstance(x, tuple) else (x, "") for name, x in found.items()}
    return {name: text for name, (right, text) in found.items() if not right}


def test_rows_arrive_and_their_gradients_go_back(ranks):
    """Three tensors at once, to the byte; a rank may send or get nothing."""
    for (name, table), dtype in itertools.product(SENDS.items(), (torch.float32, torch.bfloat16)):
        for wrong in ranks(exchange, table, dtype):
            assert not wrong, (name, dtype, wrong)


def sizes_read() -> tuple:
    """On a rank: what read_sizes says where rank i sends 10 i + j rows to rank j, of twice as many choices."""
    group = dist.group.WORLD
    rows = 10 * group.rank() + torch.arange(4)
    with count_traffic() as traffic:
        sizes = read_sizes(rows, 2 * rows, group)
    return sizes, [(record.collective, record.bytes) for record in traffic.records]


def test_sizes_travel_in_one_small_message(ranks):
    for rank, ((sends, receives, choices), sent) in enumerate(ranks(sizes_read)):
        assert sends == [10 * rank + j for j in range(4)] and receives == [10 * i + rank for i in range(4)]
        assert choices == 2 * sum(receives) and sent == [("all_to_all", 3 * 2 * 8)]


# Dispatch and combine.


def experts(part: slice = slice(None), dtype=torch.float32) -> Experts:
    """All experts, or a part of them."""
    module = Experts(EXPERTS, HIDDEN, WIDTH, grouped_experts)
    for seed, linear in enumerate((module.gate_proj, module.up_proj, module.down_proj)):
        whole = numbers(*linear.weight.shape, seed=seed) * linear.weight.shape[-1] ** -0.5
        linear.weight = torch.nn.Parameter(whole[part].clone().to(dtype))
    return module


def inputs(rank: int, tokens: int, k: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [t, h], gates [t, E] and the gradient of what comes out, of a rank's tokens."""
    scores = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(rank))
    if kind == "one takes all":
        scores[:, 7] += 1
    if kind == "the first rank's alone":
        scores[:, 3:] -= 1
    gates = torch.zeros(tokens, EXPERTS).scatter(1, scores.topk(k).indices, numbers(tokens, k, seed=rank).abs() + 0.1)
    if kind == "dropped" and tokens:  # as by a capacity: a token that goes nowhere, and one with a choice less
        gates[0] = 0
        gates[-1, gates[-1].argmax()] = 0
    x, gradient = numbers(2, tokens, HIDDEN, seed=100 + rank)
    return x, gates, gradient


def run_all(module: Experts, compute, x, gates, gradient) -> tuple[torch.Tensor, ...]:
    """out, and the gradients of x and gates; the weights' add up."""
    x, gates = x.clone().requires_grad_(), gates.clone().requires_grad_()
    out = compute(x, gates, None)
    out.backward(gradient.to(out.dtype))
    return out.detach(), x.grad, gates.grad * (gates != 0)


# (ranks, tokens of each, k, kind)
CASES = [
    (2, (9, 6), 2, "any"),
    (3, (5, 7, 4), 3, "any"),
    (4, (5, 3, 0, 7), 2, "any"),
    (4, (0, 0, 0, 6), 1, "any"),
    (4, (0, 0, 0, 0), 2, "any"),
    (4, (4, 4, 4, 4), 1, "one takes all"),
    (4, (3, 5, 2, 4), 2, "the first rank's alone"),
    (4, (6, 5, 4, 3), 3, "dropped"),
    (4, (4, 6, 5, 7), EXPERTS, "any"),
    (1, (8,), 2, "any"),
]


def dispatched(n: int, tokens: tuple[int, ...], k: int, kind: str) -> dict[str, object]:
    """On a rank: what is not as in one process, or sent for nothing."""
    group = group_of(n)
    if group.size() < n:
        return {}
    rank, size = group.rank(), EXPERTS // n
    own = experts(slice(rank * size, (rank + 1) * size))
    given, called, wrong = inputs(rank, tokens[rank], k, kind), [], {}

    def compute(rows, gates, choices):
        called.append((len(rows), int((gates != 0).sum()) == choices, list(gates.shape[1:])))
        return own(rows, gates, choices)

    x, gates = (tensor.clone().requires_grad_() for tensor in given[:2])
    with count_traffic() as forward:
        out = dispatch_and_combine(x, gates, None, group, compute)
    with count_traffic() as backward:
        out.backward(given[2])
    everybody = experts()
    of_all = [
        run_all(everybody, lambda x, g, _: loop_experts(everybody, x, g, 0), *inputs(r, tokens[r], k, kind))
        for r in range(n)
    ]
    found = dict(zip(("out", "x", "gates"), (out, x.grad, gates.grad * (gates != 0)), strict=True))
    same = dict(zip(found, of_all[rank], strict=True))
    for name, linear in own.named_children():
        found[name] = linear.weight.grad
        same[name] = getattr(everybody, name).weight.grad[rank * size : (rank + 1) * size]
    for name, x in found.items():
        off = (x - same[name]).abs().max() if x.numel() else 0
        if x.shape != same[name].shape or not off <= 1e-5 * (same[name].abs().max() if x.numel() else 1):
            wrong[name] = float(off)
    reached = (given[1].unflatten(1, (n, -1)) != 0).any(2)  # [t, n]
    leaving = int(reached.sum() - reached[:, rank].sum())
    arriving = [
        int((inputs(r, tokens[r], k, kind)[1].unflatten(1, (n, -1)) != 0)[:, rank].any(1).sum()) for r in range(n)
    ]
    from_others = sum(arriving) - arriving[rank]
    wrong |= {"compute": called} if called != [(sum(arriving), True, [size])] else {}
    row, of_gates, sizes = 4 * HIDDEN, 4 * size, 2 * 8 * (n - 1)
    for name, log, least in (
        ("forward", forward, leaving * (row + of_gates) + from_others * row + sizes),
        ("backward", backward, from_others * (row + of_gates) + leaving * row),
    ):
        kinds = {record.collective for record in log.records}
        if log.bytes != least or kinds != {"all_to_all"}:
            wrong[f"{name} sends"] = kinds, log.bytes, least
    orders = [[record.bytes for record in log.records] for log in (forward, backward)]
    # forward: sizes, then a token's row and gates, then combine; backward: combine's gradient, then that of dispatch
    rows, gates_out, rows_back, gates_back = (
        leaving * row,
        leaving * of_gates,
        from_others * row,
        from_others * of_gates,
    )
    mirror = [[sizes, rows, gates_out, rows_back], [rows, rows_back, gates_back]]
    wrong |= {"order": (orders, mirror)} if orders != mirror else {}
    return wrong


def test_dispatch_and_combine_are_one_process(ranks):
    """Outputs and all gradients in float32 within 1e-5; a token goes once to a rank, and no byte more is sent."""
    for case in CASES:
        for rank, wrong in enumerate(ranks(dispatched, *case)):
            assert not wrong, (case, rank, wrong)


def two_hops(tokens: tuple[int, ...], k: int) -> dict[str, object]:
    """On one of 2 nodes x 2 ranks: what differs between one hop and two, and the rows that cross to the other node."""
    nodes = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    inside = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    rank, size, results = dist.get_rank(), EXPERTS // 4, []
    given = inputs(rank, tokens[rank], k, "any")
    for hops in (1, 2):
        own = experts(slice(rank * size, (rank + 1) * size))

        def compute(x, gates, choices, own=own, hops=hops):
            if hops == 1:
                return dispatch_and_combine(x, gates, choices, dist.group.WORLD, own)
            return dispatch_and_combine(x, gates, choices, nodes, lambda *hop: dispatch_and_combine(*hop, inside, own))

        with count_traffic() as traffic:
            out, x, gates = run_all(own, compute, *given)
        results.append({"out": out, "x": x, "gates": gates} | {n: p.grad for n, p in own.named_parameters()})
    by_node = (given[1].unflatten(1, (2, -1)) != 0).any(2)
    to_the_other = int(by_node[:, 1 - rank // 2].sum()) * 4 * HIDDEN
    sent = [r.bytes for r in traffic.records if list(r.group) == dist.get_process_group_ranks(nodes)]
    return {"differs": differing(*results), "sent": sent, "rows": to_the_other}


def test_two_hops_are_one_and_a_token_crosses_once(ranks):
    for found in ranks(two_hops, (6, 5, 3, 7), 4):
        assert not found["differs"], found
        # sizes, rows, gates, combine; in backward combine's gradient, rows, gates
        assert len(found["sent"]) == 7 and found["sent"][:2] == [2 * 8, found["rows"]], found


def with_a_capacity() -> dict[str, list[str]]:
    """On a rank: what of a mixture with slots differs from one process with this rank's tokens."""
    group, of = dist.group.WORLD, ModelConfig(2, HIDDEN, 2, 1, WIDTH, 23)
    whole = MoE(of, EXPERTS, 2, capacity=0.5)
    for seed, parameter in enumerate(whole.parameters()):
        parameter.data.copy_(numbers(*parameter.shape, seed=seed) / 2)
    x = numbers(3, 8, HIDDEN, seed=group.rank())
    own = Experts(EXPERTS // 4, HIDDEN, WIDTH, grouped_experts)
    for name, linear in own.named_children():
        linear.weight.data = getattr(whole.experts, name).weight.data.chunk(4)[group.rank()].clone()
    gates = whole.router(x).flatten(0, 1)
    out = dispatch_and_combine(x.flatten(0, 1), gates, None, group, own)
    assert (gates != 0).sum() < 2 * 24, "nothing is dropped"
    return differing({"out": out}, {"out": whole(x).flatten(0, 1)})


def test_dropped_choices_do_not_travel(ranks):
    assert ranks(with_a_capacity) == [[]] * 4


def in_autocast() -> tuple:
    """On a rank: bytes of rows in float32 and under autocast, dtypes, and the error between them."""
    group, size = dist.group.WORLD, EXPERTS // 4
    rank = group.rank()
    x, gates, gradient = inputs(rank, 8, 2, "any")
    own, found = experts(slice(rank * size, (rank + 1) * size)), []
    for enabled in (False, True):
        seen = []

        def compute(rows, gates, choices, seen=seen):
            seen += [rows.dtype, gates.dtype]
            return own(rows, gates, choices)

        leaf = x.clone().requires_grad_()
        with count_traffic() as traffic, torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = dispatch_and_combine(leaf, gates, None, group, compute)
        with count_traffic() as backward:
            out.backward(gradient.to(out.dtype))
        reached = (gates.unflatten(1, (4, -1)) != 0).any(2)
        of_gates = int(reached.sum() - reached[:, rank].sum()) * 4 * size + 3 * 2 * 8
        found.append((traffic.bytes - of_gates, backward.bytes, [*seen, out.dtype, leaf.grad.dtype], out.detach()))
    return found


def test_autocast_sends_half_the_bytes(ranks):
    """Rows in bfloat16, gates in float32; within 4e-2 of float32."""
    half, whole = torch.bfloat16, torch.float32
    for (rows, back, dtypes, out), (half_rows, half_back, half_dtypes, half_out) in ranks(in_autocast):
        assert rows == 2 * half_rows and half_back < back
        assert dtypes == [whole] * 4 and half_dtypes == [half, whole, half, whole]
        assert ((half_out.float() - out).abs().max() / out.abs().max()).item() < 4e-2


def summed_in_bfloat16() -> tuple[torch.Tensor, torch.Tensor, list[torch.dtype], list[int]]:
    """On a rank: out, and the gradient of x, where the ranks multiply by 256, 1, 1 and 1; how they were added up, and
    the bytes of the rows sent.
    """
    group = dist.group.WORLD
    factor = 256.0 if group.rank() == 0 else 1.0
    x = torch.ones(3, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with count_traffic() as traffic, Additions() as additions:
        out = dispatch_and_combine(x, torch.ones(3, EXPERTS), None, group, lambda rows, gates, choices: factor * rows)
        out.backward(torch.ones_like(out))
    sent = [record.bytes for record in traffic.records if record.bytes == 2 * 3 * 3 * HIDDEN]
    return out.detach(), x.grad, additions.dtypes, sent


def test_sums_over_the_ranks_are_in_float32_and_rounded_once(ranks):
    """259 becomes 260; in bfloat16 256 + 1 is 256. The gradients of a token's rows are such a sum too. Rows still
    travel in bfloat16, there and back and in backward.
    """
    for out, grad, dtypes, sent in ranks(summed_in_bfloat16):
        for tensor in (out, grad):
            assert tensor.dtype == torch.bfloat16 and (tensor == 260).all(), tensor
        assert dtypes == [torch.float32] * 2 and len(sent) == 4, (dtypes, sent)
