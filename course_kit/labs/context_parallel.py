"""Labs of notebook 07's second half: work by rank, saved bytes, timelines, PyTorch's versions, and cp with tp."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_kit.labs.sequence_parallel.memory import saved_bytes
from course_kit.labs.sequence_parallel.models import batch_of, full_gradients, split_model
from course_kit.labs.sequence_parallel.timeline import Clock, Span
from course_kit.labs.tensor_parallel.models import TINY, relative_error, sgd
from course_kit.typed import grad_of, world
from course_lib.context_parallel import blocks
from course_lib.context_parallel import model as context
from course_lib.context_parallel.blocks import FUSED_BLOCK, AttentionBlock, in_tokens, initial_out_lse
from course_lib.data_parallel.replicas import DataParallel, parallel_accumulate
from course_lib.sequence_parallel.model import gather_sequence
from course_lib.sequence_parallel.shards import chunks_of, from_order, shard_sequence
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss
from course_lib.single_gpu.profile import MemoryProfile
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy


def some_heads(
    seq: int, heads: int = 4, kv: int = 2, d: int = 8, keys: int | None = None, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Return q, k, v and a gradient of attention's output, [2, tokens, heads, d] each; keys: tokens of k and v."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(2, n, count, d) for n, count in ((seq, heads), (keys or seq, kv), (keys or seq, kv), (seq, heads))]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, ...]:
    """Return the output of PyTorch's attention, and the gradients of q, k and v; all [b, s, heads, d]."""
    tensors = [x.clone().requires_grad_() for x in (q, k, v)]
    q, k, v = (x.transpose(1, 2) for x in tensors)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
    return out.detach(), *torch.autograd.grad(out, tensors, gradient)


def scores_of(rank: int, n: int, order: str, seq: int, causal: bool = True) -> int:
    """Return the number of scores of a rank's queries."""
    chunks = chunks_of(rank, n, order)
    size = seq // n // len(chunks)
    rows = [i for c in chunks for i in range(c * size, (c + 1) * size)]
    return sum(row + 1 for row in rows) if causal else len(rows) * seq


def work_time(order: str, seq: int = 4096, heads: int = 4, kv: int = 2, d: int = 64, repeats: int = 3) -> float:
    """On a rank, while the others wait: milliseconds for all its blocks, forward and backward, in the best repeat."""
    torch.set_num_threads(1)
    rank, n = dist.get_rank(), dist.get_world_size()
    q, k, v = (torch.randn(1, seq // n, count, d) for count in (heads, kv, kv))
    local, taken = chunks_of(rank, n, order), []
    for turn in range(n):
        dist.barrier()
        if turn != rank:
            continue
        for _ in range(repeats):
            start = time.perf_counter()
            (out, lse), sums = initial_out_lse(q), [torch.zeros_like(x) for x in (q, k, v)]
            plans = [
                in_tokens(blocks.visible(local, chunks_of(source, n, order)), seq // n // len(local))
                for source in range(n)
            ]
            plans.sort(key=lambda plan: not plan or not plan[0].causal)  # this rank's own keys first
            for plan in plans:
                blocks.attend(q, k, v, plan, FUSED_BLOCK, out, lse)
            for plan in plans:
                blocks.attend_backward(q, q, k, v, out, lse, plan, FUSED_BLOCK, *sums)
            taken.append(time.perf_counter() - start)
    dist.barrier()
    return 1e3 * min(taken)


def saved_by_sequence_shard(
    group: dist.ProcessGroup,
    method: str = "ring",
    config: ModelConfig = PRESETS["small"],
    batch: int = 2,
    seq: int = 512,
) -> int:
    """On a rank: bytes that a forward of its tokens saves for backward."""
    model = context.apply_context_parallel(Transformer(config), group, method)
    inputs, targets = (shard_sequence(each, group) for each in batch_of(config, batch, seq))
    return saved_bytes(model, lambda: loss(model(inputs), targets))


def attention_peak(
    group: dist.ProcessGroup, method: str, seq: int = 2048, heads: int = 8, kv: int = 8, d: int = 64
) -> float:
    """On a rank: bytes at the peak of one forward and backward above q, k, v; in units of the full sequence's k."""
    q, k, v = (torch.randn(1, seq // group.size(), n, d, requires_grad=True) for n in (heads, kv, kv))
    with MemoryProfile(nn.Linear(1, 1)) as profile:
        out = context.METHODS[method](q, k, v, group)
        out.backward(torch.ones_like(out))
    return sum(profile.peak().values()) / (seq * kv * d * 4)


def timeline(
    method: str, seq: int = 2048, heads: int = 8, kv: int = 4, d: int = 64, repeats: int = 12
) -> list[tuple[float, list[Span]]]:
    """On a rank: some forwards of attention, as (milliseconds, spans) with the lanes "attention" and "network"."""
    torch.set_num_threads(1)
    group, runs = world(), []
    q, k, v = (torch.randn(1, seq // group.size(), n, d) for n in (heads, kv, kv))
    for _ in range(repeats):
        dist.barrier()
        with Clock() as clock:

            def forward(*tensors, clock=clock):
                start = clock.now()
                result = blocks.fused_forward(*tensors)
                clock.spans.append(("attention", "", start, clock.now()))
                return result

            context.METHODS[method](q, k, v, group, attention=AttentionBlock(forward, blocks.fused_backward))
        runs.append((clock.now(), clock.spans))
    return runs


def shortest(of_ranks: list[list[tuple[float, list[Span]]]]) -> list[list[Span]]:
    """Return the spans of each rank in the repeat whose slowest rank was the fastest."""
    indices = range(len(of_ranks[0]))
    best = min(indices, key=lambda number: max(runs[number][0] for runs in of_ranks))
    return [runs[best][1] for runs in of_ranks]


def torch_context_parallel() -> str:
    """On a rank: the answer of PyTorch's own context parallelism to causal attention on this device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v = (torch.randn(1, 4, 64, 16) for _ in range(3))
    sdpa = F.scaled_dot_product_attention
    try:
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            return f"runs: {list(F.scaled_dot_product_attention(q, k, v, is_causal=True).shape)}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
    finally:
        F.scaled_dot_product_attention = sdpa  # PyTorch 2.11 leaves its own function there


def gathered_sdpa(
    masks: dict[int, torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup,
    causal: bool,
    attention: AttentionBlock,
    order: str,
) -> torch.Tensor:
    """Return attention by an all-gather of k and v and PyTorch's attention, with a mask for each chunk of queries."""
    n, local = group.size(), chunks_of(group.rank(), group.size(), order)
    kv = from_order(gather_sequence(torch.cat([k, v]), group), n, order)  # autograd: g
    size, outs = q.shape[1] // len(local), []
    for index, chunk in enumerate(local):
        end = (chunk + 1) * size
        queries, keys, values = (
            x.transpose(1, 2) for x in (q[:, index * size :][:, :size], *(x[:, :end] for x in kv.chunk(2)))
        )
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=masks[end], enable_gqa=True)
        outs.append(out.transpose(1, 2))
    return torch.cat(outs, 1)


def compare_with_torch(
    group: dist.ProcessGroup,
    seq: int,
    order: str = "zigzag",
    heads: int = 8,
    kv: int = 4,
    d: int = 64,
    repeats: int = 4,
) -> tuple[dict[str, np.ndarray], float]:
    """On a rank: seconds of forward and backward by method and repeat, and the largest difference from PyTorch's."""
    local = chunks_of(group.rank(), group.size(), order)
    size = seq // group.size() // len(local)
    ends = [(chunk + 1) * size for chunk in local]
    masks = {end: torch.ones(size, end, dtype=torch.bool).tril(end - size) for end in ends}  # True: visible
    rivals = dict.fromkeys(("PyTorch", "PyTorch again"), functools.partial(gathered_sdpa, masks))
    functions: dict[str, Callable] = context.METHODS | rivals
    q, k, v = (torch.randn(1, seq // group.size(), n, d) for n in (heads, kv, kv))
    times: list[list[float]] = []
    results: dict[str, tuple[torch.Tensor, ...]] = {}
    for _ in range(repeats + 1):
        times.append([])
        for name, function in functions.items():
            tensors = [x.clone().requires_grad_() for x in (q, k, v)]
            dist.barrier(group)
            start = time.perf_counter()
            out = function(*tensors, group, True, FUSED_BLOCK, order)
            out.backward(torch.ones_like(out))
            dist.barrier(group)
            times[-1].append(time.perf_counter() - start)
            results[name] = out.detach(), *map(grad_of, tensors)
    pairs = [pair for name in context.METHODS for pair in zip(results[name], results["PyTorch"], strict=True)]
    worst = max(relative_error(ours, theirs) for ours, theirs in pairs)
    return dict(zip(functions, np.array(times[1:]).T, strict=True)), worst


def together_trial(config: ModelConfig = TINY, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """On one of 4 ranks, cp 2 and tp 2 with sequence parallelism: losses, and the first step's gradients, gathered."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = mesh["cp"].get_group(), mesh["tp"].get_group()
    model = split_model(config, tp, reduce_group=dist.group.WORLD)
    context.apply_context_parallel(model, cp)
    dp = DataParallel(model, cp)
    optimizer, losses = sgd(model.parameters()), []
    gradients: dict[str, torch.Tensor] = {}
    inputs, targets = (shard_sequence(each, cp) for each in batch_of(config))

    def summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(logits, targets, tp, config.vocab, "sum")

    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(parallel_accumulate(dp, [(inputs, targets)], loss_of=summed).item())
        gradients = gradients or full_gradients(model)
        optimizer.step()
    return losses, gradients
