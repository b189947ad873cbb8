"""The cases of benchmarks/attention.py: attention of notebook 13 and its rivals, their sizes, and their work.

Columns. ours: flash_attention. flash, cuDNN, math: scaled_dot_product_attention restricted to that backend; math stores
the scores, and runs up to 4k. flex: FlexAttention, compiled, with the mask as a block mask that is built once.
flash_attn: the package of that name, if it is installed. Documents of different lengths in one row: ours and flash_attn
by cu_seqlens, flash is PyTorch's varlen_attn, flex has a mask of documents, and padded pads to the longest document,
runs flash and removes the padding; both copies count.

All take q [b, s, a, d], the model's layout, and k, v [b, s, kv, d]; SDPA and flex see a transposed view, not a copy.

Sizes: as in FlashAttention-2 (Dao 2023, §4.1), 16k tokens per step and heads x head_dim = 2048, with longer sequences
in smaller batches. Work follows its convention, too: 4 s² d FLOPs per head and sequence forward, half of them if the
mask is causal, and 2.5 times as much backward; recomputed or masked scores do not count.
"""

import importlib.util
import random as chance
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from attention_exact import exact
from kernel_runs import Case, random
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from course_lib.flash_attention.operator import flash_attention, lengths_to_cu_seqlens, packed_attention

if torch.cuda.is_available():  # on a CPU FlexAttention has no backward, and the compiler takes long
    flex_attention = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")
package = torch.cuda.is_available() and importlib.util.find_spec("flash_attn")
if package:
    from flash_attn import flash_attn_func, flash_attn_varlen_func

LONGEST_STORED = 4096  # longer scores, in float32, take 16 GiB and more: not a realistic training
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
SIZES = {
    "cuda": {  # grouped: sequence, heads of q, of k and v, head_dim; documents: count, heads, head_dim
        "tokens": 16384, "width": 2048,
        "sequences": {128: (4096, 16384, 8192, 2048), 64: (4096,)},  # by head_dim
        "flex": (4096, 16384), "grouped": (8192, 32, 8, 128), "documents": (16, 16, 128),
        "rungs": (4096, 128),  # sequence, head_dim
    },
    "small": {
        "tokens": 600, "width": 256, "sequences": {128: (300,), 64: (300,)},
        "flex": (), "grouped": (300, 4, 2, 128), "documents": (3, 2, 128), "rungs": (300, 128),
    },
    "cpu": {
        "tokens": 40, "width": 32, "sequences": {16: (20,)},
        "flex": (20,), "grouped": (20, 2, 1, 16), "documents": (3, 1, 16), "rungs": (40, 16),
    },
}  # fmt: skip


def backend(which: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return scaled_dot_product_attention by this backend, or raise."""
    with sdpa_kernel(which):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def flex(mask: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return FlexAttention with the block mask that `mask` builds once; None: every query sees every key."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flex_attention(q, k, v, block_mask=mask(), enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def causal_mask(sequence: int, device: torch.device):
    """Return FlexAttention's block mask, from a rule for batch, head, query and key."""
    return create_block_mask(lambda b, h, query, key: query >= key, None, None, sequence, sequence, device=device)


def flops(scores: int, causal: bool) -> dict[str, float]:
    """Return the FLOPs of each pass. scores: s² d, summed over heads and sequences."""
    forward = 4 * scores / (2 if causal else 1)
    return {"forward": forward, "backward": 2.5 * forward}


def dense_case(
    device: torch.device,
    sizes: dict,
    kernel: str,
    sequence: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    causal: bool,
) -> Case:
    """Return a case of sequences of one length, as many as there are tokens for."""
    batch = sizes["tokens"] // sequence

    def make():
        return tuple(random(batch, sequence, count, head_dim, device=device) for count in (heads, kv_heads, kv_heads))

    methods: dict[str, Callable] = {"ours": partial(flash_attention, causal=causal)}
    methods |= {column: partial(backend, which, causal=causal) for column, which in BACKENDS.items()}
    if sequence > LONGEST_STORED:
        del methods["math"]
    if sequence in sizes["flex"] and head_dim == 128 or device.type == "cpu":
        methods["flex"] = partial(flex, cache(lambda: causal_mask(sequence, device) if causal else None))
    if package:
        methods["flash_attn"] = partial(flash_attn_func, causal=causal)
    about = {"b": batch, "s": sequence, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "causal": causal}
    size = f"{batch} x {sequence:,}, {head_dim}" + (", causal" if causal else "")
    work = flops(batch * heads * sequence**2 * head_dim, causal)
    lengths = [sequence] * batch
    return Case(
        kernel, size, make, methods, work, "TFLOP/s", peak=True, rival="flash", exact=partial(exact, lengths, causal),
        about=about,
    )  # fmt: skip


def document_lengths(tokens: int, count: int) -> list[int]:
    """Return the lengths of a row of tokens that is cut at random positions."""
    cuts = sorted(chance.Random(0).sample(range(1, tokens), count - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, tokens], strict=True)]


def padded(
    lengths: list[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Pad documents to the longest one, run flash, and remove the padding. positions: all tokens in the padded
    batch.
    """
    batch, longest = len(lengths), max(lengths)

    def pad(x):
        return x.new_zeros(batch * longest, *x.shape[2:]).index_copy(0, positions, x[0]).unflatten(0, (batch, longest))

    out = backend(SDPBackend.FLASH_ATTENTION, pad(q), pad(k), pad(v), causal=True)
    return out.flatten(0, 1).index_select(0, positions)[None]


def document_case(device: torch.device, tokens: int, count: int, heads: int, head_dim: int) -> Case:
    """Return a causal case of documents packed into one row, none of which sees another."""
    lengths = document_lengths(tokens, count)

    @cache
    def ends() -> tuple:
        cuts, longest = lengths_to_cu_seqlens(lengths, device)
        return cuts, cuts, longest, longest

    @cache
    def positions() -> torch.Tensor:
        return torch.cat([torch.arange(n) + i * max(lengths) for i, n in enumerate(lengths)]).to(device)

    @cache
    def mask():
        document = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths)).to(device)

        def same_document(b, h, query, key):
            return (document[query] == document[key]) & (query >= key)

        return create_block_mask(same_document, None, None, tokens, tokens, device=device)

    methods = {
        "ours": lambda q, k, v: packed_attention(*ends()[1:3])(q, k, v),
        "flex": partial(flex, mask),
        "padded": lambda q, k, v: padded(lengths, q, k, v, positions()),
    }
    if device.type == "cuda":
        methods["flash"] = lambda q, k, v: varlen_attn(q[0], k[0], v[0], *ends(), window_size=(-1, 0))[None]
        if package:
            methods["flash_attn"] = lambda q, k, v: flash_attn_varlen_func(q[0], k[0], v[0], *ends(), causal=True)[None]
    about = {"lengths": lengths, "heads": heads, "kv_heads": heads, "head_dim": head_dim, "causal": True}
    work = flops(heads * head_dim * sum(length**2 for length in lengths), causal=True)
    return Case(
        "attention, documents",
        f"{count} in {tokens:,}, {head_dim}, causal",
        lambda: tuple(random(1, tokens, heads, head_dim, device=device) for _ in range(3)),
        methods,
        work,
        "TFLOP/s",
        peak=True,
        rival="flash" if "flash" in methods else "padded",
        exact=partial(exact, lengths, True),
        about=about,
    )


def cases(device: torch.device, which: str) -> Iterator[Case]:
    """Yield all cases."""
    sizes = SIZES[which]
    for head_dim, sequences in sizes["sequences"].items():
        heads = sizes["width"] // head_dim
        for causal in (True, False):
            for sequence in sequences if causal else sequences[:2]:
                yield dense_case(device, sizes, "attention", sequence, heads, heads, head_dim, causal)
    sequence, heads, kv_heads, head_dim = sizes["grouped"]
    for causal in (True, False):
        yield dense_case(device, sizes, f"attention, {heads}/{kv_heads}", sequence, heads, kv_heads, head_dim, causal)
    yield document_case(device, sizes["tokens"], *sizes["documents"])
