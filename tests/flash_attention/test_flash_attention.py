"""course_lib.flash_attention.operator: float64's attention, as precise as PyTorch's own, from the tiles that somebody
sees, within its tensors. Interpreted, or GPU.
"""

import functools
import math
from collections import Counter
from itertools import zip_longest

import pytest
import torch
import triton

from attention_inputs import DEVICE, NAMES, Case, exact, inputs, plain_scores, pytorchs, random_cases, rms, run
from course_kit.checks.guard_bands import GuardBands
from course_kit.checks.kernels import run_guarded
from course_kit.gpu.launches import record_launches
from course_kit.gpu.transactions import observed
from course_lib.flash_attention.backward import (
    DELTA_ROWS,
    KEY_CONFIGURATIONS,
    QUERY_CONFIGURATIONS,
    key_gradient_kernel,
    launch_backward,
    query_gradient_kernel,
)
from course_lib.flash_attention.forward import (
    FORWARD_CONFIGURATIONS,
    flash_forward_kernel,
    head_sizes,
    launch_forward,
    length_class,
    strides_of,
    wide_enough,
)
from course_lib.flash_attention.one_pass import ONE_PASS_CONFIGURATIONS, gradient_kernel, launch_one_pass
from course_lib.flash_attention.operator import (
    FLASH_BLOCK,
    flash_attention,
    flash_attention_reference,
    flash_backward_operator,
    flash_operator,
)
from course_lib.flash_attention.tiles import tiles

torch.set_num_threads(1)
interpreted_only = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="counts inside Triton's interpreter")
FORWARD, ONE_WALK = ["flash_forward_kernel"], ["delta_kernel", "gradient_kernel", "round_sums_kernel"]
TWO_WALKS = ["delta_kernel", "query_gradient_kernel", "key_gradient_kernel"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kernels(q, k, v, case: Case):
    return flash_attention(q, k, v, case.causal, case.scale)


def same_bits(found, expected) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


# The same numbers.


def most(case: Case, usual: float, dtype) -> float:
    """The RMS error allowed on one shape, where SDPA's is `usual`: 1.5 of it in float32, 1.2 in 16 bits.

    Shapes of a few numbers have other luck in each order of summation; with one key dp and delta cancel, but for
    float32's rounding.
    """
    if min(case.s_q, case.s_k) < 16:
        return 3 * usual + 8 * torch.finfo(torch.float32).eps
    return (1.5 if dtype == torch.float32 else 1.2) * usual


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_shapes_are_as_precise_as_pytorchs_own(dtype):
    """Errors against float64 of the same inputs, by the RMS of what is right. Over all shapes: RMS and largest within
    1.02 and 1.1 of SDPA's; on each, as `most`. Float32 on a CPU: 1.15, for the processor's libraries sum in an order of
    their own.
    """
    sums = {name: torch.zeros(4) for name in NAMES}
    for seed, case in enumerate(random_cases(10)):
        given = inputs(case, dtype, seed)
        results = zip(NAMES, run(kernels, given, case), run(pytorchs, given, case), exact(given, case), strict=True)
        for name, our, their, expected in results:
            assert our.dtype == dtype and our.shape == expected.shape and our.is_contiguous()
            assert rms(our - expected) <= most(case, rms(their - expected), dtype), (name, case)
            if min(case.s_q, case.s_k) >= 16:
                errors = [f(x - expected) / rms(expected) for f in (rms, largest) for x in (our, their)]
                sums[name] += torch.tensor(errors).square()
    for name, (error, usual, most_wrong, usually) in sums.items():
        times = 1.15 if dtype == torch.float32 and DEVICE == "cpu" else 1.02
        assert error.sqrt() <= times * usual.sqrt() and most_wrong.sqrt() <= max(1.1, times) * usually.sqrt(), name


def largest(x: torch.Tensor) -> float:
    return x.abs().max().item()


@pytest.mark.parametrize("causal", [True, False])
def test_the_same_as_the_reference_with_the_same_tiles(causal):
    """Where they differ it is by 2^x for e^x and the order of a sum: float32's rounding."""
    case = Case(b=1, s_q=100, s_k=75, causal=causal)
    given = inputs(case)
    block_q, block_k = (FORWARD_CONFIGURATIONS[0].kwargs[name] for name in ("BLOCK_Q", "BLOCK_K"))
    reference = functools.partial(flash_attention_reference, causal=causal, block_q=block_q, block_k=block_k)
    expected = run(lambda q, k, v, _: reference(q, k, v), given, case)
    for name, found, same in zip(NAMES, run(kernels, given, case), expected, strict=True):
        assert rms(found - same) <= 4e-7 * rms(same), name
        assert largest(found - same) <= 2e-6 * largest(same), name


CONFIGURATIONS = list(
    zip_longest(FORWARD_CONFIGURATIONS, QUERY_CONFIGURATIONS, KEY_CONFIGURATIONS, ONE_PASS_CONFIGURATIONS)
)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chosen", CONFIGURATIONS, ids=range(len(CONFIGURATIONS)))
def test_every_configuration_that_the_autotuner_may_choose(chosen, causal, monkeypatch):
    kernels_of = flash_forward_kernel, query_gradient_kernel, key_gradient_kernel, gradient_kernel
    for kernel, configuration in zip(kernels_of, chosen, strict=True):
        monkeypatch.setattr(kernel, "configs", [configuration or kernel.configs[0]])
    case = Case(b=1, s_q=135, s_k=130, heads=1, causal=causal)
    given = inputs(case)
    gradient, q, k, v = given
    settings = None, 135, causal, case.d**-0.5
    expected = exact(given, case)
    out, lse = launch_forward(q, k, v, *settings)
    for found in (launch(gradient, q, k, v, out, lse, *settings) for launch in (launch_backward, launch_one_pass)):
        for name, mine, right in zip(NAMES, [out, *found], expected, strict=True):
            assert rms(mine - right) <= 1e-6 * rms(right), name


@pytest.mark.parametrize("configurations", [FORWARD_CONFIGURATIONS, QUERY_CONFIGURATIONS, KEY_CONFIGURATIONS])
def test_what_the_autotuner_tries(configurations):
    """In 16 bits no product of tiles that are narrower than 64; in 32 all; one where runs have to repeat."""
    half, single = ({"q": torch.empty(0, dtype=dtype)} for dtype in (torch.bfloat16, torch.float32))
    narrow = wide_enough(configurations, half, CAUSAL=True)
    assert len(narrow) >= 3 and all(min(blocks_of(each)) >= 64 for each in narrow)
    assert wide_enough(configurations, single) == configurations
    torch.use_deterministic_algorithms(True)
    try:
        assert wide_enough(configurations, half) == narrow[:1]
        assert wide_enough(configurations, single) == configurations[:1]
    finally:
        torch.use_deterministic_algorithms(False)


def test_lengths_that_are_tuned_as_one():
    lengths = [0, 1, 1024, 1025, 4096, 4097, 16384, 16385, 131072]
    assert [length_class(length) for length in lengths] == [5, 5, 5, 6, 6, 7, 7, 8, 9]


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_walks_and_one_give_the_same_gradients(dtype):
    """Of dk and dv to float32's rounding or the dtype's; and of dq, which is summed in another order. Packed, too."""
    cases = [(Case(s_q=70, s_k=130), None), (Case(s_q=130, s_k=70, causal=False, d=24), None), (Case(b=1, s_k=1), None)]
    for case, cu_seqlens in [*cases, (Case(b=1, s_q=90, s_k=90), torch.tensor([0, 7, 7, 90], dtype=torch.int32))]:
        gradient, q, k, v = inputs(case, dtype)
        settings = cu_seqlens if cu_seqlens is None else cu_seqlens.to(DEVICE), 130, case.causal, 0.3
        out, lse = launch_forward(q, k, v, *settings)
        one, two = (launch(gradient, q, k, v, out, lse, *settings) for launch in (launch_one_pass, launch_backward))
        delta_terms = (gradient.float() * out.float()).abs().sum(-1).max()  # with one key, dp - delta is its rounding
        for name, mine, other in zip(("dq", "dk", "dv"), one, two, strict=True):
            eps = torch.finfo(dtype).eps * (dtype != torch.float32) + 16 * torch.finfo(torch.float32).eps
            bound = eps * other.abs().max() + torch.finfo(torch.float32).eps * 0.3 * delta_terms * max(
                q.abs().max(), k.abs().max()
            )
            assert mine.dtype == dtype and (mine - other).abs().max() <= bound, name


@pytest.mark.parametrize("s_q, s_k, causal", [(70, 65, False), (65, 3, False), (130, 65, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_past_the_end_do_not_spoil_dq(dtype, s_q, s_k, causal):
    """All scores near -24, whose powers reach e^24 where a score of 0 stands for a key that is not there: times what is
    in dz infinite in float16, and as part of a sum in any type far too large.
    """
    q, k = torch.full((1, s_q, 1, 16), 6.0), torch.full((1, s_k, 1, 16), -1.0)
    q, k = (x + 0.01 * torch.randn_like(x) for x in (q, k))
    gradient, v = (3 * torch.randn(1, s, 1, 16) for s in (s_q, s_k))
    given = [x.to(DEVICE, dtype) for x in (gradient, q, k, v)]
    settings = None, max(s_q, s_k), causal, 0.25
    out, lse = launch_forward(*given[1:], *settings)
    assert lse.max() < -15
    one, two = (launch(*given, out, lse, *settings) for launch in (launch_one_pass, launch_backward))
    # The keys are nearly equal, and dz adds up to 0: what is left of a sum may be the rounding of its terms, and of the
    # scores, whose 24 roundings are the powers' relative error.
    terms = 0.25 * (gradient[0, :, 0] @ v[0, :, 0].t()).abs().max()
    rounding = torch.finfo(dtype).eps / 4 + 24 * torch.finfo(torch.float32).eps
    for mine, other, factor in zip(one, two, (k.abs().max(), q.abs().max(), 0), strict=True):
        bound = (2 * torch.finfo(dtype).eps + 1e-4) * other.abs().max() + rounding * terms * factor
        assert mine.isfinite().all() and (mine - other).abs().max() <= bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_logsumexp(dtype):
    """Natural, in float32, of the scaled scores."""
    for case in (Case(b=1, s_q=70, s_k=50), Case(b=1, s_q=5, s_k=90, causal=False, scale=1.5)):
        _, q, k, v = inputs(case, dtype)
        out, lse = flash_operator(q, k, v, None, 90, case.causal, case.scale or case.d**-0.5)
        assert lse.dtype == torch.float32 and torch.equal(out, kernels(q, k, v, case))
        expected = plain_scores(q.double(), k.double(), case).logsumexp(-1)
        torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)
        block_out, block_lse = FLASH_BLOCK.forward(q, k, v, case.causal)
        if case.scale is None:
            assert torch.equal(block_out, out) and torch.equal(block_lse, lse.transpose(1, 2))


LAYOUTS = {
    "slices of longer sequences": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "every second token": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "[b, a, s, d]": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "one of three in a row": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "tokens first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "numbers of a head apart": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second number": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_the_inputs_lie_in_memory_changes_no_bit(layout):
    case = Case(s_q=35, s_k=20, kv_heads=2)
    given = inputs(case)
    moved = [LAYOUTS[layout](x) for x in given]
    assert any(not x.is_contiguous() for x in moved) and same_bits(moved, given)
    assert same_bits(run(kernels, moved, case), run(kernels, given, case))


def test_expanded_inputs():
    """A batch of one k and v, all query heads the same, and a gradient that is one number."""
    case = Case(s_q=40, s_k=41)
    gradient, q, k, v = inputs(case)
    given = gradient[:1, :1, :1, :1].expand(q.shape), q[:, :, :1].expand(q.shape), k[:1].expand(k.shape), v
    assert same_bits(run(kernels, given, case), run(kernels, [x.contiguous() for x in given], case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_again_and_inputs_left_alone(dtype):
    case = Case(b=1, s_q=70, s_k=90)
    given = inputs(case, dtype)
    before = [x.clone() for x in given]
    assert same_bits(run(kernels, given, case), run(kernels, given, case))
    assert same_bits(given, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_scores(dtype):
    """Scores of 1e4 and -1e4 that rise from tile to tile or fall; in float16 they pass its largest number."""
    case = Case(b=1, s_q=80, s_k=80, heads=1, kv_heads=1, scale=1.5 if dtype == torch.float16 else 1.0)
    size = 400.0 if dtype == torch.float16 else 1e4
    gradient, q, k, v = inputs(case, dtype)
    ramp = torch.linspace(-1, 1, 80, device=DEVICE)[None, :, None, None]
    first = torch.arange(case.d, device=DEVICE) == 0  # the other numbers are 0: a score is one product
    q = torch.where(q[..., :1] > 0, 1.0, -1.0) * first * (size if dtype == torch.float16 else 1.0)
    given = gradient, q.to(dtype), (size * ramp * first).to(dtype), v
    for name, found, expected in zip(NAMES, run(kernels, given, case), exact(given, case), strict=True):
        assert found.isfinite().all(), name
        assert rms(found - expected) <= 8 * torch.finfo(dtype).eps * max(rms(expected), size * (name[0] == "d")), name


@pytest.mark.parametrize("causal", [True, False])
def test_no_keys_no_queries_no_sequences(causal):
    """out is 0 and lse -inf where there are no keys, and so is each gradient of something that nobody uses."""
    for case in (Case(s_k=0, causal=causal), Case(s_q=0, causal=causal), Case(b=0, causal=causal)):
        given = inputs(case)
        found = run(kernels, given, case)
        assert [x.shape for x in found] == [given[1].shape, *(x.shape for x in given[1:])]
        assert not any(x.any() for x in found), case
        assert FLASH_BLOCK.forward(*given[1:], causal)[1].isneginf().all()


def finite_rows(x: torch.Tensor) -> torch.Tensor:
    return x.isfinite().all(-1)


@pytest.mark.parametrize("causal", [True, False])
def test_nan_and_infinity_are_where_pytorch_has_them(causal):
    """In out and dq of the same tokens as SDPA. In dk at least at each key that such a query sees; SDPA spreads them
    to keys that it does not see.
    """
    case = Case(b=1, s_q=70, s_k=70, heads=1, kv_heads=1, causal=causal)
    nan, inf = math.nan, math.inf
    for which, value, token in [(0, nan, 50), (1, nan, 50), (1, inf, 50), (2, nan, 50), (2, inf, 50)]:
        gradient, *leaves = inputs(case)
        leaves[which][0, token, 0, 3] = value
        ours, theirs = (run(attention, (gradient, *leaves), case) for attention in (kernels, pytorchs))
        broken = f"{'qkv'[which]}[{token}] = {value}"
        assert torch.equal(finite_rows(ours[0]), finite_rows(theirs[0])), broken
        assert torch.equal(ours[0].isnan(), theirs[0].isnan()) and not finite_rows(ours[0]).all(), broken
        assert torch.equal(finite_rows(ours[1]), finite_rows(theirs[1])), broken
        for query in (~finite_rows(plain_scores(*leaves[:2], case._replace(causal=False))[0, 0])).nonzero():
            assert not finite_rows(ours[2])[0, : query + 1 if causal else None].any(), broken


def test_without_a_gradient_and_with_some():
    case = Case(b=1)
    gradient, *leaves = inputs(case)
    expected = run(kernels, (gradient, *leaves), case)[1:]
    assert not kernels(*leaves, case).requires_grad
    for wanted in range(3):
        given = [x.clone().requires_grad_(number == wanted) for number, x in enumerate(leaves)]
        kernels(*given, case).backward(gradient)
        assert [x.grad is not None for x in given] == [number == wanted for number in range(3)]
        assert torch.equal(given[wanted].grad, expected[wanted])


def test_gradients_of_gradients_are_an_error():
    """Not numbers without the part through lse."""
    case = Case(b=1, s_q=4, s_k=4)
    _, *leaves = inputs(case)
    leaves = [x.requires_grad_() for x in leaves]
    first = torch.autograd.grad(kernels(*leaves, case).square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad|autograd"):
        sum(x.sum() for x in first).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_under_autocast_in_its_type_as_pytorchs(dtype):
    """Also where rotary positions leave q and k in float32 beside a v in 16 bits. float64 stays, as SDPA's does: which
    the kernels do not take.
    """
    case = Case()
    gradient, q, k, v = inputs(case, dtype)
    leaves = [x.requires_grad_() for x in (q, k, v.bfloat16() if dtype == torch.float32 else v)]
    with torch.autocast(DEVICE, torch.bfloat16):
        theirs = pytorchs(*leaves, case)
        if dtype == torch.float64:
            assert theirs.dtype == torch.float64
            with pytest.raises(ValueError, match="torch.float64"):
                kernels(*leaves, case)
            return
        out = kernels(*leaves, case)
    gradients = torch.autograd.grad(out, leaves, gradient.bfloat16())
    assert out.dtype == theirs.dtype == torch.bfloat16
    assert [x.dtype for x in gradients] == [x.dtype for x in leaves]
    expected = run(kernels, [x.detach().bfloat16() for x in (gradient, *leaves)], case)
    assert same_bits([x.bfloat16() for x in (out, *gradients)], expected)


# What it costs.


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_are_q_k_v_out_and_lse_and_nothing_else(dtype):
    case = Case(b=1, s_q=200, s_k=150)
    _, *leaves = inputs(case, dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = kernels(*(x.requires_grad_() for x in leaves), case)
    own_bytes = sum(x.nbytes for x in leaves) + out.nbytes + 4 * case.b * case.s_q * case.heads
    assert sum(x.untyped_storage().nbytes() for x in kept) == own_bytes
    assert {x.data_ptr() for x in (*leaves, out)} < {x.data_ptr() for x in kept}


@pytest.mark.parametrize("case", [Case(b=1, s_q=100, s_k=70), Case(b=1, s_q=30, s_k=90, causal=False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_an_input_and_pytorch_computes_nothing(case, dtype):
    gradient, *leaves = inputs(case, dtype)
    leaves = [x.requires_grad_() for x in leaves]
    with GuardBands() as guards:
        torch.autograd.grad(kernels(*leaves, case), leaves, gradient)
    guards.check()
    assert not guards.operations, guards.operations
    sums = 4 * leaves[0].numel() if dtype != torch.float32 else 0  # of dq, in float32
    assert guards.largest_bytes == max(sums, *(x.nbytes for x in leaves))


def test_all_that_pytorch_does_is_to_put_the_numbers_of_a_head_side_by_side():
    case = Case(b=1, s_q=30, s_k=30)
    gradient, *leaves = [LAYOUTS["numbers of a head apart"](x) for x in inputs(case)]
    leaves = [x.requires_grad_() for x in leaves]
    with GuardBands() as guards:
        torch.autograd.grad(kernels(*leaves, case), leaves, gradient)
    guards.check()
    assert set(guards.operations) <= {"aten.contiguous"}, guards.operations
    assert guards.largest_bytes == leaves[0].nbytes


GUARDED = [
    Case(b=1, s_q=70, s_k=40, d=24),
    Case(b=2, s_q=1, s_k=33, heads=1, causal=False),
    Case(b=1, s_q=65, s_k=31, heads=1, d=5),
    Case(b=1, s_q=31, s_k=97, heads=1, kv_heads=1, d=96),
    Case(b=1, s_q=64, s_k=64, heads=1, d=128),
]


@interpreted_only
@pytest.mark.parametrize("case", GUARDED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_outside_the_tensors_is_read_or_written(case, dtype):
    """Nor memory before it is written; each kernel within its own tensors, those that lie apart too."""
    gradient, *leaves = inputs(case, dtype)
    expected = run(kernels, (gradient, *leaves), case)
    slices = [LAYOUTS["slices of longer sequences"](x) for x in leaves]

    def forward_and_backward(gradient, *leaves):
        out = kernels(*leaves, case)
        return out.detach(), *torch.autograd.grad(out, leaves, gradient)

    for given in (leaves, slices):
        given = [x.detach().requires_grad_() for x in given]
        assert same_bits(run_guarded(flash_forward_kernel, forward_and_backward, gradient, *given), expected)


def launches_of(attend, *given) -> list[list[str]]:
    """Names of the kernels that forward launches, and backward."""
    leaves = [x.detach().requires_grad_() for x in given]
    with record_launches() as forward:
        out = attend(*leaves)
    with record_launches() as backward:
        out.backward(torch.ones_like(out))
    return [[launch.name for launch in launches] for launches in (forward, backward)]


@pytest.mark.parametrize("s_q, s_k, forward, backward", [
    (70, 70, [0], [0, 1, 2]), (1, 70, [0], [0, 1, 2]), (70, 0, [0], [0, 2]), (0, 70, [], [1]),
])  # fmt: skip
def test_one_launch_forward_and_three_backward(s_q, s_k, forward, backward):
    """Where there are no keys nobody wants their gradients; where there are no queries they are 0, which one writes."""
    given = inputs(Case(s_q=s_q, s_k=s_k), torch.float16)[1:]
    assert launches_of(flash_attention, *given) == [[FORWARD[i] for i in forward], [ONE_WALK[i] for i in backward]]


@pytest.mark.parametrize("s_q, s_k, backward", [(70, 70, [0, 1, 2]), (70, 0, [0, 1]), (0, 70, [2])])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_walks_where_bits_are_to_repeat_and_in_float32(s_q, s_k, backward, dtype):
    given = inputs(Case(s_q=s_q, s_k=s_k), dtype)[1:]
    torch.use_deterministic_algorithms(dtype != torch.float32)
    try:
        assert launches_of(flash_attention, *given)[1] == [TWO_WALKS[i] for i in backward]
    finally:
        torch.use_deterministic_algorithms(False)


def loaded_blocks(run_it, tensor: torch.Tensor) -> Counter:
    """How often interpreted kernels load a block of `tensor` [b, s, a, d], by batch, first token and head."""
    found, (s, heads, d) = Counter(), tensor.shape[1:]

    def observe(kind: str, pointers, mask) -> None:
        first = (int(pointers.data.flat[0]) - tensor.data_ptr()) // tensor.element_size()
        if kind == "load" and pointers.data.ndim == 2 and 0 <= first < tensor.numel():
            found[first // (s * heads * d), first // (heads * d) % s, first // d % heads] += 1

    with observed(observe):
        run_it()
    return found


def blocks_of(configuration: triton.Config) -> tuple[int, int]:
    return configuration.kwargs["BLOCK_Q"], configuration.kwargs["BLOCK_K"]


@interpreted_only
@pytest.mark.parametrize("s_q, s_k", [(70, 130), (130, 70)])
@pytest.mark.parametrize("causal", [True, False])
def test_only_the_tiles_that_somebody_sees_are_loaded(s_q, s_k, causal):
    """Each block of k and v once for each tile of `attention_tiles.tiles` and query head; so each block of q and its
    gradient for the gradients of k and v.
    """
    case = Case(b=1, s_q=s_q, s_k=s_k, heads=2, kv_heads=1, causal=causal)
    gradient, q, k, v = inputs(case)

    def wanted(configuration, of_keys: bool) -> Counter:
        found = tiles(s_q, s_k, *blocks_of(configuration), causal)
        places = [(tile.column, 0) if of_keys else (tile.row, head) for tile in found for head in range(2)]
        return Counter((0, *place) for place in places)

    forward = wanted(FORWARD_CONFIGURATIONS[0], True)
    assert loaded_blocks(lambda: kernels(q, k, v, case), k) == forward
    assert loaded_blocks(lambda: kernels(q, k, v, case), v) == forward
    out, lse = FLASH_BLOCK.forward(q, k, v, causal)

    def backward():
        FLASH_BLOCK.backward(gradient, q, k, v, out, lse, causal)

    key_rows, query_rows = blocks_of(KEY_CONFIGURATIONS[0])[1], blocks_of(QUERY_CONFIGURATIONS[0])[0]
    own_keys = Counter((0, token, 0) for token in range(0, s_k, key_rows))
    own_queries = Counter((0, token, head) for token in range(0, s_q, query_rows) for head in range(2))
    of_delta = Counter((0, token, head) for token in range(0, s_q, DELTA_ROWS) for head in range(2))
    for x in (k, v):
        assert loaded_blocks(backward, x) == wanted(QUERY_CONFIGURATIONS[0], True) + own_keys
    for x in (q, gradient):
        extra = of_delta if x is gradient else Counter()
        assert loaded_blocks(backward, x) == wanted(KEY_CONFIGURATIONS[0], False) + own_queries + extra

    def one_pass():
        launch_one_pass(gradient, q, k, v, out, lse.transpose(1, 2), None, max(s_q, s_k), causal, 0.25)

    own_keys = Counter((0, token, 0) for token in range(0, s_k, blocks_of(ONE_PASS_CONFIGURATIONS[0])[1]))
    for x in (k, v):
        assert loaded_blocks(one_pass, x) == own_keys
    for x in (q, gradient):
        extra = of_delta if x is gradient else Counter()
        assert loaded_blocks(one_pass, x) == wanted(ONE_PASS_CONFIGURATIONS[0], False) + extra


@interpreted_only
def test_a_query_with_many_keys_is_one_program():
    """As when a model writes: no program begins for queries that are not there."""
    case = Case(b=1, s_q=1, s_k=300, heads=2, kv_heads=1, causal=False)
    with record_launches() as launches:
        run(kernels, inputs(case), case)
    grids = {launch.name: launch.grid for launch in launches}
    assert grids["flash_forward_kernel"] == grids["query_gradient_kernel"] == grids["delta_kernel"] == (1, 2, 1)
    assert grids["key_gradient_kernel"] == (triton.cdiv(300, blocks_of(KEY_CONFIGURATIONS[0])[1]), 1, 1)
    with record_launches() as launches:
        run(kernels, inputs(case, torch.float16), case)
    grids = {launch.name: launch.grid for launch in launches}
    assert grids["gradient_kernel"] == (triton.cdiv(300, blocks_of(ONE_PASS_CONFIGURATIONS[0])[1]), 1, 1)


# As an operator.


def test_opcheck():
    gradient, q, k, v = inputs(Case(b=1, s_q=9, s_k=9, heads=1), torch.float16)
    out, lse = flash_operator(q, k, v, None, 9, True, 0.25)
    torch.library.opcheck(flash_backward_operator, (gradient, q, k, v, out, lse, None, 9, True, 0.25))
    transposed = LAYOUTS["[b, a, s, d]"](k)
    torch.library.opcheck(flash_operator, (*(x.requires_grad_() for x in (q, transposed, v)), None, 9, True, 0.25))


def test_shapes_without_numbers():
    q, k = torch.empty(2, 5, 4, 8, device="meta"), torch.empty(2, 7, 2, 8, device="meta")
    leaves = [x.requires_grad_() for x in (q, k, k.clone())]
    out = flash_attention(*leaves)
    assert out.shape == q.shape and out.is_meta
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert [x.shape for x in gradients] == [x.shape for x in leaves]


# Mistakes.


def wrong(**changes):
    """q, k, v with some of them replaced by zeros of another shape, or by what is given."""
    usual = {"q": (2, 5, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 8)} | changes
    return [torch.zeros(x) if isinstance(x, tuple) else x for x in usual.values()]


@pytest.mark.parametrize("given, scale, says", [
    (wrong(q=(5, 4, 8)), None, "expected four dimensions each"),
    (wrong(k=torch.zeros(2, 5, 2, 8, dtype=torch.bfloat16)), None, "v torch.float32: expected one dtype"),
    ([x.int() for x in wrong()], None, "expected one dtype"),
    ([x.double() for x in wrong()], None, "flash_attention takes float32, bfloat16 or float16"),
    (wrong(q=(2, 5, 4, 129), k=(2, 5, 2, 129), v=(2, 5, 2, 129)), None, "heads of at most 128"),
    (wrong(v=torch.zeros(2, 5, 2, 8, device="meta")), None, "v on meta: expected one device"),
    (wrong(k=(1, 5, 2, 8), v=(1, 5, 2, 8)), None, "the batches differ"),
    (wrong(v=(2, 6, 2, 8)), None, "k has 5 tokens and v 6"),
    (wrong(v=(2, 5, 2, 4)), None, "expected one head_dim"),
    (wrong(q=(2, 5, 3, 8)), None, "3 query heads, 2 key heads"),
    (wrong(q=(65536, 1, 4, 8), k=(65536, 1, 2, 8), v=(65536, 1, 2, 8)), None, "at most 65535 sequences"),
    (wrong(), 0.0, "scale is 0.0: expected a positive finite number"),
    (wrong(), math.nan, "scale is nan"),
])  # fmt: skip
@pytest.mark.parametrize("autocast", [False, True])
def test_what_does_not_fit_is_named_in_one_line_and_nothing_is_launched(given, scale, says, autocast):
    if autocast and (given[1].dtype != given[0].dtype or not given[0].is_floating_point()):
        return  # which autocast puts right
    with record_launches() as launches, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with pytest.raises(ValueError, match=says) as error:
            flash_attention(*given, scale=scale)
    assert "\n" not in str(error.value) and not launches


@interpreted_only
def test_places_beyond_two_to_the_31():
    """The second sequence of out begins 2^31 elements after the first: a product of three sizes is one of 64 bits.

    Memory is asked for, and not touched but for one row of each; the rest of the grid does not run.
    """
    tokens, d = 2**25, 64
    out = torch.empty(2 * tokens * d, dtype=torch.float16).view(2, tokens, 1, d)
    lse = torch.empty(2, 1, tokens)
    rows = torch.randn(2, 1, 1, d).half()
    q = rows.expand(2, tokens, 1, d)
    shared = None, tokens, 1, 1, 0.125, *strides_of(q, rows, rows), True
    flash_forward_kernel.fn[1, 1, 2](q, rows, rows, out, lse, *shared, **head_sizes(d), BLOCK_Q=16, BLOCK_K=16)
    assert torch.equal(out[:, 0], rows[:, 0]), "one key: out is its value"
