"""course_kit.gpu.ablations: kernels with lines replaced are kernels, and none of FlashAttention's ideas changes its
result. Interpreted, or on a GPU.
"""

import pytest
import torch
import triton
import triton.language as tl

from course_kit.gpu.ablations import STEPS, difference, undone
from course_kit.gpu.compiled import compile_kernel
from course_kit.gpu.transactions import count_transactions
from course_lib.context_parallel.blocks import plain_forward
from course_lib.flash_attention.forward import flash_forward_kernel, head_sizes, strides_of
from course_lib.kernels.rounding import cast, widen
from kernel_traffic import interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES = {"BLOCK_Q": 32, "BLOCK_K": 16, "num_warps": 4, "num_stages": 1}
TWO = tl.constexpr(2.0)
THREE = tl.constexpr(3.0)


@triton.jit
def doubled(x):
    return x * TWO


@triton.jit
def halved(x):
    return x / TWO


@triton.jit
def twice_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = widen(tl.load(x + at, mask=at < n))
    tl.store(y + at, cast(doubled(value), y.dtype.element_ty), mask=at < n)


def run(kernel):
    x = torch.arange(10.0, device=DEVICE)
    y = torch.zeros_like(x)
    kernel[1,](x, y, 10, BLOCK=16)
    return (y / x.clamp(min=1)).unique().tolist()


def test_a_line_of_the_kernel_or_of_what_it_calls():
    assert run(undone(twice_kernel, {"doubled(value)": "value"})) == [0, 1]
    assert run(undone(twice_kernel, {"x * TWO": "x * TWO * TWO"})) == [0, 4]
    assert run(twice_kernel) == [0, 2]


def test_lines_names_and_two_variants_at_once():
    """Several lines are indented; constants and functions of the module that the kernel had no use for are found."""
    three = undone(twice_kernel, {"return x * TWO": "more = x * THREE\nreturn more"})
    same = undone(twice_kernel, {"doubled(value)": "halved(doubled(value))"})
    assert (run(three), run(same), run(twice_kernel)) == ([0, 3], [0, 1], [0, 2])
    again = undone(three, {"return more": "return more * TWO"})
    assert (run(again), run(three)) == ([0, 6], [0, 3])


@pytest.mark.parametrize("old", ["tl.sort(", "value"])
def test_what_is_not_there_once_is_refused(old):
    with pytest.raises(ValueError, match="nowhere" if old == "tl.sort(" else "times"):
        undone(twice_kernel, {old: "0"})


def test_what_is_no_python_is_refused():
    with pytest.raises(ValueError, match="no longer valid Python"):
        undone(twice_kernel, {"doubled(value)": "doubled(value"})


def test_difference_shows_the_changed_lines_alone():
    variant = undone(twice_kernel, {"x * TWO": "x"})
    assert difference(twice_kernel, variant) == "in doubled\n-    return x * TWO\n+    return x"
    assert difference(twice_kernel, undone(twice_kernel, {})) == ""


def test_a_variant_compiles_and_its_transactions_are_counted():
    variant = undone(twice_kernel, {"mask=at < n))": "mask=at < n // 2, other=0.0))"})
    x = torch.arange(256.0, device=DEVICE)
    assert "tt.store" in compile_kernel(variant, x, x, 256, BLOCK=256).ttgir
    counts = [count_transactions(kernel, (1,), x, x, 256, BLOCK=256) for kernel in (twice_kernel, variant)]
    assert [count.sectors("load") for count in counts] == [32, 16]
    assert [count.sectors("store") for count in counts] == [32, 32]


def attention(kernel, q, k, v, causal):
    """out and lse [b, s, a] of a kernel in place of flash_forward_kernel."""
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[0], q.shape[2], q.shape[1]), torch.nan).float()
    grid = triton.cdiv(q.shape[1], TILES["BLOCK_Q"]), q.shape[2], q.shape[0]
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    kernel[grid](
        q, k, v, out, lse, None, q.shape[1], k.shape[1], group, scale, *strides_of(q, k, v), causal,
        **head_sizes(q.shape[3]), **TILES,
    )  # fmt: skip
    return out, lse.transpose(1, 2)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_without_an_idea_is_attention(step, causal):
    torch.manual_seed(0)
    q = 2 * torch.randn(1, 50, 2, 16, device=DEVICE)
    k, v = 2 * torch.randn(2, 1, 50, 1, 16, device=DEVICE)
    variant = undone(flash_forward_kernel, STEPS[step])
    assert difference(flash_forward_kernel, variant).count("\n+") >= len(STEPS[step])
    exact = plain_forward(q.double(), k.double(), v.double(), causal)
    for ours, true in zip(attention(variant, q, k, v, causal), exact, strict=True):
        assert (ours.double() - true).abs().max() <= 1e-5 * true.abs().max()


@interpreted
def test_every_tile_visited_loads_them_all():
    """16 tiles of keys in place of 10, for four tiles of queries."""
    q = torch.randn(1, 64, 1, 16, device=DEVICE)
    out, lse = torch.empty_like(q), torch.empty(1, 1, 64, device=DEVICE)
    args = (q, q, q, out, lse, None, 64, 64, 1, 0.25, *strides_of(q, q, q), True)
    sizes = head_sizes(16) | {"BLOCK_Q": 16, "BLOCK_K": 16, "num_warps": 4, "num_stages": 1}
    ours, all_tiles = (
        count_transactions(kernel, (4, 1, 1), *args, **sizes).sectors("load")
        for kernel in (flash_forward_kernel.fn, undone(flash_forward_kernel, STEPS["every tile visited"]))
    )
    of_q = 64 * 16 * 4 // 32
    assert (all_tiles - of_q) * 10 == (ours - of_q) * 16
