"""course_lib.flash_attention.reference: float64's attention, as precise as PyTorch's own, no scores kept. CPU, and
CUDA.
"""

import itertools
import math
import random
from typing import NamedTuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attention_inputs import DEVICE, NAMES, exact, inputs, plain, plain_scores, pytorchs, rms, run
from course_kit.checks.guard_bands import GuardBands
from course_lib.context_parallel.blocks import attend, attend_backward, initial_out_lse
from course_lib.flash_attention.reference import (
    TILED_BLOCK,
    check_attention,
    flash_attention_reference,
    fold_heads,
    online_step,
    tiled_backward,
    tiled_forward,
    unfold_heads,
)
from course_lib.flash_attention.tiles import flops_backward, flops_forward, tiles


class Case(NamedTuple):
    b: int = 2
    s_q: int = 37
    s_k: int = 37
    heads: int = 4
    kv_heads: int = 2
    d: int = 16
    causal: bool = True
    scale: float | None = None
    block_q: int = 16
    block_k: int = 16


def random_cases(count: int) -> list[Case]:
    """Lengths that no block divides, more queries than keys and fewer, GQA, scales; the same on every run."""
    choose, cases = random.Random(13), []
    for _ in range(count):
        s_q, kv_heads = choose.randint(1, 130), choose.choice([1, 2, 3])
        s_k = s_q if choose.random() < 0.4 else choose.randint(1, 130)
        sizes = choose.choice([1, 2]), s_q, s_k, kv_heads * choose.choice([1, 2, 4]), kv_heads
        rest = choose.choice([4, 8, 40, 64, 128]), choose.random() < 0.5, choose.choice([None, None, 0.3])
        cases.append(Case(*sizes, *rest, choose.choice([16, 32, 64]), choose.choice([16, 32, 64])))
    return cases


def ours(q, k, v, case: Case):
    return flash_attention_reference(q, k, v, case.causal, case.scale, case.block_q, case.block_k)


def test_random_shapes_in_float64_are_exact():
    for seed, case in enumerate(random_cases(30)):
        given = inputs(case, torch.float64, seed)
        for name, found, expected in zip(NAMES, run(ours, given, case), exact(given, case), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11, msg=lambda m: f"{name}, {case}: {m}")
        _, lse = tiled_forward(*given[1:], case.causal, case.scale, case.block_q, case.block_k)
        expected = plain_scores(*given[1:3], case).logsumexp(-1).transpose(1, 2)
        torch.testing.assert_close(lse, expected, rtol=1e-12, atol=1e-12)


def most(case: Case, name: str, usual: float, size: float, dtype) -> float:
    """The RMS error allowed on one shape, where SDPA's is `usual` and the result's RMS is `size`.

    1.1 of SDPA's for out, 1.5 for gradients (2 in float32 and on a GPU, where its order of sums decides), and eps/8 of
    the result, half of what one rounding makes. Shapes of a few numbers have other luck in each order of summation;
    with one key dp and delta cancel, but for float32's rounding.
    """
    if min(case.s_q, case.s_k) < 16:
        return 3 * usual + 8 * torch.finfo(torch.float32).eps
    times = 1.1 if name == "out" else 2 if dtype == torch.float32 or DEVICE == "cuda" else 1.5
    return times * usual + torch.finfo(dtype).eps / 8 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_shapes_are_as_precise_as_pytorchs_own(dtype):
    """RMS errors against float64: over all shapes, within 1.05 of SDPA's (1.15 on a GPU); on each, as `most`."""
    squares = {name: [0.0, 0.0] for name in NAMES}
    for seed, case in enumerate(random_cases(40)):
        given = inputs(case, dtype, seed)
        results = zip(NAMES, run(ours, given, case), run(pytorchs, given, case), exact(given, case), strict=True)
        for name, our, their, expected in results:
            assert our.dtype == their.dtype == dtype and our.shape == their.shape == expected.shape
            error, usual = rms(our - expected), rms(their - expected)
            assert error <= most(case, name, usual, rms(expected), dtype), (name, case)
            squares[name] = [squares[name][0] + error**2, squares[name][1] + usual**2]
    for name, (error, usual) in squares.items():
        assert math.sqrt(error / usual) <= (1.05 if DEVICE == "cpu" else 1.15), name


@pytest.mark.parametrize("dtype, lse_dtype", [
    (torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32),
])  # fmt: skip
def test_shapes_types_and_inputs_left_alone(dtype, lse_dtype):
    case = Case(s_k=50)
    given = inputs(case, dtype)
    before = [x.clone() for x in given]
    out, lse = tiled_forward(*given[1:], case.causal)
    gradients = tiled_backward(*given, out, lse, case.causal)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (given[1].shape, dtype, given[1].shape[:3], lse_dtype)
    for x, gradient in zip(given[1:], gradients, strict=True):
        assert gradient.shape == x.shape and gradient.dtype == dtype and gradient.is_contiguous()
    assert out.is_contiguous() and lse.is_contiguous()
    assert all(torch.equal(x, same) for x, same in zip(given, before, strict=True))


@pytest.mark.parametrize("causal", [True, False])
def test_the_sizes_of_the_tiles_do_not_matter(causal):
    case = Case(s_q=70, s_k=50, causal=causal)
    given = inputs(case)
    expected = run(ours, given, case._replace(block_q=128, block_k=128))
    for block_q, block_k in itertools.product((1, 16, 24, 64), repeat=2):
        for found, same in zip(
            run(ours, given, case._replace(block_q=block_q, block_k=block_k)), expected, strict=True
        ):
            assert rms(found - same) <= 1e-6 * rms(same)
            torch.testing.assert_close(found, same, rtol=0, atol=1e-6 * same.abs().max().item())


def test_autograd_agrees_with_differences_of_results():
    """Also for views, and where k alone wants a gradient."""
    case = Case(b=1, s_q=5, s_k=4, d=3, block_q=2, block_k=3)
    leaves = [x.double().requires_grad_() for x in inputs(case)[1:]]
    assert torch.autograd.gradcheck(lambda *x: ours(*x, case), leaves)
    q, k, v = (x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in leaves)
    (dk,) = torch.autograd.grad(ours(q, k.requires_grad_(), v, case).sum(), k)  # a gradient that is expanded
    torch.testing.assert_close(dk, torch.autograd.grad(plain(*leaves, case).sum(), leaves[1])[0])
    with pytest.raises(RuntimeError, match="does not support double backward"):
        torch.autograd.grad(ours(*leaves, case).sum(), leaves, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kept_are_q_k_v_out_and_lse_and_nothing_else(dtype):
    case = Case(s_q=200, s_k=150)
    _, *leaves = inputs(case, dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = ours(*(x.requires_grad_() for x in leaves), case)
    own_bytes = sum(x.nbytes for x in leaves) + out.nbytes + 4 * case.b * case.s_q * case.heads
    assert sum(x.untyped_storage().nbytes() for x in kept) == own_bytes
    assert {x.data_ptr() for x in (*leaves, out)} < {x.data_ptr() for x in kept}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_no_tensor_is_larger_than_an_input_or_a_tile(dtype, causal):
    """dk and dv are summed in float32, of k's size; forward has nothing beyond q's or a tile's bytes."""
    case = Case(s_q=256, s_k=320, d=32, causal=causal)
    gradient, q, k, v = inputs(case, dtype)
    tile_bytes = 4 * case.b * case.heads * case.block_q * max(case.block_k, case.d)
    with GuardBands() as forward:
        out, lse = tiled_forward(q, k, v, causal, None, case.block_q, case.block_k)
    assert forward.largest_bytes == max(q.nbytes, tile_bytes)
    with GuardBands() as backward:
        tiled_backward(gradient, q, k, v, out, lse, causal, None, case.block_q, case.block_k)
    assert backward.largest_bytes == max(q.nbytes, 4 * k.numel(), tile_bytes)
    assert 8 * backward.largest_bytes < 4 * case.b * case.heads * case.s_q * case.s_k


@pytest.mark.parametrize("causal", [True, False])
def test_two_products_forward_and_five_backward_of_the_tiles_that_are_not_skipped(causal):
    case = Case(s_q=128, s_k=96, block_q=32, causal=causal)
    gradient, *leaves = inputs(case)
    computed = sum((t.row_end - t.row) * (t.column_end - t.column) for t in tiles(128, 96, 32, 16, causal))
    with FlopCounterMode(display=False) as forward:
        out = ours(*(x.requires_grad_() for x in leaves), case)
    with FlopCounterMode(display=False) as backward:
        out.backward(gradient)
    pair_flops = 4 * case.d * case.b * case.heads
    assert forward.get_total_flops() == computed * pair_flops
    assert backward.get_total_flops() == computed * pair_flops * 5 // 2
    if not causal:
        sizes = case.b, case.s_q, case.s_k, case.heads, case.d, causal
        assert forward.get_total_flops() == flops_forward(*sizes)
        assert backward.get_total_flops() == flops_backward(*sizes)


@pytest.mark.parametrize("causal", [True, False])
def test_only_tiles_on_the_diagonal_are_masked(causal):
    case = Case(s_q=64, s_k=56, causal=causal)  # the last block of keys is cut, too
    gradient, *leaves = inputs(case)
    masked = sum(tile.kind == "partial" for tile in tiles(64, 56, 16, 16, True)) if causal else 0
    with GuardBands() as guards:
        run(ours, (gradient, *leaves), case)
    assert guards.operations.count("aten.gt") == 2 * masked, "key > query: once forward, once backward"


def test_p_is_rounded_before_its_product_and_not_before_its_sum():
    scores, values = torch.tensor([[0.0, -0.3]]), torch.tensor([[0.0], [1.0]], dtype=torch.bfloat16)
    _, total, out = online_step(torch.tensor([-math.inf]), torch.zeros(1), torch.zeros(1, 1), scores, values)
    p = torch.tensor(-0.3).exp()
    assert out.dtype == torch.float32 and out.item() == p.bfloat16().item() != p.item()
    assert total.item() == (1 + p).item()


def test_p_and_ds_are_rounded_before_their_products_in_backward():
    """All scores 0, so p is 1/3: 100 queries, 3 keys, one number a head. The sums tell what their terms were."""
    case = Case(b=1, s_q=100, s_k=3, heads=1, kv_heads=1, d=1, causal=False)
    q, gradient = (make(1, 100, 1, 1, dtype=torch.bfloat16, device=DEVICE) for make in (torch.zeros, torch.ones))
    k, v = (torch.tensor(x, dtype=torch.bfloat16, device=DEVICE).view(1, 3, 1, 1) for x in ([1, 1, 0], [1, 0, 0]))
    out, dq, _, dv = run(ours, (gradient, q, k, v), case)
    p = torch.full((3,), 1 / 3)
    ds = p * (v.flatten().cpu().float() - out[0, 0].item())
    for found, terms, count in ((dv[0, 0], p[:1], 100), (dq[0, 0], ds[:2], 1)):
        rounded, kept = ((count * x.float().sum()).bfloat16() for x in (terms.bfloat16(), terms))
        assert found.item() == rounded.item() != kept.item()


def test_huge_scores_do_not_overflow():
    """Scores of 1e4 and -1e4, which rise from tile to tile or fall; in float16 the scores pass its largest number."""
    for dtype, size in ((torch.float32, 1e4), (torch.bfloat16, 1e4), (torch.float16, 400.0)):
        case = Case(b=1, s_q=40, s_k=40, heads=1, kv_heads=1, d=1, scale=1.0 if size == 1e4 else 1.5)
        gradient, q, k, v = inputs(case, dtype)
        ramp = torch.linspace(-1, 1, 40, device=DEVICE)[None, :, None, None]
        q = torch.where(q > 0, 1.0, -1.0).to(dtype) * (1.0 if size == 1e4 else size)
        k = (size * ramp).to(dtype)
        results = zip(NAMES, run(ours, (gradient, q, k, v), case), exact((gradient, q, k, v), case), strict=True)
        for name, found, expected in results:
            assert found.isfinite().all(), (name, dtype)
            assert rms(found - expected) <= 8 * torch.finfo(dtype).eps * max(rms(expected), size * (name[0] == "d"))


@pytest.mark.parametrize("causal", [True, False])
def test_no_keys_no_queries_no_sequences(causal):
    for case in (Case(s_k=0, causal=causal), Case(s_q=0, causal=causal), Case(b=0, causal=causal)):
        given = inputs(case)
        out, lse = tiled_forward(*given[1:], causal)
        assert out.shape == given[1].shape and not out.any() and lse.isneginf().all()
        for x, gradient in zip(given[1:], run(ours, given, case)[1:], strict=True):
            assert gradient.shape == x.shape and not gradient.any()


def test_heads_are_folded_group_by_group_and_back():
    x = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    folded = fold_heads(x, kv_heads=2)
    assert folded.shape == (2, 2, 6, 5)
    assert torch.equal(folded[:, 1], torch.cat([x[:, :, 2], x[:, :, 3]], 1))  # heads 2 and 3 share key head 1
    assert torch.equal(unfold_heads(folded, heads=4), x)


def test_online_step_on_a_row_of_five_scores():
    """As on paper: m = 1, 3, 3 and l = 1 + e^-1, then rescaled with e^-2; the last tile is lower and changes no m."""
    scores, values = torch.tensor([[1.0, 0.0, 3.0, 2.0, -1.0]]), torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    state = torch.tensor([-math.inf]), torch.zeros(1), torch.zeros(1, 1)
    highest, totals = [], []
    for columns in (slice(0, 2), slice(2, 4), slice(4, 5)):
        before = [x.clone() for x in state]
        after = online_step(*state, scores[:, columns], values[columns])
        assert all(torch.equal(x, same) for x, same in zip(state, before, strict=True)), "an argument has changed"
        state = after
        highest.append(state[0].item())
        totals.append(state[1].item())
    assert highest == [1, 3, 3]
    of_two = math.exp(-2) * (1 + math.exp(-1)) + 1 + math.exp(-1)
    assert totals == pytest.approx([1 + math.exp(-1), of_two, of_two + math.exp(-4)], rel=1e-6)
    torch.testing.assert_close(state[2] / state[1][:, None], scores.softmax(-1) @ values)


def test_online_step_takes_rows_that_are_masked_so_far():
    scores = torch.full((2, 3), -math.inf)
    state = torch.full((2,), -math.inf), torch.zeros(2), torch.zeros(2, 1)
    state = online_step(*state, scores, torch.ones(3, 1))
    assert state[0].isneginf().all() and not state[1].any() and not state[2].any()
    scores[0, 1] = 5.0
    highest, total, out = online_step(*state, scores, torch.full((3, 1), 7.0))
    assert highest.tolist() == [5, -math.inf] and total.tolist() == [1, 0] and out.tolist() == [[7], [0]]


@pytest.mark.parametrize("dtype, within", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_as_a_block_of_a_ring(dtype, within):
    """Keys in three pieces, out and lse merged, gradients from the merged ones."""
    case = Case(s_q=30, s_k=40, causal=False)
    given = inputs(case, dtype)
    gradient, q, k, v = given
    pieces = [(slice(0, 30), columns, False) for columns in (slice(0, 7), slice(7, 33), slice(33, 40))]
    out, lse = initial_out_lse(q)
    attend(q, k, v, pieces, TILED_BLOCK, out, lse)
    totals = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    attend_backward(gradient, q, k, v, out.to(dtype), lse, pieces, TILED_BLOCK, *totals)
    for name, found, expected in zip(NAMES, (out, *totals), exact(given, case), strict=True):
        assert rms(found - expected) < within * rms(expected), name


def test_autocast_casts_as_for_pytorchs_own():
    """Backward, outside of it or inside, is that of the cast inputs."""
    case = Case()
    gradient, *leaves = inputs(case)
    short = [x.to(torch.bfloat16).requires_grad_() for x in leaves]
    out = ours(*short, case)
    expected = out, *torch.autograd.grad(out, short, gradient.to(torch.bfloat16))
    leaves = [x.requires_grad_() for x in leaves]
    for inside in (False, True):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = ours(*leaves, case)
            if inside:
                found = out, *torch.autograd.grad(out, leaves, gradient.to(torch.bfloat16))
        if not inside:
            found = out, *torch.autograd.grad(out, leaves, gradient.to(torch.bfloat16))
        assert out.dtype == torch.bfloat16
        assert all(torch.equal(x, same.to(x.dtype)) for x, same in zip(found, expected, strict=True))


def wrong(**changes):
    """q, k, v with some of them replaced by zeros of another shape, or by what is given."""
    usual = {"q": (2, 5, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 8)} | changes
    return [torch.zeros(x) if isinstance(x, tuple) else x for x in usual.values()]


@pytest.mark.parametrize("given, scale, says", [
    (wrong(q=(5, 4, 8)), None, "expected four dimensions each"),
    (wrong(k=torch.zeros(2, 5, 2, 8, dtype=torch.bfloat16)), None, "v torch.float32: expected one dtype"),
    ([x.int() for x in wrong()], None, "expected one dtype, float64, float32, bfloat16 or float16"),
    (wrong(v=torch.zeros(2, 5, 2, 8, device="meta")), None, "v on meta: expected one device"),
    (wrong(k=(1, 5, 2, 8), v=(1, 5, 2, 8)), None, "the batches differ"),
    (wrong(v=(2, 6, 2, 8)), None, "k has 5 tokens and v 6"),
    (wrong(v=(2, 5, 2, 4)), None, "expected one head_dim"),
    (wrong(q=(2, 5, 4, 0), k=(2, 5, 2, 0), v=(2, 5, 2, 0)), None, "expected one head_dim, of 1 or more"),
    (wrong(q=(2, 5, 3, 8)), None, "3 query heads, 2 key heads"),
    (wrong(v=(2, 5, 4, 8)), None, "2 key heads, 4 value heads"),
    (wrong(k=(2, 5, 0, 8), v=(2, 5, 0, 8)), None, "4 query heads, 0 key heads"),
    (wrong(), 0.0, "scale is 0.0: expected a positive finite number"),
    (wrong(), -1, "scale is -1"),
    (wrong(), math.inf, "scale is inf"),
    (wrong(), math.nan, "scale is nan"),
    (wrong(), "1", "scale is '1'"),
])  # fmt: skip
def test_what_does_not_fit_is_named_in_one_line(given, scale, says):
    for function in (lambda: check_attention(*given, scale), lambda: flash_attention_reference(*given, scale=scale)):
        with pytest.raises(ValueError, match=says) as error:
            function()
        assert "\n" not in str(error.value)


def test_blocks_of_nothing_are_an_error():
    with pytest.raises(ValueError, match="blocks of 1 or more"):
        flash_attention_reference(*wrong(), block_k=0)
