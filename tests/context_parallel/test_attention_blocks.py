"""course_lib.context_parallel.blocks against float64 in one process: pieces, merges, gradients, what is visible. CPU,
CUDA.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from course_lib.context_parallel.blocks import (
    FUSED_BLOCK,
    PLAIN_BLOCK,
    AttentionBlock,
    BlockAttention,
    attend,
    attend_backward,
    fused_backward,
    fused_forward,
    in_tokens,
    initial_out_lse,
    merge,
    plain_forward,
    visible,
)
from course_lib.sequence_parallel.shards import ORDERS, chunks_of, from_order, join_by_rank, shard_sequence

BLOCKS = {"plain": PLAIN_BLOCK, "fused": FUSED_BLOCK}
WITHIN = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}  # norm of the error over the norm
SHAPES = [(4, 4, 64), (4, 2, 64), (4, 1, 128)]  # heads, K/V heads, size of a head


def inputs(heads: int, kv_heads: int, d: int, dtype=torch.float64, tokens: int = 12, keys: int | None = None) -> list:
    """gradient, q, k, v with 2 sequences."""
    generator = torch.Generator().manual_seed(heads * kv_heads + d)
    counts = ((tokens, heads), (tokens, heads), (keys or tokens, kv_heads), (keys or tokens, kv_heads))
    return [torch.randn(2, s, a, d, generator=generator, dtype=torch.float64).to(dtype) for s, a in counts]


def exact(gradient, q, k, v, causal: bool) -> dict[str, torch.Tensor]:
    """out, lse and the gradients of q, k, v by autograd, in float64 from plain products."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    k_all, v_all = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    z = torch.einsum("bqad,bkad->baqk", q, k_all) / math.sqrt(q.shape[-1])
    if causal:
        z = z + torch.full(z.shape[-2:], -torch.inf, dtype=z.dtype).triu(1)
    out = torch.einsum("baqk,bkad->bqad", z.softmax(-1), v_all)
    grads = torch.autograd.grad(out, (q, k, v), gradient.double())
    lse = z.logsumexp(-1).transpose(1, 2)
    names = ("out", "lse", "q", "k", "v")
    return dict(zip(names, (out.detach(), lse.detach(), *grads), strict=True))


def errors(found: dict, expected: dict) -> dict[str, float]:
    """By name, the norm of the error over that of what is expected."""
    return {n: ((found[n].double() - expected[n]).norm() / expected[n].norm()).item() for n in expected}


def test_exact_is_pytorchs_attention():
    gradient, q, k, v = inputs(4, 2, 64)
    for causal in (True, False):
        theirs = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
        )
        torch.testing.assert_close(exact(gradient, q, k, v, causal)["out"], theirs.transpose(1, 2))


# Merging.


@pytest.mark.parametrize("scale", [1, 1e4])
def test_any_partition_in_any_order_merges_to_the_whole(scale):
    """From nothing seen; also where the scores are so far apart that one key has all the weight."""
    gradient, q, k, v = inputs(4, 2, 64)
    q = q * scale
    expected = exact(gradient, q, k, v, False)
    random = torch.Generator().manual_seed(0)
    for _ in range(20):
        sizes = torch.bincount(torch.randint(5, (12,), generator=random)).tolist()
        at = torch.randperm(12, generator=random).split(sizes)
        out, lse = initial_out_lse(q)
        for keys in (at[i] for i in torch.randperm(len(at), generator=random)):
            if len(keys):
                merge(out, lse, *plain_forward(q, k[:, keys], v[:, keys], False))
        found = errors({"out": out, "lse": lse}, {name: expected[name] for name in ("out", "lse")})
        assert max(found.values()) < 1e-12, found


def test_pieces_in_16_bits_merge_in_float32():
    """Each piece is rounded to 8 bits, their sum is not: the error does not grow with their number."""
    gradient, q, k, v = inputs(4, 2, 64, torch.bfloat16)
    expected = exact(gradient, q, k, v, False)
    out, lse = initial_out_lse(q)
    assert out.dtype == lse.dtype == torch.float32 and not out.any() and lse.isneginf().all()
    for key in range(12):
        merge(out, lse, *plain_forward(q, k[:, key : key + 1], v[:, key : key + 1], False))
    assert max(errors({"out": out, "lse": lse}, {n: expected[n] for n in ("out", "lse")}).values()) < 5e-3


def test_a_merge_leaves_the_piece_alone_and_nothing_seen_takes_it_bit_by_bit():
    _, q, k, v = inputs(4, 2, 64, torch.float32)
    part, part_lse = plain_forward(q, k, v, True)
    before = part.clone(), part_lse.clone()
    out, lse = initial_out_lse(q)
    merge(out, lse, part, part_lse)
    assert torch.equal(out, part) and torch.equal(lse, part_lse)
    assert torch.equal(part, before[0]) and torch.equal(part_lse, before[1])


# Blocks.


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in a view whose rows do not lie side by side."""
    return torch.stack([x, x], 3).transpose(1, 2).contiguous().transpose(1, 2)[:, :, :, 0]


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in a view whose heads lie across: one head's numbers are not neighbours."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_float64s_attention(name, dtype):
    """Within 1e-12, 2e-6 and 1e-2 of float64, views or not, causal or not, other numbers of keys than queries too."""
    block = BLOCKS[name]
    for (heads, kv_heads, d), (causal, keys) in itertools.product(SHAPES, [(True, 12), (False, 12), (False, 7)]):
        given = inputs(heads, kv_heads, d, dtype, keys=keys)
        expected = exact(*given, causal)
        for view in (lambda x: x, strided, turned):
            gradient, q, k, v = (view(x) for x in given)
            out, lse = block.forward(q, k, v, causal)
            assert out.shape == q.shape and lse.shape == q.shape[:3]
            assert out.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
            grads = block.backward(gradient, q, k, v, view(out), lse, causal)
            found = dict(zip(expected, (out, lse, *grads), strict=True))
            assert [tuple(g.shape) for g in grads] == [tuple(x.shape) for x in (q, k, v)]
            off = errors(found, expected)
            assert max(off.values()) < WITHIN[dtype], (heads, kv_heads, d, causal, keys, off)
        assert all(torch.equal(a, b) for a, b in zip(given, (gradient, q, k, v), strict=True)), "inputs have changed"


@pytest.mark.parametrize("name", BLOCKS)
def test_huge_scores_stay_finite(name):
    gradient, q, k, v = inputs(4, 2, 64, torch.float32)
    expected = exact(gradient, 1e3 * q, k, v, True)
    out, lse = BLOCKS[name].forward(1e3 * q, k, v, True)
    grads = BLOCKS[name].backward(gradient, 1e3 * q, k, v, out, lse, True)
    assert all(g.isfinite().all() for g in (out, lse, *grads))
    assert errors({"out": out, "lse": lse}, {n: expected[n] for n in ("out", "lse")})["out"] < 1e-3


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", BLOCKS)
def test_all_pieces_of_all_ranks_make_up_the_whole(name, order):
    """What a ring does, without one: gradients from the merged lse, in float32 and from 16 bits; inputs stay as are."""
    for n, causal, dtype in itertools.product((1, 2, 3), (True, False), (torch.float32, torch.bfloat16)):
        given = inputs(4, 2, 64, dtype, tokens=12)
        expected, chunk = exact(*given, causal), 12 // (n * len(chunks_of(0, n, order)))
        of_ranks = [[shard_sequence(x, _Rank(r, n), order) for x in given] for r in range(n)]
        before = [[x.clone() for x in part] for part in of_ranks]
        outs, found = [], {x: [torch.zeros_like(part[i], dtype=torch.float32) for part in of_ranks] for i, x in PLACES}
        for rank, (gradient, q, _, _) in enumerate(of_ranks):
            out, lse = initial_out_lse(q)
            own = chunks_of(rank, n, order)
            pieces = [in_tokens(visible(own, chunks_of(s, n, order), causal), chunk) for s in range(n)]
            for source in range(n):
                attend(q, *of_ranks[source][2:], pieces[source], BLOCKS[name], out, lse)
            outs.append(out.to(dtype))
            for source in range(n):
                k, v = of_ranks[source][2:]
                totals = found["q"][rank], found["k"][source], found["v"][source]
                attend_backward(gradient, q, k, v, outs[-1], lse, pieces[source], BLOCKS[name], *totals)
        found["out"] = outs
        whole = {x: from_order(join_by_rank(torch.stack(parts)), n, order) for x, parts in found.items()}
        off = errors(whole, {x: expected[x] for x in whole})
        assert max(off.values()) < WITHIN[dtype], (n, causal, dtype, off)
        assert all(
            torch.equal(a, b)
            for ours, theirs in zip(of_ranks, before, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        )


PLACES = ((1, "q"), (2, "k"), (3, "v"))


class _Rank:
    """What shard_sequence asks of a group."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.size = (lambda: rank), (lambda: ranks)


@pytest.mark.parametrize("name", BLOCKS)
def test_autograd_knows_a_block(name):
    """Twice through the same graph; where k alone wants a gradient; without any."""
    gradient, q, k, v = inputs(4, 2, 64)
    expected, block = exact(gradient, q, k, v, True), BLOCKS[name]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = BlockAttention.apply(*leaves, block, True)
    once = torch.autograd.grad(out, leaves, gradient, retain_graph=True)
    again = torch.autograd.grad(out, leaves, gradient)
    for name_of, a, b in zip("qkv", once, again, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, expected[name_of])
    wants = k.clone().requires_grad_()
    (found,) = torch.autograd.grad(BlockAttention.apply(q, wants, v, block, True), wants, gradient)
    torch.testing.assert_close(found, expected["k"])
    assert not BlockAttention.apply(q, k, v, block, True).requires_grad
    small = [x[:1, :3, :2, :4].clone().requires_grad_() for x in (q, k[:, :, :1], v[:, :, :1])]
    assert torch.autograd.gradcheck(lambda *x: BlockAttention.apply(*x, block, True), small)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_backward_inside_autocast_is_the_one_outside(name):
    q, k, v = (x.requires_grad_() for x in inputs(4, 2, 8, torch.float32)[1:])
    out = BlockAttention.apply(q, k, v, BLOCKS[name], True)
    outside = torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(torch.equal(*pair) for pair in zip(outside, inside, strict=True))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_gradient_of_a_gradient_is_an_error_and_not_another_number(name):
    """To autograd, the lse that a block keeps is a constant."""
    q, k, v = (x.requires_grad_() for x in inputs(4, 2, 64)[1:])
    out = BlockAttention.apply(q, k, v, BLOCKS[name], True)
    with pytest.raises(RuntimeError, match="does not support double backward"):
        torch.autograd.grad(out.square().sum(), q, create_graph=True)


def test_a_block_keeps_no_scores():
    kept, (_, q, k, v) = {}, inputs(4, 2, 64, torch.float32, tokens=200)
    own = [x.requires_grad_() for x in (q, k, v)]

    def note(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = BlockAttention.apply(*own, AttentionBlock(plain_forward, None), True)
    assert sum(kept.values()) == 4 * (2 * q.numel() + 2 * k.numel() + 2 * 200 * 4) and out.requires_grad


# What is visible.


def cells(own: tuple, other: tuple, causal: bool, chunk: int = 2) -> torch.Tensor:
    """How often the pieces come upon each pair of a query (rows) and a key (columns), in tokens."""
    count = torch.zeros(len(own) * chunk, len(other) * chunk, dtype=torch.int)
    for rows, columns, triangle in in_tokens(visible(own, other, causal), chunk):
        ones = torch.ones_like(count[rows, columns])
        count[rows, columns] += ones.tril() if triangle else ones
    return count


def places(chunks: tuple, chunk: int = 2) -> torch.Tensor:
    return torch.cat([torch.arange(chunk) + chunk * number for number in chunks])


def test_each_visible_pair_is_in_one_piece():
    """For all ranks of 1 to 8 in both orders, a single piece at most; and for other chunks that ascend."""
    for order, n in itertools.product(ORDERS, range(1, 9)):
        for rank, source in itertools.product(range(n), range(n)):
            own, other = chunks_of(rank, n, order), chunks_of(source, n, order)
            seen = places(own)[:, None] >= places(other)
            assert torch.equal(cells(own, other, True), seen.int()), (order, n, rank, source)
            assert cells(own, other, False).eq(1).all() and len(visible(own, other, False)) == 1
            assert len(visible(own, other)) == int(seen.any())
    some = [c for size in (1, 2, 3) for c in itertools.combinations(range(5), size)]
    for own, other in itertools.product(some, some):
        if own != other and {*own} & {*other}:
            continue  # no two ranks have a chunk in common
        seen = places(own)[:, None] >= places(other)
        assert torch.equal(cells(own, other, True), seen.int()), (own, other)
        of_one_kind = len({sum(c < mine for c in other) for mine in own} - {0})
        assert len(visible(own, other)) <= (1 if own == other else of_one_kind)


def test_zigzag_is_as_much_work_on_every_rank():
    """16 tokens on 4 ranks: 10, 26, 42 and 58 pairs side by side, 34 each in zig-zag."""
    for order, expected in (("contiguous", [10, 26, 42, 58]), ("zigzag", [34] * 4)):
        of_all = [chunks_of(r, 4, order) for r in range(4)]
        chunk = 4 // len(of_all[0])
        assert [sum(int(cells(own, other, True, chunk).sum()) for other in of_all) for own in of_all] == expected


# GPUs.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fused_blocks_on_a_gpu(dtype):
    """PyTorch's FlashAttention in 16 bits, plain products in float32; keys in two parts with the merged lse."""
    within = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-3}[dtype]  # float32: TF32 may be on
    for (heads, kv_heads, d), causal in itertools.product(SHAPES, (True, False)):
        given = inputs(heads, kv_heads, d, dtype, tokens=256)
        gradient, q, k, v = (strided(x).cuda() for x in given)
        expected = exact(*given, causal)
        out, lse = fused_forward(q, k, v, causal)
        grads = fused_backward(gradient, q, k, v, out, lse, causal)
        found = dict(zip(expected, (x.cpu() for x in (out, lse, *grads)), strict=True))
        assert lse.dtype == torch.float32 and max(errors(found, expected).values()) < within, errors(found, expected)
    expected, (out, lse) = exact(*given, False), initial_out_lse(q)
    parts = [(k[:, keys], v[:, keys]) for keys in (slice(0, 100), slice(100, 256))]
    for part in parts:
        merge(out, lse, *fused_forward(q, *part, False))
    grads = [fused_backward(gradient, q, *part, out.to(dtype), lse, False) for part in parts]
    found = {"out": out, "lse": lse, "q": grads[0][0] + grads[1][0]}
    found |= {name: torch.cat([grads[0][i], grads[1][i]], 1) for i, name in ((1, "k"), (2, "v"))}
    assert max(errors({n: x.cpu() for n, x in found.items()}, expected).values()) < 2 * within
