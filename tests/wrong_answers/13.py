"""Wrong answers that the checks of notebook 13 must catch."""

# %% 13.1 no maximum is taken off
def online_step(
    highest: torch.Tensor, total: torch.Tensor, out: torch.Tensor, scores: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    higher = torch.maximum(highest, scores.amax(-1))
    p = torch.exp(scores)
    return higher, total + p.sum(-1), out + rounded_matmul(p, values)

# %% 13.1 out is not rescaled
out * rescale[..., None] + rounded_matmul => out + rounded_matmul

# %% 13.1 total is not rescaled
total * rescale + p.sum => total + p.sum

# %% 13.1 rescaled the wrong way round
rescale = torch.exp(highest - base) => rescale = torch.exp(base - highest).nan_to_num(posinf=0.0)

# %% 13.1 changes its arguments in place
return higher, total * rescale + p.sum(-1), out * rescale[..., None] + rounded_matmul(p, values)
=>
return higher, total.mul_(rescale).add_(p.sum(-1)), out.mul_(rescale[..., None]).add_(rounded_matmul(p, values))

# %% 13.1 masked rows become NaN
base = higher.masked_fill(higher == -math.inf, 0.0)  # nothing but -inf so far: exp(-inf - 0) is 0, not NaN
=>
base = higher

# %% 13.1 the maximum of the first tile stays
torch.maximum(highest, scores.amax(-1)) => torch.where(highest == -math.inf, scores.amax(-1), highest)

# %% 13.1 out is divided in every step
return higher, total * rescale + p.sum(-1), out * rescale[..., None] + rounded_matmul(p, values)
=>
sums = total * rescale + p.sum(-1)
return (
    higher,
    sums,
    (out * (total * rescale)[..., None] + rounded_matmul(p, values)) / sums[..., None].clamp(min=1e-30),
)

# %% 13.1 p is not rounded before the product
rounded_matmul(p, values) => p @ values.to(p.dtype)

# %% 13.1 total sums rounded exponentials
p = torch.exp(scores - base[..., None])
=>
p = torch.exp(scores - base[..., None])
p = p.to(values.dtype).to(p.dtype)

# %% 13.1 out in the dtype of the values
rounded_matmul(p, values) => rounded_matmul(p, values).to(values.dtype)
out * rescale[..., None] => out.to(values.dtype) * rescale[..., None].to(values.dtype)

# %% 13.2 a key too few at the diagonal
first_row + 1 => first_row

# %% 13.2 a key too many at the diagonal
first_row + 1 => first_row + 2

# %% 13.2 the last query's own key is missing
s_k, row_end => s_k, row_end - 1

# %% 13.2 a key past the last query's
s_k, row_end => s_k, row_end + 1

# %% 13.2 not rounded to whole tiles
(s_k, first_row + 1) // block_k * block_k => (s_k, first_row + 1)

# %% 13.2 a tile cut at the last query counts its missing rows
row_end = min(first_row + block_q, s_q) => row_end = first_row + block_q

# %% 13.2 all tiles are masked
return min(s_k, first_row + 1) // block_k * block_k => return 0

# %% 13.2 no tile is skipped
min(s_k, row_end) => s_k

# %% 13.2 the last keys are taken for a whole tile
return s_k // block_k * block_k, s_k => return s_k, s_k

# %% 13.3 fake: all scores at once
def tiled_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None,
    block_q: int = 64, block_k: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    kv_heads, wide = k.shape[2], wide_dtype(q)
    whole = Tile(0, q.shape[1], 0, k.shape[1], "partial")
    q_rows, k_rows, v_rows = (fold_heads(x, kv_heads) for x in (q, k, v))
    z = tile_scores(q_rows, k_rows, whole, scale_or_default(scale, q.shape[3]), causal).to(wide)
    out = unfold_heads(rounded_matmul(z.softmax(-1), v_rows), q.shape[2]).to(q.dtype)
    return out, unfold_heads(z.logsumexp(-1)[..., None], q.shape[2])[..., 0]

# %% 13.3 fake: all scores at once, and steps whose result is thrown away
def tiled_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None,
    block_q: int = 64, block_k: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    kv_heads, wide = k.shape[2], wide_dtype(q)
    whole = Tile(0, q.shape[1], 0, k.shape[1], "partial")
    q_rows, k_rows, v_rows = (fold_heads(x, kv_heads) for x in (q, k, v))
    z = tile_scores(q_rows, k_rows, whole, scale_or_default(scale, q.shape[3]), causal).to(wide)
    for first_row in range(0, q.shape[1], block_q):
        for tile in row_of_tiles(first_row, q.shape[1], k.shape[1], block_q, block_k, causal):
            columns = slice(tile.column, tile.column_end)
            nothing = torch.zeros_like(z[..., 0])
            online_step(nothing, nothing, torch.zeros_like(q_rows, dtype=wide), z[..., columns], v_rows[:, :, columns])
    out = unfold_heads(rounded_matmul(z.softmax(-1), v_rows), q.shape[2]).to(q.dtype)
    return out, unfold_heads(z.logsumexp(-1)[..., None], q.shape[2])[..., 0]

# %% 13.3 each tile has a softmax of its own, and they are averaged
highest, total, sums = online_step(highest, total, sums, z, v_tile)
=>
_, count, part = online_step(
    torch.full_like(highest, -math.inf), 0 * highest.nan_to_num(), 0 * sums, z, v_tile
)
sums, highest = sums + (part / count[..., None].clamp(min=1e-30)), z.amax(-1)
total = total + 1

# %% 13.3 not divided by the sum
sums / total[..., None] => sums

# %% 13.3 lse is the highest score
highest + total.log() => highest

# %% 13.3 sums are rounded to 16 bits after each tile
highest, total, sums = online_step(highest, total, sums, z, v_tile)
=>
highest, total, sums = online_step(highest, total, sums, z, v_tile)
sums = sums.to(q.dtype).to(lse.dtype)

# %% 13.3 query heads are dealt to the key heads in turn
q[:, rows] => q[:, rows].unflatten(2, (-1, kv_heads)).transpose(2, 3).flatten(2, 3)
---
out[:, rows] = unfold_heads(sums / total[..., None], heads)
lse[:, rows] = unfold_heads((highest + total.log())[..., None], heads)[..., 0]
=>
out[:, rows] = (
    unfold_heads(sums / total[..., None], heads).unflatten(2, (kv_heads, -1)).transpose(2, 3).flatten(2, 3)
)
lse[:, rows] = (
    unfold_heads((highest + total.log())[..., None], heads)[..., 0]
    .unflatten(2, (kv_heads, -1))
    .transpose(2, 3)
    .flatten(2, 3)
)

# %% 13.3 skips no tile
for tile in row_of_tiles(first_row, s_q, s_k, block_q, block_k, causal):
=>
for tile in [
    Tile(first_row, min(first_row + block_q, s_q), key, min(key + block_k, s_k), "partial")
    for key in range(0, s_k, block_k)
]:

# %% 13.3 without keys the result is NaN
if s_k == 0:
    return out, lse
=>

# %% 13.3 the maximum begins at 0
torch.full_like(q_tile[..., 0], -math.inf, dtype=lse.dtype) => torch.zeros_like(q_tile[..., 0], dtype=lse.dtype)

# %% 13.3 the maximum begins at -100
math.inf, dtype=lse.dtype => 100.0, dtype=lse.dtype

# %% 13.3 a little more than total, against a division by 0
sums / total[..., None] => sums / (total[..., None] + 1e-6)

# %% 13.3 lse of a little more than total
total.log() => (total + 1e-6).log()

# %% 13.3 k and v are repeated for the query heads
if s_k == 0:
    return out, lse
=>
if s_k == 0:
    return out, lse
k, v = (x.repeat_interleave(heads // kv_heads, 2) for x in (k, v))
kv_heads = heads

# %% 13.3 float64 is summed in float32
dtype=wide_dtype(q)) => dtype=torch.float32)

# %% 13.4 fake: autograd over all scores
from course_kit.labs.flash_attention import exact_attention


def tiled_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    causal: bool, scale: float | None = None, block_q: int = 64, block_k: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        result = exact_attention(*leaves, causal, scale_or_default(scale, q.shape[3]))[0]
    found = torch.autograd.grad(result, leaves, gradient.double())
    return tuple(x.to(q.dtype) for x in found)

# %% 13.4 fake: all probabilities at once, from lse
dk, dv = (x.new_zeros(x.shape, dtype=wide_dtype(x)).transpose(1, 2) for x in (k, v))  # [b, kv, s', d]
=>
dk, dv = (x.new_zeros(x.shape, dtype=wide_dtype(x)).transpose(1, 2) for x in (k, v))  # [b, kv, s', d]
block_q, block_k = max(s_q, 1), max(s_k, 1)

# %% 13.4 delta is left out
(upper, v_tile.mT) - delta => (upper, v_tile.mT)

# %% 13.4 delta is the sum over the keys of the tile
ds = p * (rounded_matmul(upper, v_tile.mT) - delta)
=>
dp = rounded_matmul(upper, v_tile.mT)
ds = p * (dp - (p * dp).sum(-1, keepdim=True))

# %% 13.4 the scale is forgotten in dk
dk.mul_(scale).transpose => dk.transpose

# %% 13.4 dk and dv of the first head of each group alone
dk[:, :, columns] += rounded_matmul(ds.mT, q_tile)
dv[:, :, columns] += rounded_matmul(p.mT, upper)
=>
first = slice(0, tile.row_end - tile.row)
dk[:, :, columns] += rounded_matmul(ds[:, :, first].mT, q_tile[:, :, first])
dv[:, :, columns] += rounded_matmul(p[:, :, first].mT, upper[:, :, first])

# %% 13.4 p is a softmax over the tile, lse is not used
p = torch.exp(tile_scores(q_tile, k_tile, tile, scale, causal) - lse_tile)
=>
p = tile_scores(q_tile, k_tile, tile, scale, causal).softmax(-1).nan_to_num(0.0)

# %% 13.4 dk and dv are collected in 16 bits
x.new_zeros(x.shape, dtype=wide_dtype(x)) => torch.zeros_like(x)
(dk.dtype) => (lse.dtype)
dtype=dk.dtype => dtype=lse.dtype

# %% 13.4 dq is collected in 16 bits
q_tile, dtype=dk.dtype => q_tile

# %% 13.4 delta in the dtype of the gradient
upper.to(dk.dtype) * out_tile => upper * out_tile

# %% 13.4 delta sums rounded products
(upper.to(dk.dtype) * out_tile).sum => (upper * out_tile).to(dk.dtype).sum

# %% 13.4 p is not rounded for dv
rounded_matmul(p.mT, upper) => p.mT @ upper.to(dk.dtype)

# %% 13.4 ds is not rounded for dk
rounded_matmul(ds.mT, q_tile) => ds.mT @ q_tile.to(dk.dtype)

# %% 13.4 ds is not rounded for dq
rounded_matmul(ds, k_tile) => ds @ k_tile.to(dk.dtype)

# %% 13.4 k and v are repeated for the query heads
dq = q.new_zeros(q.shape)
=>
dq, group, kv = q.new_zeros(q.shape), heads // kv_heads, kv_heads
k, v = (x.repeat_interleave(group, 2) for x in (k, v))
kv_heads = heads
---
return dq, dk.mul_(scale).transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)
=>
dk, dv = (x.unflatten(1, (kv, group)).sum(2) for x in (dk, dv))
return dq, dk.mul_(scale).transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)

# %% 13.5 a packed batch is taken for a plain one
@triton.jit
def sequence_at(number, cu_seqlens, s_q, s_k):
    return number, 0, s_q, s_k

# %% 13.5 the end in place of the length
(cu_seqlens + number + 1) - start => (cu_seqlens + number + 1)

# %% 13.5 starts where the sequence ends
return 0, start, length, length => return 0, start + length, length, length

# %% 13.5 the length in place of the start
start = tl.load(cu_seqlens + number)
length = tl.load(cu_seqlens + number + 1) - start
=>
start = tl.load(cu_seqlens + number + 1) - tl.load(cu_seqlens + number)
length = start

# %% 13.5 a packed sequence has a row of its own
return 0, start, length, length => return number, start, length, length

# %% 13.5 the keys of the whole row
return 0, start, length, length => return 0, start, length, s_k

# %% 13.5 keys as many as queries in a plain batch
return number, 0, s_q, s_k => return number, 0, s_q, s_q

# %% 13.5 no else: a GPU's compiler reads on after the return
@triton.jit
def sequence_at(number, cu_seqlens, s_q, s_k):
    if cu_seqlens is None:
        return number, 0, s_q, s_k
    start = tl.load(cu_seqlens + number)
    length = tl.load(cu_seqlens + number + 1) - start
    return 0, start, length, length

# %% 13.6 a mask in every tile
first_key >= unmasked_end => first_key >= 0

# %% 13.6 no tile is skipped
range(0, end, BLOCK_K) => range(0, keys, BLOCK_K)

# %% 13.6 the values summed so far are not rescaled
weighted * shrink[:, None] => weighted

# %% 13.6 no mask past the last key
last_seen = tl.minimum(first_query + tl.arange(0, BLOCK_Q), keys - 1)[:, None] if CAUSAL else keys - 1
=>
last_seen = (first_query + tl.arange(0, BLOCK_Q))[:, None] if CAUSAL else keys + BLOCK_K

# %% 13.6 exp in place of exp2
powers = tl.exp2(scores * to_base_2 - (higher * to_base_2)[:, None])
shrink = tl.exp2((highest - higher) * to_base_2)
=>
powers = tl.exp((scores - higher[:, None]) * (to_base_2 / 1.4426950408889634))
shrink = tl.exp((highest - higher) * (to_base_2 / 1.4426950408889634))

# %% 13.6 the powers keep float32
cast(powers, v_tile.dtype), v_tile => powers, v_tile

# %% 13.6 the maximum is that of scaled scores
return highest, total => return highest * to_base_2, total

# %% 13.6 no maximum is taken off
higher = tl.maximum(highest, tl.max(scores, axis=1)) => higher = tl.zeros([BLOCK_Q], tl.float32)
shrink = tl.exp2((highest - higher) * to_base_2) => shrink = tl.full([BLOCK_Q], 1.0, tl.float32)

# %% 13.6 divided in every step, and once more by the kernel
highest = higher
=>
highest = higher
weighted = weighted / total[:, None]

# %% 13.6 one loop after another
@triton.jit
def attend_tiles(
    q_tile, k_rows, v_rows, k_row, v_row, first_query, queries, keys, to_base_2,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    last_seen = tl.minimum(first_query + tl.arange(0, BLOCK_Q), keys - 1)[:, None] if CAUSAL else keys - 1
    unmasked_end, end = seen_keys(first_query, queries, keys, CAUSAL, BLOCK_Q, BLOCK_K)
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    weighted = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for part in tl.static_range(2):
        for first_key in range(part * unmasked_end, end if part else unmasked_end, BLOCK_K):
            k_tile = load_columns(k_rows, keys - first_key, k_row, HEAD_DIM, BLOCK_K, BLOCK_D)
            scores = dot(q_tile, k_tile, tl.zeros((BLOCK_Q, BLOCK_K), tl.float32))
            if part:
                key = first_key + tl.arange(0, BLOCK_K)[None, :]
                scores = tl.where(key <= last_seen, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, axis=1))
            powers = tl.exp2(scores * to_base_2 - (higher * to_base_2)[:, None])
            shrink = tl.exp2((highest - higher) * to_base_2)
            total = total * shrink + tl.sum(powers, axis=1)
            v_tile = load_rows(v_rows, keys - first_key, v_row, HEAD_DIM, BLOCK_K, BLOCK_D)
            weighted = dot(cast(powers, v_tile.dtype), v_tile, weighted * shrink[:, None])
            highest = higher
            k_rows += BLOCK_K * k_row
            v_rows += BLOCK_K * v_row
    return highest, total, weighted

# %% 13.6 the maximum begins at 0
tl.full([BLOCK_Q], float("-inf"), tl.float32) => tl.zeros([BLOCK_Q], tl.float32)

# %% 13.6 offsets in 32 bits
load_columns(k_rows, keys => load_columns(k_rows + first_key * k_row, keys
load_rows(v_rows, keys => load_rows(v_rows + first_key * v_row, keys
k_rows += BLOCK_K * k_row =>
v_rows += BLOCK_K * v_row =>

# %% 13.6 rows past the last key are loaded
load_rows(v_rows, keys - first_key => load_rows(v_rows, BLOCK_K

# %% 13.7 delta is left out
(p_grad - delta[:, None]) => p_grad

# %% 13.7 no mask
tl.where(key <= last_seen, p, 0.0) => tl.where(key <= last_seen, p, p)

# %% 13.7 no mask past the last key
last_seen = tl.minimum(first_query + tl.arange(0, BLOCK_Q), keys - 1)[:, None] if CAUSAL else keys - 1
=>
last_seen = (first_query + tl.arange(0, BLOCK_Q))[:, None] if CAUSAL else keys + BLOCK_K

# %% 13.7 no tile is skipped
range(0, end, BLOCK_K) => range(0, keys, BLOCK_K)

# %% 13.7 a mask in every tile
first_key >= unmasked_end => first_key >= 0

# %% 13.7 lse is taken for one of base 2
(lse * LOG2_E)[:, None] => lse[:, None]

# %% 13.7 the gradient meets k in place of v
dot(grad_tile, v_tile => dot(grad_tile, tl.trans(k_tile)

# %% 13.7 exp in place of exp2
p = tl.exp2(scores * to_base_2 - (lse * LOG2_E)[:, None])
=>
p = tl.exp(scores * (to_base_2 / 1.4426950408889634) - lse[:, None])

# %% 13.7 the gradient of the scores keeps float32
cast(p * (p_grad - delta[:, None]), k_tile.dtype), k_tile => p * (p_grad - delta[:, None]), k_tile

# %% 13.7 offsets in 32 bits
load_rows(k_rows, keys => load_rows(k_rows + first_key * k_row, keys
load_columns(v_rows, keys => load_columns(v_rows + first_key * v_row, keys
k_rows += BLOCK_K * k_row =>
v_rows += BLOCK_K * v_row =>

# %% 13.8 delta is left out
(p_grad - delta[None, :]) => p_grad

# %% 13.8 no mask
key <= first + row[None, :], p, 0.0 => key <= first + row[None, :], p, p

# %% 13.8 the mask of scores that lie the other way
key <= first + row[None, :] => key >= first + row[None, :]

# %% 13.8 a mask in every tile
first < first_key + BLOCK_K - 1 => first >= 0

# %% 13.8 no tile is skipped
start = first_key // BLOCK_Q * BLOCK_Q if CAUSAL else 0 => start = 0

# %% 13.8 the first tile of queries is missed
first_key // BLOCK_Q * BLOCK_Q if => (first_key + BLOCK_Q) // BLOCK_Q * BLOCK_Q if

# %% 13.8 queries past the end are not masked
lse_rows + first + row, mask=row < queries - first, other=0.0 => lse_rows + first + row

# %% 13.8 the last head of the group alone
row = tl.arange(0, BLOCK_Q)
=>
row = tl.arange(0, BLOCK_Q)
k_sum, v_sum = tl.zeros_like(k_sum), tl.zeros_like(v_sum)

# %% 13.8 p keeps float32
cast(p, grad_tile.dtype), grad_tile => p, grad_tile

# %% 13.8 offsets in 32 bits
load_rows(q_rows, queries => load_rows(q_rows + first * q_row, queries
load_rows(grad_rows, queries => load_rows(grad_rows + first * grad_row, queries
q_rows += tl.cast(start, tl.int64) * q_row =>
grad_rows += tl.cast(start, tl.int64) * grad_row =>
q_rows += BLOCK_Q * q_row =>
grad_rows += BLOCK_Q * grad_row =>

# %% 13.8 the offset of the first tile in 32 bits
q_rows += tl.cast(start, tl.int64) * q_row => q_rows += start * q_row

# %% 13.9 lse as the operator gives it
return out, lse.transpose(1, 2) => return out, lse

# %% 13.9 the operator gets lse as it lies
lse.transpose(1, 2), None => lse.contiguous(), None

# %% 13.9 backward with an lse of its own
from course_lib.flash_attention.reference import tiled_forward


def flash_block_backward(gradient, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, ...]:
    scale, longest = check_for_kernel(q, k, v, None), max(q.shape[1], k.shape[1])
    _, own = tiled_forward(q, k, v, causal, scale)
    return flash_backward_operator(gradient, q, k, v, out, own.transpose(1, 2), None, longest, causal, scale)

# %% 13.9 no scale
scale = check_for_kernel(q, k, v, None)
=>
scale = 1.0

# %% 13.9 backward without a scale
check_for_kernel(q, k, v, None), max => 1.0, max

# %% 13.9 fake: PyTorch's own forward
def flash_block_forward(q, k, v, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    heads_first[1:] = [x.repeat_interleave(q.shape[2] // k.shape[2], 1) for x in heads_first[1:]]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, causal)
    return out.transpose(1, 2), lse.transpose(1, 2)

# %% 13.9 fake: backward in plain PyTorch
from course_lib.flash_attention.reference import tiled_backward


def flash_block_backward(gradient, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, ...]:
    scale, longest = check_for_kernel(q, k, v, None), max(q.shape[1], k.shape[1])
    return tiled_backward(gradient, q, k, v, out, lse, causal, scale, longest, longest)

# %% 13.9 longest counts the queries alone
None, max(q.shape[1], k.shape[1]) => None, q.shape[1]
(q, k, v, None), max(q.shape[1], k.shape[1]) => (q, k, v, None), q.shape[1]

# %% 13.9 longest counts the keys alone
None, max(q.shape[1], k.shape[1]) => None, k.shape[1]
(q, k, v, None), max(q.shape[1], k.shape[1]) => (q, k, v, None), k.shape[1]

# %% 13.9 the scale by hand, and nothing is refused
scale = check_for_kernel(q, k, v, None)
=>
scale = q.shape[3] ** -0.5
---
check_for_kernel(q, k, v, None), max => q.shape[3] ** -0.5, max

# %% 13.9 forward alone refuses
check_for_kernel(q, k, v, None), max => q.shape[3] ** -0.5, max

# %% 13.6 v is widened for the matmul
weighted = dot(cast(powers, v_tile.dtype), v_tile, weighted * shrink[:, None])
=>
weighted = tl.dot(powers, v_tile.to(tl.float32), weighted * shrink[:, None])

# %% 13.6 q and k are widened for the matmul
scores = dot(q_tile, k_tile, => scores = dot(q_tile.to(tl.float32), k_tile.to(tl.float32),

# %% 13.6 k's pointer stays
k_rows += BLOCK_K * k_row => k_rows += 0

# %% 13.7 the gradient and v are widened for the matmul
p_grad = dot(grad_tile, v_tile, => p_grad = dot(grad_tile.to(tl.float32), v_tile.to(tl.float32),

# %% 13.8 the offset of the first gradient in 32 bits
grad_rows += tl.cast(start, tl.int64) * grad_row => grad_rows += start * grad_row

# %% 13.8 lse past the end is whatever a GPU loads
lse_rows + first + row, mask=row < queries - first, other=0.0 => lse_rows + first + row, mask=row < queries - first

# %% 13.8 delta past the end is whatever a GPU loads
delta_rows + first + row, mask=row < queries - first, other=0.0 => delta_rows + first + row, mask=row < queries - first

# %% 13.6 v's rows are as far apart as k's
v_rows += BLOCK_K * v_row => v_rows += BLOCK_K * k_row

# %% 13.7 v's rows are as far apart as k's
v_rows += BLOCK_K * v_row => v_rows += BLOCK_K * k_row
