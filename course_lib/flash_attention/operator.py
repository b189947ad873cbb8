"""FlashAttention: softmax(scale q k^T) v, exactly, without the scores in memory; in the model, and in a ring.

    flash_attention(q, k, v)                  [b, s, a, d], as `Attention.core` takes it; bfloat16, float16, float32
    flash_attention_varlen(q, k, v, …)        sequences of different lengths, side by side, none padded
    flash_attention_reference(q, k, v)        the same tiles in plain PyTorch
    FLASH_BLOCK                               forward, backward with lse: ring_attention(…, attention=FLASH_BLOCK)
    use_flash_attention(model)                every layer of a `Transformer` computes with it

Kept for backward: q, k, v, out and one number per query and head; with e bytes per element,
(2 s a + 2 s' kv) d e + 4 s a bytes per sequence, where a stored softmax needs s s' a e more. Kernels: `forward`,
`one_pass`, `backward`, `hopper`.
Dao et al. 2022; Dao 2023.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Callable

import torch
import triton
from torch import nn

from course_lib.context_parallel.blocks import AttentionBlock, contiguous_rows
from course_lib.flash_attention.backward import launch_backward
from course_lib.flash_attention.forward import launch_forward, length_class
from course_lib.flash_attention.hopper import hopper_attention, suits_hopper
from course_lib.flash_attention.one_pass import launch_one_pass
from course_lib.flash_attention.reference import check_attention, flash_attention_reference, scale_or_default
from course_lib.single_gpu import model as plain_model
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import Transformer, need_transformer
from course_lib.tensor_parallel.linear import as_autocast

MOST_PROGRAMS = 65535  # along the second and the third axis of a grid: heads, and sequences
Launch = Callable[..., tuple[torch.Tensor, ...]]
LARGEST_HEAD = 128  # elements; a larger head, with its gradients, does not fit in registers
FLASH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FASTEST: dict[tuple, Launch] = {}  # by key of `fastest`: the launch that was fastest in this process


def launch_hopper(q, k, v, cu_seqlens, longest, causal, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch Hopper's forward kernel, with the arguments and results of launch_forward."""
    return hopper_attention(q, k, v, causal, scale)


def fastest(launches: tuple[Launch, ...], q: torch.Tensor, longest: int, causal: bool, args: tuple) -> Launch:
    """Return the fastest of these launches, which compute the same, on this GPU: measured once for each dtype, head
    size, class of lengths and mask. A launch that fails, or whose result differs from the first's, is left out
    with a warning.
    """
    key = *launches, q.device, q.dtype, q.shape[3], causal, length_class(longest)
    if key not in FASTEST:
        expected = launches[0](*args)
        times: dict[Launch, float] = {}
        for launch in launches:
            try:
                for result, wanted in zip(launch(*args), expected, strict=True):
                    largest = wanted.abs().nan_to_num(posinf=0).max().item() if wanted.numel() else 0.0
                    torch.testing.assert_close(result, wanted, rtol=0.02, atol=0.02 * largest, equal_nan=True)
                times[launch] = triton.testing.do_bench(functools.partial(launch, *args), warmup=5, rep=20)
            except Exception as error:  # also of the compiler, or of the launch
                name = getattr(launch, "__name__", launch)
                warnings.warn(f"{name} is not used: {str(error).strip().splitlines()[0]}", stacklevel=2)
        FASTEST[key] = min(times, key=lambda launch: times[launch])
    return FASTEST[key]


@torch.library.custom_op("course::flash_attention", mutates_args=())
def flash_operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, longest: int,
    causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out [b, s, a, d] in q's dtype and lse [b, a, s] in float32, both contiguous; lse has no gradient."""
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    args = (q, k, v, cu_seqlens, longest, causal, scale)
    launch: Launch = launch_forward
    if cu_seqlens is None and not torch.are_deterministic_algorithms_enabled() and suits_hopper(q, k, v):
        launch = fastest((launch_forward, launch_hopper), q, longest, causal, args)
    out, lse = launch(*args)
    return out, lse


@torch.library.custom_op("course::flash_attention_backward", mutates_args=())
def flash_backward_operator(
    out_grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    cu_seqlens: torch.Tensor | None, longest: int, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return gradients of q, k, v, contiguous; the same bits each time if torch.use_deterministic_algorithms is on."""
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    args = (out_grad, q, k, v, out, lse, cu_seqlens, longest, causal, scale)
    launch: Launch = launch_backward
    if q.itemsize == 2 and not torch.are_deterministic_algorithms_enabled():
        launches = launch_one_pass, launch_backward
        launch = fastest(launches, q, longest, causal, args) if q.is_cuda else launch_one_pass
    q_grad, k_grad, v_grad = launch(*args)
    return q_grad, k_grad, v_grad


@flash_operator.register_fake
def _(q, k, v, cu_seqlens, longest, causal, scale):
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


@flash_backward_operator.register_fake
def _(out_grad, q, k, v, out, lse, cu_seqlens, longest, causal, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def save_attention(ctx, inputs, output) -> None:
    """Save the tensors that backward needs: no scores, one number per row."""
    q, k, v, cu_seqlens, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def attention_gradient(ctx, out_grad: torch.Tensor, _) -> tuple:
    """Return the gradients of q, k and v."""
    gradients = flash_backward_operator(out_grad, *ctx.saved_tensors, *ctx.settings)
    return *gradients, None, None, None, None


flash_operator.register_autograd(attention_gradient, setup_context=save_attention)


def check_for_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> float:
    """Return the scale, 1 / sqrt(d) if it is None. Raises ValueError for inputs that the kernels do not support."""
    check_attention(q, k, v, scale)
    if q.dtype not in FLASH_DTYPES or q.shape[-1] > LARGEST_HEAD:
        raise ValueError(
            f"q is {q.dtype} with heads of {q.shape[-1]}: flash_attention takes float32, bfloat16 or float16 and heads "
            f"of at most {LARGEST_HEAD}"
        )
    if max(q.shape[0], q.shape[2]) > MOST_PROGRAMS:
        raise ValueError(f"q is {list(q.shape)}: a GPU takes at most {MOST_PROGRAMS} sequences, and as many heads")
    return scale_or_default(scale, q.shape[-1])


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """Return softmax(scale q k^T) v, [b, s, a, d]. q: [b, s, a, d]; k, v: [b, s', kv, d], where kv divides a: query
    head i uses head i // (a / kv) of k and v.

    causal: query i sees keys 0 … i. scale: 1 / sqrt(d) if None. Sums are float32; float32 matmuls do not use TF32.
    Under autocast the result has its dtype. A query without keys gets 0. Raises ValueError for shapes, dtypes, devices
    or a scale that do not fit; for second derivatives PyTorch raises an error.
    """
    q, k, v = as_autocast(q, k, v)
    scale = check_for_kernel(q, k, v, scale)
    return flash_operator(q, k, v, None, max(q.shape[1], k.shape[1]), causal, scale)[0]


def use_flash_attention(model: nn.Module, attention=flash_attention) -> nn.Module:
    """Let every layer of a `Transformer` compute `attention`, in place; returns the model. Its parameters stay.

    Before apply_context_parallel, which takes FLASH_BLOCK instead, and before apply_recompute. An attention that
    another transform has replaced is left alone.
    """
    need_transformer(model, "use_flash_attention", "flash_attention(q, k, v) works in any model's attention")
    for module in model.modules():
        if isinstance(module, plain_model.Attention) and module.core is plain_model.causal_attention:
            module.core = attention
    return model


# exercise 13.9
def flash_block_forward(q, k, v, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [b, s, a, d] and lse [b, s, a] of a block, with the usual scale: `AttentionBlock.forward`.

    Queries and keys may differ in number. Raises ValueError as check_for_kernel.
    """
    scale = check_for_kernel(q, k, v, None)
    out, lse = flash_operator(q, k, v, None, max(q.shape[1], k.shape[1]), causal, scale)
    return out, lse.transpose(1, 2)


# exercise 13.9
def flash_block_backward(gradient, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of q, k, v through a block, with the out and lse of all blocks: `AttentionBlock.backward`.

    lse: [b, s, a]. Raises ValueError as check_for_kernel.
    """
    scale, longest = check_for_kernel(q, k, v, None), max(q.shape[1], k.shape[1])
    return flash_backward_operator(gradient, q, k, v, out, lse.transpose(1, 2), None, longest, causal, scale)


FLASH_BLOCK = AttentionBlock(flash_block_forward, flash_block_backward)


def check_lengths(q: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> None:
    """Raise ValueError if cu_seqlens cannot divide q's packed row. Its values are not read: the host would wait for the
    GPU.
    """
    rows = q.shape[0]
    if cu_seqlens.ndim != 1 or not 2 <= cu_seqlens.numel() <= MOST_PROGRAMS + 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}: expected int32 [sequences + 1], of at most "
            f"{MOST_PROGRAMS} sequences"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, q on {q.device}: expected one device")
    if not min(rows, 1) <= longest <= max(rows, 1):
        raise ValueError(f"max_seqlen is {longest}: expected 1 to {rows}, the tokens of all sequences")


def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute flash_attention within each of the sequences packed into one row: [t, a, d] for q [t, a, d] and k, v
    [t, kv, d].

    cu_seqlens: int32 [sequences + 1], on q's device: 0, then the end of each sequence, the last one t. max_seqlen: the
    length of the longest sequence, known on the host. A larger value costs some programs that end immediately; with a
    smaller one, rows beyond it are not written, and this is not checked. The arguments are the same
    as for flash_attn_varlen_func (Dao 2023).
    """
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: expected [t, a, d], [t, kv, d] twice"
        )
    check_lengths(q, cu_seqlens, max_seqlen)
    q, k, v = (x[None] for x in as_autocast(q, k, v))
    scale = check_for_kernel(q, k, v, scale)
    out, _ = flash_operator(q, k, v, cu_seqlens.contiguous(), max_seqlen, causal, scale)
    return out.squeeze(0)  # with out[0], autograd would copy the gradient


def lengths_to_cu_seqlens(lengths: list[int], device: torch.device | None = None) -> tuple[torch.Tensor, int]:
    """Return cu_seqlens and max_seqlen of sequences of these lengths, packed in this order."""
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return ends.to(device), max(lengths)


def packed_attention(cu_seqlens: torch.Tensor, max_seqlen: int) -> Callable[..., torch.Tensor]:
    """Return a function for `Attention.core` that attends within the documents packed into a row [1, t, ...].

    The function raises ValueError for a batch of more than one row.
    """

    def attend_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if q.shape[0] != 1:
            raise ValueError(f"q is {list(q.shape)}: expected one packed row, [1, t, a, d]")
        q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)  # with q[0], autograd would copy the gradient
        return flash_attention_varlen(q, k, v, cu_seqlens, max_seqlen)[None]

    return attend_packed


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the program's options. Exits with status 2 for an unknown or impossible option."""
    parser = single_gpu.training_parser(
        "flash_attention", "Train with FlashAttention; without a GPU its kernels are interpreted."
    )
    parser.add_argument(
        "--attention",
        default="flash",
        choices=list(ATTENTIONS),
        help="Triton kernels, tiles in PyTorch, or PyTorch's own attention",
    )
    if torch.cuda.is_available():
        parser.set_defaults(preset="SmolLM-135M", batch=4, seq=4096)
    else:  # the interpreter takes milliseconds per tile
        parser.set_defaults(preset="debug", steps=3, batch=2, seq=64)
    return single_gpu.parse(parser, argv)


ATTENTIONS = {
    "flash": flash_attention,
    "tiled": flash_attention_reference,
    "pytorch": plain_model.causal_attention,
}


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say; prints one line per step, writes the records where --out says, and returns them."""
    args = options(argv)
    return single_gpu.run(
        args,
        build=lambda config, seed: use_flash_attention(Transformer(config, seed), ATTENTIONS[args.attention]),
    )


if __name__ == "__main__":
    main()
