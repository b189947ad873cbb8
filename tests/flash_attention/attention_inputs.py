"""What test modules of attention share: shapes, inputs, float64's attention, PyTorch's own."""

import math
import random
from typing import NamedTuple

import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("out", "dq", "dk", "dv")


class Case(NamedTuple):
    b: int = 2
    s_q: int = 37
    s_k: int = 37
    heads: int = 2
    kv_heads: int = 1
    d: int = 16
    causal: bool = True
    scale: float | None = None


def random_cases(count: int) -> list[Case]:
    """Lengths that no block divides, more queries than keys and fewer, GQA, scales; the same on every run."""
    choose, cases = random.Random(13), []
    for _ in range(count):
        s_q, kv_heads = choose.choice([choose.randint(1, 16), choose.randint(17, 100)]), choose.choice([1, 2])
        s_k = s_q if choose.random() < 0.4 else choose.randint(1, 100)
        group = choose.choice([1, 2, 3] if kv_heads == 1 else [1, 2])
        sizes = choose.choice([1, 1, 1, 2]), s_q, s_k, group * kv_heads, kv_heads
        cases.append(
            Case(*sizes, choose.choice([16, 24, 64, 96, 128]), choose.random() < 0.5, choose.choice([None, 0.3]))
        )
    return cases


def inputs(case: Case, dtype=torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """The gradient of out, q, k, v."""
    generator = torch.Generator().manual_seed(seed)
    of_q, of_k = (case.b, case.s_q, case.heads, case.d), (case.b, case.s_k, case.kv_heads, case.d)
    shapes = of_q, of_q, of_k, of_k
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes]


def plain_scores(q, k, case: Case):
    """All scores at once: [b, a, s, s']."""
    k = k.repeat_interleave(case.heads // case.kv_heads, 2)
    scale = 1 / math.sqrt(case.d) if case.scale is None else case.scale
    z = torch.einsum("bqad,bkad->baqk", q, k) * scale
    hidden = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).triu(1)
    return z.masked_fill(hidden, -math.inf) if case.causal else z


def plain(q, k, v, case: Case):
    values = v.repeat_interleave(case.heads // case.kv_heads, 2)
    return torch.einsum("baqk,bkad->bqad", plain_scores(q, k, case).softmax(-1), values)


def pytorchs(q, k, v, case: Case):
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    attention = F.scaled_dot_product_attention(*by_head, is_causal=case.causal, scale=case.scale, enable_gqa=True)
    return attention.transpose(1, 2)


def run(attention, given, case: Case) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv."""
    gradient, *leaves = given
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attention(*leaves, case)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient)


def exact(given, case: Case) -> tuple[torch.Tensor, ...]:
    return run(plain, [x.double() for x in given], case)


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()
