"""The loss of a vocabulary's head, fused with the head: the logits [t, v] are never stored, only a chunk of their rows.

    logits = hidden · weightᵀ        loss = mean over the counted rows of  log Σ_j exp(logits_j) - logits_target

With t = b·s tokens the logits are a step's largest tensor, and the eager path has it several times: logits in the
matmuls' dtype, a float32 copy, its log-softmax, and in backward the gradients of these two. At the peak that is
t·v·(4 + 4 + 4) bytes, log-softmax and both gradients, and e more for logits of e bytes per element that are still
referenced: 25 or 29 GB for 16,384 tokens and 128,256 words in BF16.

The loss is a sum over rows, and each row's gradient, softmax - onehot(target), is known as soon as its logits are. So
one pass over chunks of c rows does it all, forward and backward:

    logits       = hidden[chunk] · weightᵀ                          [c, v]  a matmul: cuBLAS
    loss, dlogits in place of logits                                [c, v]  one Triton kernel, a row per program
    grad_hidden[chunk]  = dlogits · weight                          [c, h]  a matmul
    grad_weight        += dlogitsᵀ · hidden[chunk]                  [v, h]  a matmul, summed in float32

and backward only multiplies the two gradients by (the incoming gradient) / (the number of counted rows). This factor is
applied last on purpose: 1/t would push the small elements of dlogits below FP16's range, and FP16's loss scale, which
prevents that, is part of the incoming gradient.

    peak    c·v·e + t·h·e + 4·v·h bytes (chunk, grad_hidden, grad_weight), and v·h·e more if weight is not in the
            matmuls' dtype: in forward for its copy, or in backward for its gradient
    FLOPs   6·t·v·h, as the eager path: nothing is computed twice
    traffic of the kernel 3·t·v·e bytes (reads a row twice, writes it once); of the matmuls, for each chunk, weight
            twice and grad_weight read and written: (2·e + 8)·v·h. This is the cost of small chunks.

Liger-Kernel's chunks take about as much as hidden, t·h (Hsu et al. 2024, Liger Kernel, §3.2). For a large vocabulary
they are a few hundred rows, and grad_weight is read and written for each: 8·v·h bytes for 6·c·v·h FLOPs, 240 / c of the
matmuls' time on an H200 (4.3 TB/s, 780 TFLOP/s). So c is h / 2 or more (chunk_size): 16-bit logits then take a quarter
of grad_weight, which exists anyway. Wijmans et al. 2024 (Cut Your Losses in Large-Vocabulary Language Models) keep not
even a chunk: their kernel contains the matmuls, and repeats them in backward. In PyTorch since 2.13:
torch.nn.functional.linear_cross_entropy with options=torch.nn.LinearCrossEntropyOptions().
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import nn

from course_lib.kernels.rounding import cast, widen
from course_lib.single_gpu.model import need_transformer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_BLOCK = 16384  # logits that a program holds at a time: 16 per thread, of 1024


# exercise 12.9
@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocab, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the loss of one row per program; with GRADIENT, overwrite its logits with softmax - onehot(target).

    Without GRADIENT the logits stay as they are. Logits may be -inf. A row whose target is `ignore_index` has loss 0
    and gradient 0. Any other target that is no column makes the loss and the gradient of the row NaN. Nothing outside
    of the row is read or written. The sum of exp(logit - largest) is scaled whenever a block has a larger logit
    (Milakov and Gimelshein 2018, online softmax).
    """
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    is_column = (target >= 0) & (target < vocab)
    # Read before the second loop overwrites it: the reductions in between wait for all threads of the program.
    of_target = widen(tl.load(logits + target, mask=is_column, other=0.0))
    columns = tl.arange(0, BLOCK)

    largest, total = -3.4028234663852886e38, 0.0  # the lowest finite number: -inf - -inf would be NaN
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        block = widen(tl.load(logits + start + columns, mask=inside, other=float("-inf")))
        before, largest = largest, tl.maximum(largest, tl.max(block, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(block - largest), 0)
    logsumexp = tl.where(is_column, largest + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counted, logsumexp - of_target, 0.0))

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            block = widen(tl.load(logits + start + columns, mask=inside, other=0.0))
            gradient = tl.exp(block - logsumexp) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + columns, cast(gradient, logits.dtype.element_ty), mask=inside)


def cross_entropy_(
    logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, ignore_index: int, gradient: bool
) -> None:
    """Fill `losses` [c], float32, and with `gradient` overwrite the logits [c, v] with their gradient; targets: [c].

    Rows of logits are contiguous. If v is a multiple of 16, threads read and write 16 bytes at a time; with GPT-2's
    50,257 words 2 bytes, which is one reason to pad a vocabulary.
    """
    rows, vocab = logits.shape
    block = min(triton.next_power_of_2(vocab), LARGEST_BLOCK)
    warps = max(1, block // 512)  # 16 elements per thread: two loads of 16 bytes in BF16, in flight together
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(rows,)](
            logits,
            targets,
            losses,
            vocab,
            logits.stride(0),
            ignore_index,
            GRADIENT=gradient,
            BLOCK=block,
            num_warps=warps,
        )


def chunk_size(tokens: int, hidden: int, vocab: int) -> int:
    """Return the rows of a chunk, a power of 2, or all t. Its logits take about as many bytes as all of `hidden`, or a
    quarter of the bytes of the weight's gradient in float32, whichever is more.

    The first is the next power of 2 of t / (v / h), both rounded up (Liger-Kernel, ops/fused_linear_cross_entropy.py;
    PyTorch's "aspect_ratio"). The second, for 16-bit logits, is h / 2: fewer chunks, and less traffic.
    """
    like_hidden = triton.next_power_of_2(triton.cdiv(tokens, triton.cdiv(vocab, hidden)))
    like_gradient = 2 ** (max(hidden // 2, 1).bit_length() - 1)
    return max(1, min(max(like_hidden, like_gradient), tokens))


def add_matmul(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to total, in place. total: [m, n], float32; a: [m, k], b: [k, n], of one dtype."""
    if a.dtype != total.dtype and total.is_cuda:  # tensor cores add in float32: so does the sum over chunks
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


@torch.library.custom_op("course::linear_cross_entropy", mutates_args=())
def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    mean: bool,
    chunk_rows: int,
    dtype: torch.dtype,
    hidden_needed: bool,
    weight_needed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss, the number of counted rows, and the gradients of the rows' summed loss: for hidden in
    `dtype`, the dtype of the matmuls, for weight in float32; empty if they are not needed.
    """
    tokens, vocab = len(hidden), len(weight)
    width = triton.cdiv(vocab, 64) * 64  # rows begin at multiples of 128 bytes, as the fast matmul kernels require
    logits = hidden.new_empty(min(chunk_rows, tokens), width, dtype=dtype)[:, :vocab]  # one buffer for all chunks
    losses = hidden.new_empty(tokens, dtype=torch.float32)
    grad_hidden = hidden.new_empty(hidden.shape if hidden_needed else 0, dtype=dtype)
    grad_weight = weight.new_zeros(weight.shape if weight_needed else 0, dtype=torch.float32)
    weight, targets = weight.to(dtype), targets.contiguous()
    for start in range(0, tokens, chunk_rows):
        chunk = slice(start, min(start + chunk_rows, tokens))
        rows = hidden[chunk].to(dtype)
        chunk_logits = torch.mm(rows, weight.t(), out=logits[: len(rows)])
        cross_entropy_(chunk_logits, targets[chunk], losses[chunk], ignore_index, hidden_needed or weight_needed)
        if hidden_needed:
            torch.mm(chunk_logits, weight, out=grad_hidden[chunk])
        if weight_needed:
            add_matmul(grad_weight, chunk_logits.t(), rows)
    count = (targets != ignore_index).sum()
    return losses.sum() / count if mean else losses.sum(), count, grad_hidden, grad_weight


@chunked_cross_entropy.register_fake
def _(hidden, weight, targets, ignore_index, mean, chunk_rows, dtype, hidden_needed, weight_needed):
    grad_hidden = hidden.new_empty(hidden.shape if hidden_needed else 0, dtype=dtype)
    grad_weight = weight.new_empty(weight.shape if weight_needed else 0, dtype=torch.float32)
    return hidden.new_empty((), dtype=torch.float32), targets.new_empty(()), grad_hidden, grad_weight


def keep_gradients(ctx, inputs, output):
    hidden, weight, _, _, ctx.mean, _, _, ctx.hidden_needed, ctx.weight_needed = inputs
    _, count, grad_hidden, grad_weight = output
    ctx.dtypes = hidden.dtype, weight.dtype
    ctx.mark_non_differentiable(count, grad_hidden, grad_weight)
    ctx.set_materialize_grads(False)  # else backward would get zeros [t, h] and [v, h] for these three
    ctx.save_for_backward(count, grad_hidden, grad_weight)


def scale_gradients(ctx, gradient, *_):
    """Scale the gradients in place, which saves memory, and makes autograd refuse a second backward of one loss."""
    count, grad_hidden, grad_weight = ctx.saved_tensors
    # All rows ignored: the mean is NaN, the gradients are 0.
    scale = gradient / count.clamp(min=1) if ctx.mean else gradient
    grad_hidden = grad_hidden.mul_(scale).to(ctx.dtypes[0]) if ctx.hidden_needed else None
    grad_weight = grad_weight.mul_(scale).to(ctx.dtypes[1]) if ctx.weight_needed else None
    return grad_hidden, grad_weight, None, None, None, None, None, None, None


chunked_cross_entropy.register_autograd(scale_gradients, setup_context=keep_gradients)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    chunk_rows: int | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the cross-entropy of the logits hidden · weightᵀ, a float32 scalar, without ever storing all logits.

    hidden: [..., h], weight: [v, h], targets: [...] int64; rows whose target is `ignore_index` do not count.
    chunk_rows: rows of logits at a time; None: `chunk_size`. reduction: "mean" over the rows that count, or "sum", for
    micro-batches and ranks, which divide by the count of all of them. hidden and weight have one dtype, FP32, BF16 or
    FP16; under autocast they may differ, and the matmuls run in autocast's dtype. Each gradient has the dtype of its
    tensor. If all rows are ignored, the result is NaN, with gradients of 0, as in F.cross_entropy. A target that is
    neither a word nor ignore_index makes the loss and the gradients NaN: an error would have to wait for the device. A
    second backward of the same loss raises RuntimeError, since the first one scales the gradients in place; there are
    no second derivatives (create_graph).

    Raises ValueError for shapes, dtypes or devices that do not fit together, for chunk_rows below 1, and for another
    reduction.
    """
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1] or not weight.numel():
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)}: they are [..., h] and [v, h]")
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        wanted = f"{list(hidden.shape[:-1])} int64"
        raise ValueError(f"targets are {list(targets.shape)} {targets.dtype}, where hidden has {wanted}")
    if len({hidden.device, weight.device, targets.device}) > 1:
        raise ValueError(f"hidden is on {hidden.device}, weight on {weight.device}, targets on {targets.device}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows {chunk_rows}: it is 1 or more")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction {reduction!r}: it is mean or sum")
    kind = hidden.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    if not {hidden.dtype, weight.dtype} <= set(DTYPES) or not autocast and hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: give one of FP32, BF16 and FP16 for both")
    dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    rows = chunk_rows or chunk_size(len(hidden), hidden.shape[1], len(weight))
    needed = [tensor.requires_grad and torch.is_grad_enabled() for tensor in (hidden, weight)]
    return chunked_cross_entropy(hidden, weight, targets, ignore_index, reduction == "mean", rows, dtype, *needed)[0]


class DeferredHead(nn.Linear):
    """The head's weight without its matmul: the loss multiplies by it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def defer_head(model: nn.Module) -> nn.Module:
    """Let a `Transformer` return the input of its head, normalized hidden states [b, s, h], in place; return the model.

    The loss is `linear_cross_entropy(model(tokens), model.head.weight, targets)`. The weight is the same Parameter,
    tied or not, and names in state_dict do not change. Not for a head that is split over ranks (its loss is
    `vocab_parallel_cross_entropy`), nor for one whose weight is freed when the model returns (`fully_shard`).

    Raises ValueError, and changes nothing, if there is no head, or if it is deferred or replaced already.
    """
    need_transformer(model, "defer_head", "linear_cross_entropy(hidden, weight, targets) works with any head")
    head = model.head
    if type(head) is not nn.Linear or head.bias is not None:
        raise ValueError(f"the head is {type(head).__name__}: only an nn.Linear without bias can be deferred")
    model.head = DeferredHead(head.in_features, head.out_features, bias=False, device="meta")
    model.head.weight = head.weight
    return model
