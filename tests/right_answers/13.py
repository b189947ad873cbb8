"""Right answers in another style than the solutions, that the checks of notebook 13 must accept."""

# %% 13.1 a base for rows that see nothing
def online_step(
    highest: torch.Tensor, total: torch.Tensor, out: torch.Tensor, scores: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tops = scores.max(dim=-1).values
    higher = torch.where(tops > highest, tops, highest)
    base = torch.where(torch.isinf(higher) & (higher < 0), torch.zeros_like(higher), higher)
    powers = (scores - base.unsqueeze(-1)).exp()
    shrink = (highest - base).exp()
    return higher, shrink * total + powers.sum(dim=-1), shrink.unsqueeze(-1) * out + rounded_matmul(powers, values)

# %% 13.2 with the last row
def key_bounds(first_row: int, block_q: int, block_k: int, s_q: int, s_k: int, causal: bool) -> tuple[int, int]:
    if causal:
        last_row = min(first_row + block_q, s_q) - 1
        end, seen_by_all = min(s_k, last_row + 1), min(s_k, first_row + 1)
    else:
        end = seen_by_all = s_k
    return seen_by_all - seen_by_all % block_k, end

# %% 13.3 lists of parts
def tiled_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None,
    block_q: int = 64, block_k: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    s_q, heads, d = q.shape[1:]
    s_k, kv_heads = k.shape[1], k.shape[2]
    scale, dtype = scale_or_default(scale, d), wide_dtype(q)
    if not s_k:
        return torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=dtype, device=q.device)
    outs, lses = [], []
    for first_row in range(0, s_q, block_q):
        q_tile = fold_heads(q[:, first_row : first_row + block_q], kv_heads)
        highest = torch.full(q_tile.shape[:-1], -math.inf, dtype=dtype, device=q.device)
        total = torch.zeros(q_tile.shape[:-1], dtype=dtype, device=q.device)
        sums = torch.zeros(q_tile.shape, dtype=dtype, device=q.device)
        for tile in row_of_tiles(first_row, s_q, s_k, block_q, block_k, causal):
            k_tile = fold_heads(k[:, tile.column : tile.column_end], kv_heads)
            v_tile = fold_heads(v[:, tile.column : tile.column_end], kv_heads)
            scores = tile_scores(q_tile, k_tile, tile, scale, causal)
            highest, total, sums = online_step(highest, total, sums, scores, v_tile)
        outs.append(unfold_heads(sums / total.unsqueeze(-1), heads).to(q.dtype))
        lses.append(unfold_heads((torch.log(total) + highest).unsqueeze(-1), heads).squeeze(-1))
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)

# %% 13.4 delta once for all rows
def tiled_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    causal: bool, scale: float | None = None, block_q: int = 64, block_k: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    s_q, heads, d = q.shape[1:]
    s_k, kv_heads = k.shape[1], k.shape[2]
    scale, dtype = scale_or_default(scale, d), wide_dtype(k)
    dq = torch.zeros_like(q)
    dk = torch.zeros(k.transpose(1, 2).shape, dtype=dtype, device=k.device)
    dv = torch.zeros(v.transpose(1, 2).shape, dtype=dtype, device=v.device)
    delta = (gradient.to(dtype) * out).sum(dim=-1, keepdim=True)  # [b, s, a, 1]
    for first_row in range(0, s_q, block_q):
        rows = slice(first_row, min(first_row + block_q, s_q))
        q_tile, upper = fold_heads(q[:, rows], kv_heads), fold_heads(gradient[:, rows], kv_heads)
        lse_tile, delta_tile = fold_heads(lse[:, rows].unsqueeze(-1), kv_heads), fold_heads(delta[:, rows], kv_heads)
        of_rows = torch.zeros(q_tile.shape, dtype=dtype, device=q.device)
        for tile in row_of_tiles(first_row, s_q, s_k, block_q, block_k, causal):
            k_tile = fold_heads(k[:, tile.column : tile.column_end], kv_heads)
            v_tile = fold_heads(v[:, tile.column : tile.column_end], kv_heads)
            p = (tile_scores(q_tile, k_tile, tile, scale, causal) - lse_tile).exp()
            dv[:, :, tile.column : tile.column_end].add_(rounded_matmul(p.transpose(-1, -2), upper))
            ds = (rounded_matmul(upper, v_tile.transpose(-1, -2)) - delta_tile) * p
            dk[:, :, tile.column : tile.column_end].add_(rounded_matmul(ds.transpose(-1, -2), q_tile))
            of_rows.add_(rounded_matmul(ds, k_tile))
        dq[:, rows] = unfold_heads(scale * of_rows, heads).to(q.dtype)
    return dq, (scale * dk).transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)

# %% 13.5 two loads
@triton.jit
def sequence_at(number, cu_seqlens, s_q, s_k):
    if cu_seqlens is not None:
        pair = cu_seqlens + number
        begin = tl.load(pair)
        tokens = tl.load(pair + 1) - begin
        return 0, begin, tokens, tokens
    else:
        return number, 0, s_q, s_k

# %% 13.6 the mask by key and query
@triton.jit
def attend_tiles(
    q_tile, k_rows, v_rows, k_row, v_row, first_query, queries, keys, to_base_2,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    unmasked_end, end = seen_keys(first_query, queries, keys, CAUSAL, BLOCK_Q, BLOCK_K)
    sums = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    highest = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    query = first_query + tl.arange(0, BLOCK_Q)
    for first_key in range(0, end, BLOCK_K):
        of_k = load_columns(k_rows, keys - first_key, k_row, HEAD_DIM, BLOCK_K, BLOCK_D)
        scores = dot(q_tile, of_k, tl.zeros((BLOCK_Q, BLOCK_K), dtype=tl.float32))
        if first_key >= unmasked_end:
            key = first_key + tl.arange(0, BLOCK_K)
            seen = (key < keys)[None, :]
            if CAUSAL:
                seen = seen & (key[None, :] <= query[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(tl.max(scores, 1), highest)
        shrink = tl.exp2(highest * to_base_2 - top * to_base_2)
        powers = tl.exp2(scores * to_base_2 - top[:, None] * to_base_2)
        of_v = load_rows(v_rows, keys - first_key, v_row, HEAD_DIM, BLOCK_K, BLOCK_D)
        sums = dot(cast(powers, of_v.dtype), of_v, shrink[:, None] * sums)
        total = shrink * total + tl.sum(powers, 1)
        highest = top
        k_rows += k_row * BLOCK_K
        v_rows += v_row * BLOCK_K
    return highest, total, sums

# %% 13.6 offsets in 64 bits
load_columns(k_rows, keys => load_columns(k_rows + tl.cast(first_key, tl.int64) * k_row, keys
load_rows(v_rows, keys => load_rows(v_rows + tl.cast(first_key, tl.int64) * v_row, keys
k_rows += BLOCK_K * k_row =>
v_rows += BLOCK_K * v_row =>

# %% 13.7 the mask by key and query
@triton.jit
def gather_query_gradients(
    q_tile, grad_tile, lse, delta, k_rows, v_rows, k_row, v_row, first_query, queries, keys, to_base_2,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    unmasked_end, end = seen_keys(first_query, queries, keys, CAUSAL, BLOCK_Q, BLOCK_K)
    query = first_query + tl.arange(0, BLOCK_Q)
    base = lse * LOG2_E
    gathered = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    for first_key in range(0, end, BLOCK_K):
        of_k = load_rows(k_rows, keys - first_key, k_row, HEAD_DIM, BLOCK_K, BLOCK_D)
        of_v = load_columns(v_rows, keys - first_key, v_row, HEAD_DIM, BLOCK_K, BLOCK_D)
        scores = dot(q_tile, tl.trans(of_k), tl.zeros((BLOCK_Q, BLOCK_K), dtype=tl.float32))
        p = tl.exp2(scores * to_base_2 - base[:, None])
        if first_key >= unmasked_end:
            key = first_key + tl.arange(0, BLOCK_K)
            seen = (key < keys)[None, :]
            if CAUSAL:
                seen = seen & (key[None, :] <= query[:, None])
            p = tl.where(seen, p, 0.0)
        of_p = dot(grad_tile, of_v, tl.zeros((BLOCK_Q, BLOCK_K), dtype=tl.float32))
        slope = (of_p - delta[:, None]) * p
        gathered = dot(cast(slope, of_k.dtype), of_k, gathered)
        k_rows += k_row * BLOCK_K
        v_rows += v_row * BLOCK_K
    return gathered

# %% 13.7 offsets in 64 bits
load_rows(k_rows, keys => load_rows(k_rows + tl.cast(first_key, tl.int64) * k_row, keys
load_columns(v_rows, keys => load_columns(v_rows + tl.cast(first_key, tl.int64) * v_row, keys
k_rows += BLOCK_K * k_row =>
v_rows += BLOCK_K * v_row =>

# %% 13.8 the first query by itself
@triton.jit
def gather_key_gradients(
    k_sum, v_sum, k_tile, v_tile, q_rows, grad_rows, lse_rows, delta_rows, q_row, grad_row,
    first_key, queries, to_base_2,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    begin = 0
    if CAUSAL:
        begin = first_key - first_key % BLOCK_Q
    offset = tl.cast(begin, tl.int64)
    q_rows += q_row * offset
    grad_rows += grad_row * offset
    keys_here = first_key + tl.arange(0, BLOCK_K)
    place = tl.arange(0, BLOCK_Q)
    for first in range(begin, queries, BLOCK_Q):
        there = place < queries - first
        of_q = load_rows(q_rows, queries - first, q_row, HEAD_DIM, BLOCK_Q, BLOCK_D)
        of_lse = tl.load(lse_rows + first + place, mask=there, other=0.0) * LOG2_E
        scores = dot(k_tile, tl.trans(of_q), tl.zeros((BLOCK_K, BLOCK_Q), dtype=tl.float32))
        p = tl.exp2(scores * to_base_2 - of_lse[None, :])
        if CAUSAL:
            if first < first_key + BLOCK_K - 1:
                p = tl.where(keys_here[:, None] <= (first + place)[None, :], p, 0.0)
        of_grad = load_rows(grad_rows, queries - first, grad_row, HEAD_DIM, BLOCK_Q, BLOCK_D)
        of_delta = tl.load(delta_rows + first + place, mask=there, other=0.0)
        of_p = dot(v_tile, tl.trans(of_grad), tl.zeros((BLOCK_K, BLOCK_Q), dtype=tl.float32))
        v_sum = dot(cast(p, of_grad.dtype), of_grad, v_sum)
        slope = p * (of_p - of_delta[None, :])
        k_sum = dot(cast(slope, of_q.dtype), of_q, k_sum)
        q_rows += q_row * BLOCK_Q
        grad_rows += grad_row * BLOCK_Q
    return k_sum, v_sum

# %% 13.9 the longest by name
def flash_block_forward(q, k, v, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(x.shape[1] for x in (q, k))
    out, lse = flash_operator(q, k, v, None, longest, causal, check_for_kernel(q, k, v, None))
    return out, lse.permute(0, 2, 1)


def flash_block_backward(gradient, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, ...]:
    longest = max(x.shape[1] for x in (q, k))
    rows = lse.permute(0, 2, 1)
    scale = check_for_kernel(q, k, v, None)
    grad_q, grad_k, grad_v = flash_backward_operator(gradient, q, k, v, out, rows, None, longest, causal, scale)
    return grad_q, grad_k, grad_v
