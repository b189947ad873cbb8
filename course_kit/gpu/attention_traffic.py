"""Bytes that attention's forward moves and saves, with and without the scores in memory.

    standard    z = q k^T   writes s s' scores;   p = softmax(z)   reads them, writes as many;   p v   reads them
                4 a s s' e per sequence, besides q, k, v and out; at s = 8k and d = 128 this is 64 times q, k, v and out
    flash       q, k, v are read, out and lse are written: linear in s. k and v are read once for each tile of queries,
                but from the L2 cache, which concurrent programs share

b sequences of s queries and s' keys, a query heads, kv heads of keys and values, d elements per head, e bytes per
element. With 4 a s s' d FLOPs, standard attention does d / e FLOPs per byte of scores at any length: 64 for d = 128 in
bfloat16, where an H100 needs 295. FlashAttention does about s / e: from 1,024 tokens on, the tensor cores limit it.

Dao et al. 2022 (FlashAttention), §2.2 and theorem 2.
"""

from typing import NamedTuple

from course_lib.flash_attention.tiles import tiles

LSE_BYTES = 4  # float32, one element per query and head


class AttentionShape(NamedTuple):
    """Sizes of an attention; kv_heads divides heads."""

    batch: int
    queries: int  # per sequence
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int = 2

    @property
    def query_bytes(self) -> int:
        """The bytes of q, and of out."""
        return self.batch * self.queries * self.heads * self.head_dim * self.element_bytes

    @property
    def key_bytes(self) -> int:
        """The bytes of k, and of v."""
        return self.batch * self.keys * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def lse_bytes(self) -> int:
        return self.batch * self.heads * self.queries * LSE_BYTES


def standard_traffic(shape: AttentionShape) -> int:
    """Return the bytes that three kernels read and write: q k^T, softmax, p v. Each kernel reads its inputs once and
    writes its result once. A separate scale or mask does not count.
    """
    scores = shape.batch * shape.heads * shape.queries * shape.keys * shape.element_bytes
    return 2 * shape.query_bytes + 2 * shape.key_bytes + 4 * scores


def flash_traffic(shape: AttentionShape, block_q: int, block_k: int, causal: bool) -> int:
    """Return the bytes that FlashAttention's programs load and store: q, out and lse once, and the visited tiles of k
    and v.
    """
    visited = tiles(shape.queries, shape.keys, block_q, block_k, causal)
    keys = sum(tile.column_end - tile.column for tile in visited)  # per head
    loaded = 2 * shape.batch * shape.heads * keys * shape.head_dim * shape.element_bytes
    return 2 * shape.query_bytes + shape.lse_bytes + loaded


def first_traffic(shape: AttentionShape, block: int = 64) -> float:
    """Return the bytes of the first paper's loop order, causal, in square tiles: k and v once, q and a partial result
    many times.

    The partial result of a query is its out, m and l, in float32: read and written once for each tile of keys. (The 5
    is for elements of 2 bytes: q once, out twice in 4 bytes.)
    """
    visits = (shape.keys // block + 1) / 2  # of a tile of queries, on average
    return 2 * shape.key_bytes + visits * (5 * shape.query_bytes + 4 * shape.lse_bytes)


def least_traffic(shape: AttentionShape) -> int:
    """Return the bytes to and from memory if the L2 cache holds k and v after the first read: each input and output
    once.
    """
    return 2 * shape.query_bytes + 2 * shape.key_bytes + shape.lse_bytes


def saved_by_standard(shape: AttentionShape) -> int:
    """Return the bytes that backward needs: q, k, v and the probabilities."""
    scores = shape.batch * shape.heads * shape.queries * shape.keys * shape.element_bytes
    return shape.query_bytes + 2 * shape.key_bytes + scores


def saved_by_flash(shape: AttentionShape) -> int:
    """Return the bytes that backward needs: q, k, v, out and lse."""
    return 2 * shape.query_bytes + 2 * shape.key_bytes + shape.lse_bytes
