"""course_lib.flash_attention.first: FlashAttention-1's order of work gives exact attention. Interpreted or on a GPU."""

import dataclasses
import re

import pytest
import torch

from compiled_once import compile_launches
from course_kit.checks.guard_bands import GuardBands, guarded
from course_kit.gpu.ablations import undone
from course_kit.gpu.launches import record_launches
from course_kit.gpu.transactions import count_transactions
from course_lib.context_parallel.blocks import plain_forward
from course_lib.flash_attention import first as flash_first
from course_lib.flash_attention.first import first_attention, first_attention_kernel
from kernel_traffic import interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of the largest element


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(flash_first, "FIRST_TILES", {"BLOCK_Q": 16, "BLOCK_K": 32, "num_warps": 4, "num_stages": 1})


def random(*shape, dtype=torch.float32):
    return (2 * torch.randn(*shape, device=DEVICE)).to(dtype)


def exact(q, k, v, causal, scale=None):
    """The same in float64. plain_forward divides by sqrt(d)."""
    factor = 1.0 if scale is None else scale * q.shape[-1] ** 0.5
    return plain_forward(q.double() * factor, k.double(), v.double(), causal)


def assert_exact(q, k, v, causal, scale=None):
    with GuardBands() as guards:
        out, lse = first_attention(guarded(q), guarded(k), guarded(v), causal, scale)
    guards.check()
    true, true_lse = exact(q, k, v, causal, scale)
    assert out.dtype == q.dtype and lse.dtype == torch.float32 and lse.shape == q.shape[:3]
    assert (out.double() - true).abs().max() <= TOLERANCE[q.dtype] * true.abs().max()
    assert (lse.double() - true_lse).abs().max() <= 1e-5 * true_lse.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_grouped_heads(dtype, causal):
    assert_exact(random(2, 37, 4, 16, dtype=dtype), *random(2, 2, 70, 2, 16, dtype=dtype), causal)


@pytest.mark.parametrize(("s_q", "s_k"), [(70, 37), (1, 1), (33, 32), (1, 40)])
@pytest.mark.parametrize("causal", [True, False])
def test_lengths(s_q, s_k, causal):
    assert_exact(random(1, s_q, 2, 32), *random(2, 1, s_k, 1, 32), causal, scale=0.3)


def test_strided_inputs():
    q, k, v = random(3, 1, 2, 40, 32).transpose(2, 3)
    assert_exact(q, k, v, True)
    q, k, v = random(3, 1, 16, 2, 40).transpose(2, 4)  # numbers of a head are not side by side
    assert_exact(q, k, v, True)


def test_no_keys_is_the_empty_sum():
    out, lse = first_attention(random(1, 5, 2, 16), random(1, 0, 1, 16), random(1, 0, 1, 16), False)
    assert not out.any() and (lse == float("-inf")).all()


def test_one_launch_of_a_program_for_each_head():
    q, k, v = random(3, 2, 96, 3, 16)
    with record_launches() as launches, GuardBands() as guards:
        first_attention(q, k, v)
    assert [launch.grid for launch in launches] == [(3, 2)]
    assert guards.largest_bytes == 2 * 96 * 3 * 16 * 4  # out: the scores would be six times as many


@interpreted
@pytest.mark.parametrize("causal", [True, False])
def test_what_moves_is_the_order_of_work(causal):
    """Keys and values once; queries, out, m and l once for each tile of keys that they see."""
    length, head_dim, tile = 128, 32, 32
    with record_launches() as launches:
        first_attention(*random(3, 1, length, 1, head_dim), causal)
    kernel, grid, args = launches[0].kernel, launches[0].grid, launches[0].args
    sizes = {"CAUSAL": causal, "HEAD_DIM": head_dim, "BLOCK_Q": tile, "BLOCK_K": tile, "num_stages": 1}
    traffic = count_transactions(kernel, grid, *args, **sizes)
    rows = sum(length - first * causal for first in range(0, length, tile))  # visits, over all tiles of keys
    bytes_moved = {
        "load": 4 * (2 * length * head_dim + rows * (2 * head_dim + 2)),
        "store": 4 * rows * (head_dim + 2),
    }
    for kind, expected in bytes_moved.items():
        wide = sum(count.bytes for count in traffic.kinds(kind))
        assert expected <= wide <= 1.2 * expected  # m and l are loaded by several warps


@pytest.mark.parametrize("capability", [80, 90])
def test_compiled(capability):
    """No spills, and a barrier between the stores of one tile of keys and the loads of the next."""
    sizes = {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2}
    found = []
    for head_dim in (64, 128):
        with record_launches() as launches:
            first_attention(*random(3, 1, 16, 1, head_dim, dtype=torch.bfloat16))
        found.append(dataclasses.replace(launches[0], meta=launches[0].meta | sizes))
    loose = undone(first_attention_kernel, {"tl.debug_barrier()": "pass"})
    *ours, without = compile_launches([*found, dataclasses.replace(found[0], kernel=loose)], capability)
    for compiled in ours:
        assert compiled.spilled_bytes == 0 and orders_its_own_stores(compiled.ttgir)
    assert not orders_its_own_stores(without.ttgir)


def orders_its_own_stores(ttgir: str) -> bool:
    """Whether a barrier of all memory follows the last store and the end of its loop."""
    after_stores = ttgir[ttgir.rindex("tt.store") :]
    return bool(re.search(r"scf\.yield.*\n(.*\n)*?.*(ttg\.barrier all|gpu\.barrier)", after_stores))


@pytest.mark.parametrize(
    ("q", "k", "v", "words"),
    [
        ((1, 4, 2, 16), (1, 4, 2, 16), (1, 5, 2, 16), "tokens"),
        ((1, 4, 3, 16), (1, 4, 2, 16), (1, 4, 2, 16), "that divides the query heads"),
        ((1, 4, 2, 24), (1, 4, 2, 24), (1, 4, 2, 24), "heads of 24"),
    ],
)
def test_shapes_that_do_not_fit(q, k, v, words):
    with pytest.raises(ValueError, match=words):
        first_attention(random(*q), random(*k), random(*v))


def test_types_and_gradients_are_refused():
    q, k, v = random(3, 1, 4, 2, 16)
    with pytest.raises(ValueError, match="one dtype"):
        first_attention(q, k.bfloat16(), v)
    with pytest.raises(ValueError, match="no backward"):
        first_attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        first_attention(q, k, v)
