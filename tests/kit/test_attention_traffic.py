"""course_kit.gpu.attention_traffic: bytes by formula are those that PyTorch and our kernel move and keep. CPU or GPU;
the kernel's are counted in Triton's interpreter.
"""

import pytest
import torch
import torch.nn.functional as F
import triton

from course_kit.gpu.attention_traffic import (
    AttentionShape,
    first_traffic,
    flash_traffic,
    least_traffic,
    saved_by_flash,
    saved_by_standard,
    standard_traffic,
)
from course_kit.gpu.operation_bytes import BytesMoved
from course_kit.gpu.transactions import count_transactions
from course_lib.flash_attention import forward as flash_forward
from course_lib.flash_attention.operator import flash_attention
from course_lib.flash_attention.reference import flash_attention_reference

SECTOR = 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by bytes an element
SHAPES = [
    AttentionShape(2, 12, 20, 4, 2, 16, 2),  # grouped heads, bfloat16
    AttentionShape(2, 20, 12, 6, 6, 8, 4),
    AttentionShape(1, 16, 16, 4, 1, 16, 4),  # one head of keys for all
]
of_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def inputs(shape: AttentionShape) -> list[torch.Tensor]:
    """q [b, s, a, d], k and v [b, s', kv, d]: leaves with gradients."""
    b, s_q, s_k, heads, kv_heads, d, size = shape
    sizes = (b, s_q, heads, d), (b, s_k, kv_heads, d), (b, s_k, kv_heads, d)
    return [torch.randn(size_, dtype=DTYPES[size], device=DEVICE).requires_grad_() for size_ in sizes]


def standard_inputs(shape: AttentionShape) -> list[torch.Tensor]:
    """Return the same sizes, the query heads of a key head as its rows: q [b kv, a/kv s, d], k and v [b kv, s', d]."""
    b, s_q, s_k, heads, kv_heads, d, size = shape
    sizes = (b * kv_heads, heads // kv_heads * s_q, d), (b * kv_heads, s_k, d), (b * kv_heads, s_k, d)
    return [torch.randn(size_, dtype=DTYPES[size], device=DEVICE).requires_grad_() for size_ in sizes]


def standard(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)


def retained_bytes(run, leaves: list[torch.Tensor]) -> int:
    """Return the bytes of all memory that autograd keeps for backward."""
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x  # holding it, so that its memory goes to nobody else
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = run(*leaves)
    torch.autograd.grad(out, leaves, torch.ones_like(out))  # what was kept is enough
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@of_shapes
def test_standard_attention_moves_what_its_three_operations_move(shape):
    q, k, v = (x.detach() for x in standard_inputs(shape))
    with BytesMoved() as moved:
        standard(q, k, v)
    assert [name for name, *_ in moved.rows] == ["aten::bmm", "aten::_softmax", "aten::bmm"]
    assert standard_traffic(shape) == moved.total


@of_shapes
def test_standard_attention_keeps_its_inputs_and_the_probabilities(shape):
    leaves = standard_inputs(shape)
    assert saved_by_standard(shape) == retained_bytes(standard, leaves)
    b, s_q, s_k, heads, *_, size = shape
    assert saved_by_standard(shape) == sum(x.nbytes for x in leaves) + b * heads * s_q * s_k * size


@of_shapes
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("way", [flash_attention, flash_attention_reference])
def test_flash_attention_keeps_no_scores(way, causal, shape):
    assert saved_by_flash(shape) == retained_bytes(lambda q, k, v: way(q, k, v, causal), inputs(shape))


@of_shapes
def test_the_least_is_every_input_and_output_once(shape):
    q, k, v = inputs(shape)
    out, lse = (
        F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True),
        torch.zeros(shape.batch, shape.heads, shape.queries),
    )
    assert least_traffic(shape) == sum(x.nbytes for x in (q, k, v, out, lse))
    assert least_traffic(shape) == saved_by_flash(shape)  # what is loaded and stored is what is kept


def counted(shape: AttentionShape, causal: bool, block_q: int, block_k: int) -> int:
    """Return the bytes of all sectors that the kernel's loads and stores touch, program by program."""
    q, k, v = (x.detach() for x in inputs(shape))
    out, lse = torch.empty_like(q), torch.empty(shape.batch, shape.heads, shape.queries)
    group, strides = shape.heads // shape.kv_heads, flash_forward.strides_of(q, k, v)
    traffic = count_transactions(
        flash_forward.flash_forward_kernel.fn, (triton.cdiv(shape.queries, block_q), shape.heads, shape.batch),
        q, k, v, out, lse, None, shape.queries, shape.keys, group, 0.25, *strides, CAUSAL=causal,
        **flash_forward.head_sizes(shape.head_dim), BLOCK_Q=block_q, BLOCK_K=block_k, num_warps=4, num_stages=2,
    )  # fmt: skip
    return SECTOR * traffic.sectors()


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="counts inside Triton's interpreter")
@pytest.mark.parametrize(
    "shape, causal, blocks",
    [
        (AttentionShape(1, 128, 128, 1, 1, 32), True, (64, 32)),
        (AttentionShape(2, 40, 88, 2, 1, 32), False, (32, 64)),  # both ends ragged, two heads share their keys
        (AttentionShape(1, 96, 40, 1, 1, 16, 4), True, (64, 32)),  # float32; the last queries see all keys
    ],
    ids=str,
)
def test_the_kernel_moves_what_the_formula_says(shape, causal, blocks):
    assert flash_traffic(shape, *blocks, causal) == counted(shape, causal, *blocks)


def test_one_tile_of_queries_moves_the_least_and_each_further_one_k_and_v_again():
    shape = AttentionShape(2, 512, 256, 4, 4, 64)
    for tiles_of_queries in (1, 2, 8):
        again = (tiles_of_queries - 1) * 2 * shape.key_bytes
        assert flash_traffic(shape, 512 // tiles_of_queries, 64, False) == least_traffic(shape) + again
    shared = shape._replace(kv_heads=1)  # each query head loads its keys for itself
    assert flash_traffic(shared, 512, 64, False) == least_traffic(shared) + 3 * 2 * shared.key_bytes
    with pytest.raises(ValueError, match="blocks of 1 or more"):
        flash_traffic(shape, 0, 64, True)


def test_what_the_text_says_of_the_scores():
    """64 times q, k, v and out at 8k tokens and heads of 128; d / e FLOPs a byte of scores, at any length."""
    for s in (8192, 2048):
        shape = AttentionShape(1, s, s, 32, 32, 128)
        others = 2 * shape.query_bytes + 2 * shape.key_bytes
        scores = standard_traffic(shape) - others
        assert scores == s // 128 * others
        assert 4 * 32 * s * s * 128 == 64 * scores


def test_the_first_order_moves_a_partial_result_for_each_tile_of_keys():
    shape, block = AttentionShape(2, 512, 512, 4, 4, 64), 64
    visits = sum(query >= key for query in range(8) for key in range(8))  # tiles on the diagonal and below, of a head
    per_query = 2 * 64 + 2 * 4 * 64 + 4 * 4  # q in 16 bits; out in float32, read and written; so are m and l
    assert first_traffic(shape, block) == 2 * shape.key_bytes + 2 * 4 * visits * block * per_query
