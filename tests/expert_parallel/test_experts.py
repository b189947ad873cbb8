"""course_lib.expert_parallel.experts: three ways to send tokens through experts, against one token at a time. CPU; a
GPU where there is one.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.expert_parallel.experts import (
    AddByToken,
    Experts,
    TakeByToken,
    batched_experts,
    grouped_experts,
    grouped_matmul,
    loop_experts,
    sorted_choices,
)
from split_models import Additions, kept_storages

WAYS = {"loop": loop_experts, "batched": batched_experts, "grouped": grouped_experts}
HIDDEN, WIDTH = 16, 24
# (tokens, experts, k, how they are chosen)
SIZES = [
    (13, 5, 2, "any"),
    (32, 8, 2, "any"),
    (7, 3, 3, "any"),
    (9, 6, 1, "one takes all"),
    (10, 7, 2, "half are empty"),
    (1, 4, 2, "any"),
    (0, 4, 2, "any"),
    (6, 1, 1, "any"),
]


def made(experts: int, way: str, dtype=torch.float32, sizes=(HIDDEN, WIDTH), device="cpu") -> Experts:
    module, generator = Experts(experts, *sizes, WAYS[way]).to(dtype), torch.Generator().manual_seed(experts)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return module.to(device)


def inputs(tokens: int, experts: int, k: int, kind: str, dtype=torch.float32, hidden=HIDDEN) -> tuple:
    """x [t, h], gates [t, E], and the gradient of what comes out [t, h]."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator)
    if kind == "one takes all":
        scores[:, 2] += 1
    if kind == "half are empty":
        scores[:, ::2] -= 1
    gates = torch.zeros(tokens, experts)
    gates.scatter_(1, scores.topk(k).indices, torch.rand(tokens, k, generator=generator) + 0.1)
    x, gradient = torch.randn(2, tokens, hidden, generator=generator).to(dtype)
    return x, gates, gradient


def slots_of(way: str, gates: torch.Tensor) -> int:
    """The last argument: choices, or as many slots as the fullest expert needs."""
    return int((gates != 0).sum(0).max()) if way == "batched" and len(gates) else int((gates != 0).sum())


def token_by_token(module: Experts, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """In float64: the formula, for each token and expert."""
    gate, up, down = (p.double() for p in (module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight))
    rows = [torch.zeros(x.shape[1], dtype=torch.float64) + 0 * x[t].double() for t in range(len(x))]
    for t, e in gates.nonzero().tolist():
        g, u = gate[e] @ x[t].double(), up[e] @ x[t].double()
        rows[t] = rows[t] + gates[t, e].double() * (down[e] @ (g * torch.sigmoid(g) * u))
    return torch.stack(rows) if rows else x.double()


def results(module: Experts, run, x, gates, gradient) -> dict[str, torch.Tensor]:
    """out, and the gradients of x, gates and weights."""
    leaves = [x.clone().requires_grad_(), gates.clone().requires_grad_(), *module.parameters()]
    out = run(module, leaves[0], leaves[1])
    grads = torch.autograd.grad(out, leaves, gradient.to(out.dtype), allow_unused=True)
    names = ["x", "gates", *(name for name, _ in module.named_parameters())]
    zeros = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)]
    found = {"out": out.detach()} | dict(zip(names, zeros, strict=True))
    found["gates"] = found["gates"] * (gates != 0)  # a way may give the others one: theirs is never used
    return found


def off(found: dict, exact: dict) -> dict[str, float]:
    """By name, the largest error over the largest element."""
    wrong = {}
    for name, expected in exact.items():
        assert found[name].shape == expected.shape, name
        if expected.numel():
            error = (found[name].double().cpu() - expected.double()).abs().max()
            wrong[name] = (error / expected.abs().max().clamp(min=1e-12)).item()
    return wrong


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", SIZES)
def test_each_way_is_the_formula(way, sizes):
    """Outputs and all gradients, float32 within 1e-5 of float64; experts without tokens get zeros."""
    module, given = made(sizes[1], way), inputs(*sizes)
    found = results(module, lambda m, x, gates: m(x, gates, slots_of(way, gates)), *given)
    wrong = off(found, results(module, token_by_token, *given))
    assert all(error < 1e-5 for error in wrong.values()), wrong
    empty = (given[1] != 0).sum(0) == 0
    assert not found["gate_proj.weight"][empty].any() and not found["down_proj.weight"][empty].any()


@pytest.mark.parametrize("way", WAYS)
def test_odd_widths(way):
    """F.grouped_mm wants rows of whole 16 bytes: sizes that are not are the library's business."""
    module, given = made(3, way, sizes=(7, 5)), inputs(9, 3, 2, "any", hidden=7)
    found = results(module, lambda m, x, gates: m(x, gates, slots_of(way, gates)), *given)
    assert all(error < 1e-5 for error in off(found, results(module, token_by_token, *given)).values())


@pytest.mark.parametrize("way", WAYS)
def test_in_bfloat16_by_autocast(way):
    """Within 4e-2 of float64 (8 significant bits, three products): x and weights go in as bfloat16, gates do not."""
    module, given = made(5, way), inputs(40, 5, 2, "any")
    dtypes = []

    def run(m, x, gates):
        with torch.autocast("cpu", torch.bfloat16):
            out = m(x, gates, slots_of(way, gates))
        dtypes.append(out.dtype)
        return out

    wrong = off(results(module, run, *given), results(module, token_by_token, *given))
    assert dtypes == [torch.bfloat16] and all(error < 4e-2 for error in wrong.values()), wrong
    half = made(5, way, torch.bfloat16)
    assert half(given[0].bfloat16(), given[1], slots_of(way, given[1])).dtype == torch.bfloat16


@pytest.mark.parametrize("way", WAYS)
def test_many_experts_add_up_in_float32(way):
    """200 experts that are the same give what one does, within a rounding of bfloat16. (One index_add of bfloat16 adds
    up in float32 by itself on a CPU; 200 of the loop do not.)
    """
    one, many = made(1, "loop", torch.bfloat16), made(200, way, torch.bfloat16)
    for linear, only in zip(many.children(), one.children(), strict=True):
        linear.weight.data.copy_(only.weight.data.expand_as(linear.weight))
    x = inputs(6, 1, 1, "any")[0].bfloat16()
    gates = torch.full((6, 200), 1 / 200)
    out, expected = many(x, gates, slots_of(way, gates)).float(), one(x, torch.ones(6, 1), 6).float()
    assert ((out - expected).abs() <= 2**-7 * expected.abs()).all()


@pytest.mark.parametrize("way", ["batched", "grouped"])
def test_a_tokens_gradients_add_up_in_float32(way):
    """Out and the gradient of x, of 5 experts a token in bfloat16: one sum each, rounded once."""
    module, (x, gates, gradient) = made(6, way, torch.bfloat16), inputs(7, 6, 5, "any", torch.bfloat16)
    with Additions() as additions:
        module(x.requires_grad_(), gates, slots_of(way, gates)).backward(gradient)
    assert additions.dtypes == [torch.float32] * 2


def added_and_taken(device: str) -> list[torch.Tensor]:
    """256, 1, 1 and 1 added to the same token, in bfloat16; and as gradients of the rows taken of one."""
    rows = torch.tensor([256.0, 1, 1, 1], dtype=torch.bfloat16, device=device)[:, None].expand(4, HIDDEN)
    token = torch.zeros(4, dtype=torch.long, device=device)
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    TakeByToken.apply(x, token).backward(rows)
    return [AddByToken.apply(rows, token, 1), x.grad]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sums_by_token_are_rounded_once(device):
    """259 becomes 260; in bfloat16 256 + 1 is 256."""
    for tensor in added_and_taken(device):
        assert tensor.dtype == torch.bfloat16 and (tensor == 260).all(), tensor


def test_gradcheck():
    """The loop, in float64: with respect to x, gates and all weights."""
    module = made(3, "loop", torch.float64, (4, 3))
    x, gates, _ = inputs(5, 3, 2, "any", torch.float64, 4)
    gates, chosen = gates.double().requires_grad_(), (gates != 0).double()
    weights = [p.detach().requires_grad_() for p in module.parameters()]
    names = [name for name, _ in module.named_parameters()]

    def run(x, gates, *weights):
        given = x, gates * chosen, 0
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), given)

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), gates, *weights))


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_does_not_lie_row_by_row(way):
    module, (x, gates, gradient) = made(5, way), inputs(13, 5, 2, "any")
    strided = gradient.t().contiguous().t()
    assert not strided.is_contiguous()

    def run(m, x, gates):
        return m(x, gates, slots_of(way, gates))

    plain, other = (results(module, run, x, gates, g) for g in (gradient, strided))
    assert all(error < 1e-6 for error in off(other, plain).values())
    expanded, repeated = (
        results(module, run, x, gates, g) for g in (gradient[:1].expand(13, -1), gradient[:1].repeat(13, 1))
    )
    assert all(error < 1e-6 for error in off(expanded, repeated).values())


def test_a_product_of_groups_takes_an_expanded_gradient():
    """That of a sum has strides of 0."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((6, 8), (2, 4, 8)))
    out = grouped_matmul(rows, weight, torch.tensor([2, 6], dtype=torch.int32))
    out.sum().backward()
    expected = torch.cat([weight[0].sum(0).expand(2, -1), weight[1].sum(0).expand(4, -1)])
    torch.testing.assert_close(rows.grad, expected)
    torch.testing.assert_close(out, torch.cat([rows[:2] @ weight[0].t(), rows[2:] @ weight[1].t()]))


def test_sorted_choices():
    gates = torch.tensor([[0.5, 0, 0.5], [0, 0, 1], [0.2, 0, 0]])
    expert, token, ends = sorted_choices(gates, 4)
    assert expert.tolist() == [0, 0, 2, 2] and token.tolist() == [0, 2, 0, 1]
    assert ends.tolist() == [2, 2, 4] and ends.dtype == torch.int32


# What it costs.


class Work(TorchDispatchMode):
    """Counts, inside: multiplications of matrix products, operators, and those whose result the host waits for."""

    def __init__(self):
        super().__init__()
        self.multiplications, self.operators, self.read = 0, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        self.operators += 1
        self.read += [name] * (name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"))
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            self.multiplications += out.numel() * args[name.startswith(("add", "bad"))].shape[-1]
        if name == "_grouped_mm":  # rows [r, in] by [E, in, out], or [in, r] by [r, out]
            self.multiplications += args[0].numel() * args[1].shape[-1]
        return out


def work_of(way: str, tokens: int, experts: int, k: int, kind: str = "any") -> tuple[Work, Work]:
    """Of a forward, and of a backward."""
    module, (x, gates, gradient) = made(experts, way), inputs(tokens, experts, k, kind)
    last = slots_of(way, gates)
    with Work() as forward:
        out = module(x.requires_grad_(), gates.requires_grad_(), last)
    with Work() as backward:
        out.backward(gradient)
    return forward, backward


def test_multiplications_are_those_of_the_choices():
    """3 h f a choice in forward, twice that in backward; slots that are empty cost as much."""
    for tokens, experts, k, kind in ((32, 8, 2, "any"), (10, 7, 2, "half are empty"), (9, 6, 1, "one takes all")):
        slots = slots_of("batched", inputs(tokens, experts, k, kind)[1])
        rows = {"loop": tokens * k, "grouped": tokens * k, "batched": experts * slots}
        for way in WAYS:
            forward, backward = work_of(way, tokens, experts, k, kind)
            once = 3 * HIDDEN * WIDTH * rows[way]
            assert (forward.multiplications, backward.multiplications) == (once, 2 * once), (way, kind)


def test_as_many_operators_for_many_experts_as_for_few_and_no_wait():
    """The loop grows with E and waits for each of its counts; the others do neither."""
    for way in ("grouped", "batched"):
        few, many = work_of(way, 40, 4, 2), work_of(way, 40, 32, 2)
        assert [w.operators for w in few] == [w.operators for w in many], way
        assert not any(w.read for w in (*few, *many)), way
    few, many = work_of("loop", 40, 4, 2), work_of("loop", 40, 32, 2)
    assert many[0].operators > 6 * few[0].operators and len(many[0].read) == 32


def test_fewer_slots_keep_the_largest_gates():
    module, (x, gates, _) = made(4, "batched"), inputs(20, 4, 2, "any")
    kept = gates * (gates >= gates.topk(3, dim=0).values[-1])
    torch.testing.assert_close(module(x, gates, 3), made(4, "loop")(x, kept, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_each_way_on_a_gpu(way):
    """In bfloat16 within 4e-2 of float64; 24 and 16 numbers are whole 16 bytes."""
    for sizes in SIZES:
        x, gates, gradient = inputs(*sizes)
        expected = results(made(sizes[1], way), token_by_token, x, gates, gradient)
        module = made(sizes[1], way, torch.bfloat16, device="cuda")
        given = x.cuda().bfloat16(), gates.cuda(), gradient.cuda().bfloat16()
        found = results(module, lambda m, x, gates: m(x, gates, slots_of(way, gates)), *given)
        wrong = off(found, expected)
        assert all(error < 4e-2 for error in wrong.values()), (sizes, wrong)


def test_what_grouped_experts_keep():
    """Rows that go in, gate, silu(gate), up, their product, rows that come out: no sum keeps what it has added up."""
    tokens, k = 64, 2
    module, (x, gates, _) = made(4, "grouped"), inputs(tokens, 4, k, "any")
    gates.requires_grad_()
    with kept_storages([x, gates, *module.parameters()]) as kept:
        module(x, gates, tokens * k)
    floats, numbers = 4 * tokens * k * (2 * HIDDEN + 4 * WIDTH + 1), 8 * tokens * k
    assert floats <= sum(kept.values()) <= floats + 4 * numbers
