"""FlashAttention-3's ideas, as far as Triton offers them on Hopper: the forward kernel again, fed by TMA.

Between two matmuls there is a softmax, which is not small on an H100. With a head size of 128, a query and a key cost
512 FLOPs on the tensor cores and one exponential; a cycle has 256 times as many of these FLOPs as exponentials. Done in
sequence, the exponentials alone take a third of the time. FlashAttention-3 (Shah et al. 2024, §3) lets both units work
at the same time:

1. Tiles are loaded by TMA: one thread requests a tile, and hardware computes the addresses, fills with zeros past the
   end, and signals a barrier in shared memory. No registers, no address arithmetic, no masks.
2. Warp specialization: a producer warpgroup only requests tiles, and gives its registers away; two consumers only
   compute, each on its half of the queries. During the softmax of one, the matmuls of the other can run.
3. Overlap within a warpgroup (algorithm 2): the matmul with a tile's values runs during the softmax of the next.

      producer     load k0 | load v0 | load k1 | load v1 | ...                       40 registers per thread
      consumer 1   q1 k0^T | softmax | p1 v0 | q1 k1^T | softmax | ...              232
      consumer 2             q2 k0^T | softmax | p2 v0 | q2 k1^T | softmax | ...    232

What Triton 3.7 compiles for sm_90 (`compile_kernel(...)` shows it in .ttgir, .ptx and .report):
- 2 needs 4 warps (Triton makes them 12), 128 queries, one loop without `if`, and descriptors that the kernel itself
  creates: Triton splits them in two, which it cannot do with descriptors from the host. With more warps, or an `if`
  around the mask, it is left out silently. With a second loop, or q loaded by pointers, compilation fails. With 64
  queries, both consumers compute all of them. So the mask, one comparison, is in every tile here. A consumer waits for
  each matmul immediately; whether the two alternate is up to the hardware's scheduler, since the paper's barriers
  between them are not available.
- 2 offsets the index at which a descriptor begins, in place, by half a tile for the second consumer. Rows counted from
  the same index would be offset twice, so they have an index of their own (`first_row`). With three tiles in flight the
  results are NaN, with heads of 64 wrong (Triton 3.6, H200): neither is offered.
- 3 can be written, but not together with 2: Triton waits for a matmul before its result is first used, so the loop has
  to use it one iteration later. The probabilities stay in float32 across iterations: in 16 bits they would pass through
  shared memory, and Triton would wait for the matmul that reads them there.
- The paper's last idea, 8-bit matmuls, is left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from course_lib.flash_attention.forward import (
    FOR_TUNER,
    LOG2_E,
    TUNED_BY,
    contiguous_rows_at,
    head_at,
    head_sizes,
    length_class,
    strides_of,
)
from course_lib.flash_attention.reference import check_attention, scale_or_default
from course_lib.kernels.matmul import tunable
from course_lib.kernels.rounding import cast, dot


@triton.jit
def online_softmax(scores, highest, total, first_key, last_seen, to_base_2, MASKED: tl.constexpr):
    """Take one step: return powers [BLOCK_Q, BLOCK_K] of this tile's scores, the factor that rescales earlier sums,
    highest, total.
    """
    if MASKED:
        key = first_key + tl.arange(0, scores.shape[1])[None, :]
        scores = tl.where(key <= last_seen[:, None], scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    powers = tl.exp2(scores * to_base_2 - (higher * to_base_2)[:, None])
    shrink = tl.exp2((highest - higher) * to_base_2)
    return powers, shrink, higher, total * shrink + tl.sum(powers, axis=1)


@triton.jit
def attend_specialized(
    q_tile, k_rows, v_rows, last_seen, end, to_base_2, MASKED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute what attend_tiles does, over the keys before `end`; a warpgroup of its own loads k and v."""
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    weighted = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for first_key in tl.range(0, end, BLOCK_K, warp_specialize=True):
        k_tile = k_rows.load([first_key, 0])
        scores = dot(q_tile, tl.trans(k_tile), tl.zeros((BLOCK_Q, BLOCK_K), tl.float32))
        powers, shrink, highest, total = online_softmax(scores, highest, total, first_key, last_seen, to_base_2, MASKED)
        v_tile = v_rows.load([first_key, 0])
        weighted = dot(cast(powers, v_tile.dtype), v_tile, weighted * shrink[:, None])
    return highest, total, weighted


@triton.jit
def attend_overlapped(
    q_tile, k_rows, v_rows, last_seen, end, to_base_2, MASKED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the same; the matmul with a tile's values runs during the softmax of the next tile."""
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    weighted = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    scores = dot(q_tile, tl.trans(k_rows.load([0, 0])), tl.zeros((BLOCK_Q, BLOCK_K), tl.float32))
    powers, shrink, highest, total = online_softmax(scores, highest, total, 0, last_seen, to_base_2, MASKED)
    for first_key in tl.range(BLOCK_K, end, BLOCK_K):
        k_tile = k_rows.load([first_key, 0])
        scores = dot(q_tile, tl.trans(k_tile), tl.zeros((BLOCK_Q, BLOCK_K), tl.float32))
        v_tile = v_rows.load([first_key - BLOCK_K, 0])
        weighted = dot(cast(powers, v_tile.dtype), v_tile, weighted * shrink[:, None])  # used one iteration later
        powers, shrink, highest, total = online_softmax(scores, highest, total, first_key, last_seen, to_base_2, MASKED)
    v_tile = v_rows.load([(end - 1) // BLOCK_K * BLOCK_K, 0])
    weighted = dot(cast(powers, v_tile.dtype), v_tile, weighted * shrink[:, None])
    return highest, total, weighted


@FOR_TUNER
def hopper_forward_kernel(
    q, k, v, out, lse, queries, keys, group, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, OVERLAPPED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    LENGTH=0,
):  # fmt: skip
    """Compute one tile of queries of one head, as flash_forward_kernel does; out [b, s_q, a, d] and lse [b, a, s_q] are
    contiguous.
    """
    head, heads, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q  # causal: those with the most keys start first
    q_head_at = head_at(q, batch, 0, head, q_batch, q_row, q_head)
    k_head_at = head_at(k, batch, 0, head // group, k_batch, k_row, k_head)
    v_head_at = head_at(v, batch, 0, head // group, v_batch, v_row, v_head)
    out_head_at = contiguous_rows_at(out, batch, 0, head, queries, heads, HEAD_DIM)
    q_rows = tl.make_tensor_descriptor(q_head_at, [queries, HEAD_DIM], [q_row, 1], [BLOCK_Q, BLOCK_D])
    k_rows = tl.make_tensor_descriptor(k_head_at, [keys, HEAD_DIM], [k_row, 1], [BLOCK_K, BLOCK_D])
    v_rows = tl.make_tensor_descriptor(v_head_at, [keys, HEAD_DIM], [v_row, 1], [BLOCK_K, BLOCK_D])
    out_rows = tl.make_tensor_descriptor(out_head_at, [queries, HEAD_DIM], [heads * HEAD_DIM, 1], [BLOCK_Q, BLOCK_D])

    first_row = tl.num_programs(0) * BLOCK_Q - (tl.program_id(0) + 1) * BLOCK_Q  # first_query once more: see 2 above
    row = first_row + tl.arange(0, BLOCK_Q)
    last_seen = tl.minimum(row, keys - 1) if CAUSAL else tl.zeros_like(row) + keys - 1
    end = tl.minimum(keys, first_query + BLOCK_Q) if CAUSAL else keys
    attend_keys: tl.constexpr = attend_overlapped if OVERLAPPED else attend_specialized
    q_tile = q_rows.load([first_query, 0])
    highest, total, weighted = attend_keys(
        q_tile, k_rows, v_rows, last_seen, end, scale * LOG2_E, MASKED, BLOCK_Q, BLOCK_K, BLOCK_D
    )
    out_rows.store([first_query, 0], cast(weighted / total[:, None], out.dtype.element_ty))
    lse_rows = head_at(lse, batch, 0, head, queries * heads, 1, queries)
    tl.store(lse_rows + row, highest * scale + tl.log(total), mask=row < queries)


def check_for_tma(name: str, x: torch.Tensor) -> None:
    """Raise ValueError if TMA cannot read the rows of x: [b, s, a, d]."""
    steps = [x.stride(dim) * x.element_size() for dim in range(3) if x.shape[dim] > 1 or dim == 1]
    if x.stride(3) != 1 or x.stride(1) == 0 or x.data_ptr() % 16 or any(step % 16 for step in steps):
        raise ValueError(
            f"TMA reads rows from addresses and with strides that 16 bytes divide, a head's numbers side by side; "
            f"{name} has strides {tuple(x.stride())} of {x.element_size()} bytes, from address {x.data_ptr():#x}"
        )


def check_hopper_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, overlapped: bool = False
) -> None:
    """Raise ValueError if q [b, s, a, d] and k, v [b, s', kv, d] do not fit one another, TMA, or the kernel."""
    check_attention(q, k, v, scale)
    dtypes = (torch.bfloat16, torch.float16) + (torch.float32,) * (not q.is_cuda)
    if q.dtype not in dtypes or q.shape[3] > 128:
        raise ValueError(f"q is {q.dtype} with heads of {q.shape[3]}: expected {dtypes} and heads of at most 128")
    if q.is_cuda and q.shape[3] <= 64 and not overlapped:
        raise ValueError(f"heads of {q.shape[3]}: split into warps, the kernel is wrong for 64 and less (Triton 3.6)")
    if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] != 9:
        raise ValueError(
            f"{torch.cuda.get_device_name(q.device)} is not a Hopper GPU (sm_90), for which this kernel is"
        )
    if not q.numel() or not k.numel():
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)}: TMA needs at least one sequence and one token in each")
    if q.shape[3] * q.element_size() % 16:
        raise ValueError(
            f"heads of {q.shape[3]} elements, {q.element_size()} bytes each: TMA needs a multiple of 16 bytes"
        )
    for name, x in zip("qkv", (q, k, v), strict=True):
        check_for_tma(name, x)


def suits_hopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """True if these are on a GPU, and `hopper_attention` supports them."""
    if not q.is_cuda:
        return False
    try:
        check_hopper_inputs(q, k, v, None)
    except ValueError:
        return False
    return True


BLOCK_Q = 128
# Tiles, warps, and stages (tiles of k and of v in shared memory): none of them spills a register. Overlapped, two
# groups of four warps have half of the queries each; specialized, the compiler adds the warps that load.
HOPPER_CONFIGURATIONS = {
    overlapped: [
        triton.Config({"BLOCK_Q": BLOCK_Q, "BLOCK_K": block_k}, num_warps=warps, num_stages=stages)
        for block_k, warps, stages in shapes
    ]
    for overlapped, shapes in {False: [(64, 4, 2), (128, 4, 2)], True: [(64, 8, 3), (128, 8, 2)]}.items()
}
HOPPER_KERNELS = {
    overlapped: triton.autotune(configs=tunable(configurations), key=TUNED_BY)(hopper_forward_kernel)
    for overlapped, configurations in HOPPER_CONFIGURATIONS.items()
}


def descriptor_memory(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Return memory for the descriptors of the programs, 128 bytes each: Triton allocates it before a launch."""
    return torch.empty(size, dtype=torch.int8, device="cuda")  # PyTorch aligns to 512 bytes


def hopper_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True, scale: float | None = None,
    overlapped: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute attention forward: return out [b, s, a, d] in q's dtype and lse [b, a, s] in float32; nothing is kept for
    backward.

    q: [b, s, a, d]; k, v: [b, s', kv, d], kv divides a; causal: query i sees keys 0..i; scale: 1 / sqrt(d) if None.
    overlapped: idea 3 of this module instead of 2. Raises ValueError for tensors that TMA cannot read, for shapes and
    dtypes that do not fit (float32 only in the interpreter; heads of up to 64 only there or overlapped), and on GPUs
    other than Hopper.
    """
    check_hopper_inputs(q, k, v, scale, overlapped)
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    if q.is_cuda:
        triton.set_allocator(descriptor_memory)
    with torch.cuda.device_of(q):
        HOPPER_KERNELS[overlapped][(triton.cdiv(queries, BLOCK_Q), heads, batch)](
            q, k, v, out, lse, queries, keys, heads // k.shape[2], scale_or_default(scale, head_dim),
            *strides_of(q, k, v), CAUSAL=causal, MASKED=causal or keys % 128 != 0, OVERLAPPED=overlapped,
            **head_sizes(head_dim), LENGTH=length_class(queries),
        )  # fmt: skip
    return out, lse
