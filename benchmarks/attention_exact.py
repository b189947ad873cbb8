"""Attention and its gradients in the next wider dtype, head by head: the reference for the columns of attention.py.

For bfloat16 in float32, for float32 in float64: by plain PyTorch, with all scores of a head in memory.
"""

import torch
from kernel_runs import WIDER, draw_gradients


def exact_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_grad: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, ...]:
    """Return out and the gradients of q, k, v: all [s, d]."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.softmax(scores, -1) @ v
    return out.detach(), *torch.autograd.grad(out, (q, k, v), out_grad)


def exact(lengths: list[int], causal: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Return out, and, if q requires a gradient, the gradients of q, k and v, for the output gradient that all methods
    get.

    q: [b, s, a, d]; k, v: [b, s, kv, d]; their rows, in order, are sequences of these lengths.
    """
    needs_gradient, shape, wider = q.requires_grad, q.shape[:2], WIDER[q.dtype]
    (gradient,) = draw_gradients((q,))
    q, k, v, gradient = (x.detach().flatten(0, 1).to(wider) for x in (q, k, v, gradient))  # [tokens, heads, d]
    results = [torch.zeros_like(x) for x in (q, q, k, v)]
    group, start = q.shape[1] // k.shape[1], 0
    for length in lengths:
        rows = slice(start, start + length)
        for head in range(q.shape[1]):
            inputs = q[rows, head], k[rows, head // group], v[rows, head // group], gradient[rows, head]
            out, q_grad, k_grad, v_grad = exact_head(*inputs, causal)
            results[0][rows, head] = out
            results[1][rows, head] = q_grad
            results[2][rows, head // group] += k_grad
            results[3][rows, head // group] += v_grad
        start += length
    return [each.unflatten(0, shape) for each in (results if needs_gradient else results[:1])]
