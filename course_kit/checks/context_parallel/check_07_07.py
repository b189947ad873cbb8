"""Check of exercise 07.7: a block of attention and its gradients against PyTorch's attention."""

from __future__ import annotations

import math

import torch

from course_kit.checks.context_parallel.trials import logsumexp
from course_kit.labs.context_parallel import full_attention, some_heads
from course_kit.labs.tensor_parallel.models import relative_error
from course_lib.context_parallel import blocks


def check() -> None:
    """Judge plain_forward and plain_backward."""
    for kv, causal in ((4, False), (2, True), (1, True)):
        judge_full(kv, causal)
    judge_far_rows()
    judge_equal_values()
    judge_bfloat16()
    judge_two_blocks()


def judge_full(kv: int, causal: bool) -> None:
    """Judge a single block of all queries and keys."""
    where = f"{kv} K/V heads, causal {causal}"
    q, k, v, gradient = some_heads(6, kv=kv)
    copies = [x.clone() for x in (q, k, v, gradient)]
    expected, *gradients = full_attention(q, k, v, gradient, causal)
    result = blocks.plain_forward(q, k, v, causal)
    assert result is not None and len(result) == 2, "plain_forward returns out and lse"
    assert relative_error(result[0], expected) < 1e-9, f"{where}: out is not PyTorch's attention"
    assert relative_error(result[1], logsumexp(q, k, causal)) < 1e-9, (
        f"{where}: lse [b, s, a] is not log sum exp of the scores"
    )
    got = blocks.plain_backward(gradient, q, k, v, *result, causal)
    for name, mine, right in zip("qkv", got, gradients, strict=True):
        assert relative_error(mine, right) < 1e-9, f"{where}: {wrong_gradient(name, mine, right)}"
    assert all(map(torch.equal, (q, k, v, gradient), copies)), "do not change the arguments"


def wrong_gradient(name: str, mine: torch.Tensor, right: torch.Tensor) -> str:
    """Return a message for a wrong gradient, with the factor if it is a multiple of the right one."""
    message = f"the gradient of {name} is not autograd's"
    if mine.shape != right.shape:
        return f"{message}: its shape is {list(mine.shape)}, not {list(right.shape)}"
    factor = ((mine * right).sum() / (right * right).sum()).item()
    if abs(factor) > 1e-6 and relative_error(mine, factor * right) < 1e-6:
        return f"{message}, but {factor:.4g} times it, everywhere. (Here √d is {math.sqrt(mine.shape[-1]):.4g}.)"
    return message


def judge_far_rows() -> None:
    """Judge scores below -200, whose exp is 0 in float32."""
    q, k, v, gradient = some_heads(6, dtype=torch.float32)
    q, k = torch.full_like(q, 10.0), torch.full_like(k, -10.0)
    expected, *_ = full_attention(q, k, v, gradient, True)
    far = relative_error(blocks.plain_forward(q, k, v, True)[0], expected)
    assert far < 1e-5, f"all scores are -283, whose exp is 0: out is {far:.3g} off. Take off the row's own largest"
    noise = some_heads(6, dtype=torch.float32)
    q, k = q + 0.1 * noise[0], k + 0.1 * noise[1]
    right = full_attention(q.double(), k.double(), v.double(), gradient.double(), True)
    out, lse = right[0].float(), logsumexp(q.double(), k.double(), True).float()
    for name, mine, expected in zip(
        "qkv", blocks.plain_backward(gradient, q, k, v, out, lse, True), right[1:], strict=True
    ):
        far = relative_error(mine.double(), expected)
        assert far < 1e-2, f"backward, scores near -283: the gradient of {name} is {far:.3g} off. p is e^(z - lse)"


def judge_equal_values() -> None:
    """Judge the dtypes of dP and D in BF16: where all keys have the same value, dP and D are equal."""
    q, k, v, gradient = some_heads(6, dtype=torch.bfloat16)
    v = v[:, :1].expand_as(v).contiguous()
    out = v.repeat_interleave(2, 2)  # whatever the weights are
    lse = logsumexp(q, k, False)
    for name, mine in zip("qk", blocks.plain_backward(gradient, q, k, v, out, lse, False), strict=False):
        rest = mine.abs().max().item()
        assert rest < 1e-4, (
            f"in BF16, all keys have the same value, so {name} gets no gradient; yours is {rest:.3g}: "
            "make dP and D in p's dtype, float32"
        )


def judge_bfloat16() -> None:
    """Judge dtypes and values in BF16."""
    q, k, v, gradient = some_heads(6, dtype=torch.bfloat16)
    q64, k64, v64, gradient64 = (x.double() for x in (q, k, v, gradient))
    expected = full_attention(q64, k64, v64, gradient64, True)
    out, lse = blocks.plain_forward(q, k, v, True)
    got = out, *blocks.plain_backward(gradient, q, k, v, out, lse, True)
    kinds = [str(x.dtype).removeprefix("torch.") for x in (*got, lse)]
    assert kinds == ["bfloat16"] * 4 + ["float32"], f"in BF16: out, three gradients and lse are {', '.join(kinds)}"
    for name, mine, right in zip(("out", "q's gradient", "k's", "v's"), got, expected, strict=True):
        error = relative_error(mine.double(), right)
        assert error < 0.02, f"in BF16, {name} is off by {error:.3f}"


def judge_two_blocks() -> None:
    """Judge two blocks of keys: their out and lse put together by the formula, and the gradients with the sum's lse."""
    q, k, v, gradient = some_heads(6, keys=10)
    expected, *gradients = full_attention(q, k, v, gradient, False)
    parts = slice(0, 3), slice(3, 10)
    result = [blocks.plain_forward(q, k[:, part], v[:, part], False) for part in parts]
    lse = torch.logaddexp(result[0][1], result[1][1])
    out = torch.stack([(part_lse - lse).exp()[..., None] * part for part, part_lse in result]).sum(0)
    assert relative_error(out, expected) < 1e-9, "two blocks of keys, merged: not the attention over all keys"
    first, second = (blocks.plain_backward(gradient, q, k[:, p], v[:, p], out, lse, False) for p in parts)
    sums = first[0] + second[0], torch.cat([first[1], second[1]], 1), torch.cat([first[2], second[2]], 1)
    for name, mine, right in zip("qkv", sums, gradients, strict=True):
        assert relative_error(mine, right) < 1e-9, (
            f"backward of two blocks, with the merged lse: {name}'s gradient is wrong"
        )
