"""course_lib.context_parallel.attention on one to four ranks against float64 in one process: results, traffic, memory,
order. CPU, gloo.
"""

import itertools
import math

import pytest
import torch
from torch import nn

from calls import said
from course_lib.collectives.traffic import count_traffic
from course_lib.context_parallel.blocks import FUSED_BLOCK, PLAIN_BLOCK, AttentionBlock
from course_lib.context_parallel.model import METHODS
from course_lib.sequence_parallel.shards import ORDERS, shard_sequence, unshard_sequence
from course_lib.single_gpu.profile import MemoryProfile
from split_models import Exchanges, group_of, kept_storages

WITHIN = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}  # norm of the error over the norm
NAMES = ("q", "k", "v")


def whole_inputs(tokens: int, heads: int, kv_heads: int, d: int, batch: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + kv_heads)
    counts = {"q": heads, "k": kv_heads, "v": kv_heads, "gradient": heads}
    return {x: torch.randn(batch, tokens, a, d, generator=generator, dtype=torch.float64) for x, a in counts.items()}


def exact(whole: dict[str, torch.Tensor], causal: bool) -> dict[str, torch.Tensor]:
    """out and gradients in float64, from plain products."""
    q, k, v = (whole[x].detach().double().requires_grad_() for x in NAMES)
    k_all, v_all = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    z = torch.einsum("bqad,bkad->baqk", q, k_all) / math.sqrt(q.shape[-1])
    if causal:
        z = z + torch.full(z.shape[-2:], -torch.inf, dtype=z.dtype).triu(1)
    out = torch.einsum("baqk,bkad->bqad", z.softmax(-1), v_all)
    grads = torch.autograd.grad(out, (q, k, v), whole["gradient"].double())
    return {"out": out.detach()} | dict(zip(NAMES, grads, strict=True))


def can_share(heads: int, kv_heads: int, n: int) -> bool:
    """Whether Ulysses can."""
    return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)


# (tokens on a rank, heads, K/V heads, size of a head, dtype, block)
SIZES = [
    (6, 12, 12, 64, torch.float32, FUSED_BLOCK),
    (4, 12, 6, 64, torch.float64, PLAIN_BLOCK),
    (2, 12, 1, 128, torch.float32, FUSED_BLOCK),
    (4, 12, 4, 64, torch.float64, FUSED_BLOCK),
    (8, 12, 3, 64, torch.bfloat16, FUSED_BLOCK),
    (4, 12, 12, 128, torch.bfloat16, PLAIN_BLOCK),
    (5, 12, 4, 64, torch.float32, FUSED_BLOCK),  # an odd number: contiguous alone
    (1, 12, 2, 64, torch.float64, FUSED_BLOCK),
]


def attention_differs(n: int) -> dict[str, str]:
    """On a rank: what is further from float64 than its dtype allows, or not as it was."""
    group, wrong = group_of(n), {}
    for (own, heads, kv_heads, d, dtype, block), causal in itertools.product(SIZES, (True, False)):
        whole = whole_inputs(own * group.size(), heads, kv_heads, d)
        whole = {name: x.to(dtype) for name, x in whole.items()}
        expected = exact(whole, causal)
        for (method, attend), order in itertools.product(METHODS.items(), ORDERS):
            if own % 2 and order == "zigzag" or method == "ulysses" and not can_share(heads, kv_heads, group.size()):
                continue
            parts = {name: shard_sequence(x, group, order) for name, x in whole.items()}
            before = {name: x.clone() for name, x in parts.items()}
            leaves = [parts[x].requires_grad_() for x in NAMES]
            out = attend(*leaves, group, causal, block, order)
            once = torch.autograd.grad(out, leaves, parts["gradient"], retain_graph=True)
            again = torch.autograd.grad(out, leaves, parts["gradient"])
            found = {"out": out} | dict(zip(NAMES, once, strict=True))
            case = f"{method} {order} {own} {kv_heads} {d} {dtype} {causal}"
            for name, x in found.items():
                error = unshard_sequence(x, group, order).double() - expected[name]
                error = (error.norm() / expected[name].norm().clamp(min=1)).item()  # of one token, q has no gradient
                if (
                    not error < WITHIN[dtype]
                    or x.dtype != dtype
                    or x.shape != parts[name if name != "out" else "q"].shape
                ):
                    wrong[f"{case}: {name}"] = f"{error:.1e}, {x.dtype}, {list(x.shape)}"
            if not all(map(torch.equal, once, again)):
                wrong[f"{case}: again"] = "not the same"
            if not all(torch.equal(parts[name], before[name]) for name in parts):
                wrong[f"{case}: inputs"] = "changed"
    return wrong


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_methods_are_float64s_attention(ranks, n):
    """Outputs and gradients of every rank, twice through one graph: within 1e-12, 2e-6 and 1.5e-2 by dtype."""
    for found in ranks(attention_differs, n):
        assert not found, found


def some_gradients() -> dict[str, bool]:
    """On a rank: whether each input's gradient is the same where it alone wants one; and what wants none."""
    whole, found = whole_inputs(16, 4, 4, 8), {}
    expected = exact(whole, True)
    parts = {name: shard_sequence(x) for name, x in whole.items()}
    for method, attend in METHODS.items():
        for wanted in NAMES:
            given = {x: parts[x].clone().requires_grad_(x == wanted) for x in NAMES}
            attend(*given.values()).backward(parts["gradient"])
            torch.testing.assert_close(given[wanted].grad, shard_sequence(expected[wanted]))
            found[f"{method} {wanted}"] = all(given[x].grad is None for x in NAMES if x != wanted)
        found[f"{method} none"] = not attend(*(parts[x] for x in NAMES)).requires_grad
        rows = [parts[x].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in NAMES]
        gradient = parts["gradient"].transpose(1, 2).contiguous().transpose(1, 2)
        attend(*rows).backward(gradient)  # views that do not lie row by row
        found[f"{method} strided"] = all(
            torch.allclose(x.grad, shard_sequence(expected[name])) for name, x in zip(NAMES, rows, strict=True)
        )
    return found


def test_only_some_inputs_want_a_gradient_and_views_are_welcome(ranks):
    for found in ranks(some_gradients):
        assert all(found.values()), found


def in_autocast() -> dict[str, object]:
    """On a rank: dtypes that a block is given and that come out, where q and k are float32 and v is bfloat16."""
    whole, found = whole_inputs(16, 4, 2, 64), {}
    expected = exact(whole, True)
    for method, attend in METHODS.items():
        leaves, seen = [shard_sequence(whole[x]).float().requires_grad_() for x in NAMES], []

        def forward(q, k, v, causal, seen=seen):
            seen += [q.dtype, k.dtype, v.dtype]
            return FUSED_BLOCK.forward(q, k, v, causal)

        with torch.autocast("cpu", torch.bfloat16):
            block = AttentionBlock(forward, FUSED_BLOCK.backward)
            out = attend(*leaves[:2], leaves[2].bfloat16(), attention=block)
        out.backward(shard_sequence(whole["gradient"]).to(out.dtype))
        error = max(
            ((x.grad.double() - shard_sequence(expected[name])).norm() / shard_sequence(expected[name]).norm()).item()
            for name, x in zip(NAMES, leaves, strict=True)
        )
        found[method] = {*seen, out.dtype}, {x.grad.dtype for x in leaves}, error
    return found


def test_autocast_decides_on_the_dtype_as_for_pytorchs_attention(ranks):
    """Rotary positions leave q and k in float32 beside a v in 16 bits: all of it is computed, and sent, in 16."""
    for found in ranks(in_autocast):
        assert len(found) == 3
        for seen, grads, error in found.values():
            assert seen == {torch.bfloat16} and grads == {torch.float32} and error < 2e-2


# What is sent, kept, and when.


def sent_and_kept(n: int) -> list[str]:
    """On a rank: what is wrong with the traffic of forward and backward, and the bytes kept between."""
    group, wrong, b, own, heads, d = group_of(n), [], 2, 4, 12, 8
    if group.size() < n:
        return wrong
    for kv_heads, dtype, (method, attend) in itertools.product(
        (12, 1), (torch.float32, torch.bfloat16), METHODS.items()
    ):
        whole, e = whole_inputs(own * n, heads, kv_heads, d), dtype.itemsize
        q, k, v = (shard_sequence(whole[x].to(dtype), group).requires_grad_() for x in NAMES)
        rows, per_head = b * own, b * own * d
        keys, queries = per_head * kv_heads, per_head * heads
        with count_traffic() as forward, kept_storages() as kept:
            out = attend(q, k, v, group)
        with count_traffic() as backward:
            out.backward(torch.ones_like(out))
        sent = {name: {} for name in ("forward", "backward")}
        for name, traffic in (("forward", forward), ("backward", backward)):
            for collective in {record.collective for record in traffic.records}:
                of_kind = traffic.select(collective)
                sent[name][collective] = of_kind.calls, of_kind.bytes
        wider = max(kv_heads, n)  # K/V heads that travel in Ulysses
        there, back = per_head * (heads + 2 * wider) * e, queries * e
        steps, pair, grads = n - 1, 2 * keys * e, 2 * keys * 4
        expected = {
            "ring": (
                {"send": (steps, steps * pair), "recv": (steps, 0)},
                {"send": (2 * steps, steps * (pair + grads)), "recv": (2 * steps, 0)},
            ),
            "all_gather": (
                {"all_gather": (1, steps * pair)},
                {"all_gather": (1, steps * pair), "reduce_scatter": (1, steps * grads)},
            ),
            "ulysses": ({"all_to_all": (2, steps * (there + back) // n)},) * 2,
        }[method]
        case = f"{n} {kv_heads} {dtype} {method}"
        for name, theirs in zip(sent, expected, strict=True):
            wrong += [f"{case} {name}: {sent[name]}, not {theirs}"] * (sent[name] != theirs)
        inputs = there if method == "ulysses" else (queries + 2 * keys) * e
        enough = inputs + queries * e + rows * heads * 4  # q, k, v; out; lse
        wrong += [f"{case}: {sum(kept.values())} bytes kept, not {enough}"] * (sum(kept.values()) != enough)
    return wrong


@pytest.mark.parametrize("n", [2, 3, 4])
def test_what_is_sent_and_what_is_kept(ranks, n):
    """To the byte: calls and bytes by collective, each way; q, k, v, out and lse for backward."""
    for wrong in ranks(sent_and_kept, n):
        assert not wrong, wrong


def peaks() -> dict[str, tuple[int, int]]:
    """On a rank: bytes at the peak of each method's forward and backward, beyond what it is given."""
    found, module = {}, nn.Linear(1, 1)
    whole = {name: x.float() for name, x in whole_inputs(256, 8, 8, 16).items()}
    parts = {name: shard_sequence(x) for name, x in whole.items()}
    for method, attend in METHODS.items():
        leaves = [parts[x].clone().requires_grad_() for x in NAMES]
        with MemoryProfile(module) as profile:
            profile.mark("forward")
            out = attend(*leaves)
            profile.mark("backward")
            out.backward(parts["gradient"])
        found[method] = tuple(sum(profile.peak(phase).values()) for phase in ("forward", "backward"))
    return found


def test_a_ring_never_holds_all_keys_and_values(ranks):
    """On 4 ranks all of K and V are 8 of a rank's q: a ring stays below them in forward, with its output and all, and
    gathering is above.
    """
    part = 4 * 2 * 64 * 8 * 16  # bytes of a rank's q, k or v
    for found in ranks(peaks):
        assert found["ring"][0] < 8 * part < found["all_gather"][0], found
        assert found["ring"][1] < found["all_gather"][1], found


def in_order(method: str, order: str) -> tuple[list, list, int]:
    """On a rank: what happens in a forward and in a backward, in order, and the numbers in its keys."""
    whole, events = whole_inputs(16, 4, 2, 8), []
    leaves = [shard_sequence(whole[x], order=order).requires_grad_() for x in NAMES]

    def forward(*given):
        events.append(("block", given[0].shape[1] * given[1].shape[1]))
        return PLAIN_BLOCK.forward(*given)

    def backward(*given):
        events.append(("block", given[1].shape[1] * given[2].shape[1]))
        return PLAIN_BLOCK.backward(*given)

    with Exchanges(events):
        out = METHODS[method](*leaves, attention=AttentionBlock(forward, backward), order=order)
        in_forward = list(events)
        out.sum().backward()
    return in_forward, events[len(in_forward) :], leaves[1].numel()


def test_what_travels_does_so_beside_a_block(ranks):
    """The exchange of a step starts before its block and is waited for after it; a gradient travels beside the next
    block. The block is the caller's.
    """
    for rank, (forward, backward, keys) in enumerate(ranks(in_order, "ring", "zigzag")):
        blocks = [("block", 8)] * 4
        blocks[0] = ("block", 16)  # the own keys; of the others', two chunks of queries see one, or one sees both
        pass_on, waits = ("start", 2 * keys), [("wait", 0)] * 2
        steps = [[pass_on, block, *waits] for block in blocks[:3]]
        assert forward == sum(steps, []) + [blocks[3]], (rank, forward)
        steps = [
            [pass_on, blocks[0], *waits],
            [pass_on, blocks[1], pass_on, *waits],
            [pass_on, blocks[2], *waits, pass_on, *waits],
            [blocks[3], *waits, pass_on, *waits],
        ]
        assert backward == sum(steps, []), (rank, backward)
    for forward, backward, keys in ranks(in_order, "all_gather", "zigzag"):
        gather, wait = ("start", 2 * keys), ("wait", 0)
        assert forward == [gather, blocks[0], wait, *blocks[1:]]
        assert backward == [gather, blocks[0], wait, *blocks[1:], ("start", 8 * keys), wait]
    for rank, (forward, *_) in enumerate(ranks(in_order, "ring", "contiguous")):  # blocks that nobody sees are left out
        assert [event for event in forward if event[0] == "block"] == [("block", 16)] * (rank + 1)
    for forward, backward, _ in ranks(in_order, "ulysses", "zigzag"):  # a block of all tokens
        assert forward == backward == [("block", 256)]


# Mistakes.


def refused() -> dict[str, str]:
    """On a rank: what is said of inputs that can't be shared."""
    found = {}

    def given(own: int, heads: int = 4, kv_heads: int = 4) -> list[torch.Tensor]:
        return [torch.zeros(1, own, a, 8) for a in (heads, kv_heads, kv_heads)]

    for method, attend in METHODS.items():
        found[f"{method} odd"] = said(lambda: attend(*given(3)))
        found[f"{method} order"] = said(lambda: attend(*given(4), order="striped"))
        q, k, v = given(4, 12, 3)
        found[f"{method} keys"] = said(lambda: attend(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)))
        if method != "ulysses":
            found[f"{method} 5 K/V heads"] = said(lambda: attend(*given(4, 12, 5)))
    found["heads"] = said(lambda: METHODS["ulysses"](*given(4, 6, 2)))
    found["kv_heads"] = said(lambda: METHODS["ulysses"](*given(4, 12, 3)))
    return found


def test_what_cannot_be_shared_is_one_line(ranks):
    for found in ranks(refused):
        for method in METHODS:
            odd = "ValueError: 3 tokens per rank cannot be cut into two equal chunks, which zigzag needs"
            assert found[f"{method} odd"] == odd
            assert found[f"{method} order"] == "ValueError: order 'striped': it is one of zigzag, contiguous"
            assert found[f"{method} keys"] == "ValueError: q of 4 tokens and 12 heads does not fit k of 8 and 3"
            known = found.get(f"{method} 5 K/V heads")
            assert known in (None, "ValueError: q of 4 tokens and 12 heads does not fit k of 4 and 5")
        assert found["heads"] == "ValueError: ulysses: 4 ranks can't share 6 heads and 2 K/V heads"
        assert found["kv_heads"] == "ValueError: ulysses: 4 ranks can't share 12 heads and 3 K/V heads"
