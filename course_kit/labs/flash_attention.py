"""Exact references for notebook 13 and its checks, and the notebook's measurements and lab."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton

from course_kit.checks import reference
from course_kit.gpu import attention_traffic as formulas
from course_kit.gpu.ablations import undone
from course_kit.gpu.attention_launches import count, first_launch, forward_launch, standard_bytes
from course_kit.gpu.launches import record_launches
from course_kit.labs.kernels import device
from course_kit.labs.recorded import recorded_on
from course_kit.typed import grad_of, world
from course_lib.context_parallel.attention import ring_attention
from course_lib.flash_attention import backward, flash_attention_reference, forward, operator, tiles
from course_lib.kernels.gpus import GPU
from course_lib.kernels.roofline import roofline_of
from course_lib.kernels.sectors import SECTOR_BYTES
from course_lib.sequence_parallel.shards import zigzag_shard
from course_lib.single_gpu import model as plain_model
from course_lib.single_gpu.profile import MemoryProfile

Attention = Callable[..., torch.Tensor]
KERNEL_EXERCISES = ("13.5", "13.6", "13.7", "13.8")  # whose answers the kernels call


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [b, s, a, d] and lse [b, s, a] in float64, from all scores at once.

    The notebook compares everything with them. q: [b, s, a, d]; k, v: [b, s', kv, d].
    """
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    z = scale * q @ k.mT
    if causal:
        z = z.masked_fill(torch.ones_like(z[0, 0], dtype=torch.bool).triu(1), -math.inf)
    return (z.softmax(-1) @ v).transpose(1, 2), z.logsumexp(-1).transpose(1, 2)


def exact_gradients(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v in float64. gradient: out's, [b, s, a, d]."""
    leaves = q, k, v = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(exact_attention(q, k, v, causal, scale)[0], leaves, gradient.double())


def exact_results(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> list[torch.Tensor]:
    """Return out and the gradients of q, k and v in float64."""
    return [exact_attention(q, k, v, causal, scale)[0], *exact_gradients(gradient, q, k, v, causal, scale)]


def assert_close(result: torch.Tensor, wanted: torch.Tensor, case: str, factor: float = 4, hint: str = "") -> None:
    """Assert that `result` equals `wanted` (float64), up to `factor` roundings of the size of the largest element.

    float32 gets 16 times as many: the sums are in float32 as well, and a score of 50 in an exponential amplifies its
    rounding 50 times. hint: a question for the learner, appended to the message.
    """
    assert result.shape == wanted.shape, f"{case}: shape {list(result.shape)} instead of {list(wanted.shape)}"
    nan = int(result.isnan().sum())
    hint = f". {hint}" if hint else ""
    causes = "-inf - -inf, 0 / 0, never written, loaded without `other`?"
    assert not nan, f"{case}: {nan} of {result.numel()} elements are NaN ({causes}){hint}"
    eps = torch.finfo(result.dtype).eps * (16 if result.dtype == torch.float32 else 1)
    allowed = factor * eps * wanted.abs().max().item()
    wrong = ((result.double() - wanted).abs() > allowed).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{case}: {len(wrong)} of {result.numel()} elements are wrong, the first at {list(first)}: "
            f"{result[first].item():.5g} instead of {wanted[first].item():.5g}{hint}"
        )


def error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the root mean square of the error, relative to the values' root mean square."""
    return ((result.double() - wanted).square().mean() / wanted.square().mean()).sqrt().item()


def errors_in_tiles(dtype: torch.dtype, shapes: int = 20) -> list[tuple[int, float, float]]:
    """Return tokens, the error of attention in tiles and that of PyTorch's attention, for random shapes."""
    generator, errors = torch.Generator().manual_seed(0), []
    for _ in range(shapes):
        s, heads = (int(torch.randint(*bounds, (1,), generator=generator)) for bounds in ((32, 300), (1, 4)))
        q, k, v = (torch.randn(1, s, heads, 32, generator=generator).to(dtype) for _ in range(3))
        wanted, _ = exact_attention(q, k, v, True, 32**-0.5)
        mine, theirs = flash_attention_reference(q, k, v), plain_model.causal_attention(q, k, v)
        errors.append((s, error(mine, wanted), error(theirs, wanted)))
    return errors


def saved_bytes(way: Attention, *inputs: torch.Tensor) -> int:
    """Return the bytes that autograd saves for the backward of way(*inputs), each storage once."""
    storages: dict[int, int] = {}

    def save(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        way(*inputs)
    return sum(storages.values())


def forward_and_backward(
    way: Attention, s: int, heads: int = 2, head_dim: int = 64, repeats: int = 2
) -> tuple[float, float]:
    """Return seconds (the minimum of some repeats) and peak MiB of a forward and backward over s tokens."""
    on = device()
    q, k, v = (torch.randn(1, s, heads, head_dim, device=on, requires_grad=True) for _ in range(3))
    with MemoryProfile(torch.nn.Linear(1, 1, bias=False, device=on)) as profile:
        way(q, k, v).sum().backward()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        way(q, k, v).sum().backward()
        if on.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times, default=math.nan), sum(profile.peak().values()) / 2**20


def kernel_curve(way: Attention, lengths: Sequence[int]) -> list[tuple[float, float]]:
    """Return seconds and peak MiB of the kernels by length. Interpreted, a time says nothing and long sequences take
    long: the first two lengths have memory alone, the others NaN.
    """
    if device().type != "cpu":
        return [forward_and_backward(way, s) for s in lengths]
    short = [forward_and_backward(way, s, repeats=0) for s in lengths[:2]]
    return short + [(math.nan, math.nan)] * (len(lengths) - 2)


def growth(curves: Mapping[str, Sequence[tuple[float, float]]], lengths: Sequence[int]) -> str:
    """Return the factor by which peak memory grows from half of the last length to the last, for each curve."""
    half = lengths.index(lengths[-1] // 2)
    return ", ".join(f"{curve[-1][1] / curve[half][1]:.1f} ({name})" for name, curve in curves.items())


def error_table(
    ways: Mapping[str, Attention], curves: Mapping[str, Sequence[tuple[float, float]]], tokens: int, heads: int = 2
) -> str:
    """Return ms and MiB of the last point of each way's curve, and its error on random q, k and v, as a table."""
    q, k, v = (torch.randn(1, tokens, heads, 64, device=device()) for _ in range(3))
    exact = exact_attention(q, k, v, True, 64**-0.5)[0]
    lines = [f"{f'{tokens:,} tokens, {heads} heads of 64, causal':36s}{'ms':>8s}{'MiB':>8s}{'error':>10s}"]
    for name, way in ways.items():
        seconds, peak = curves[name][-1]
        lines.append(f"{name:36s}{seconds * 1e3:8.1f}{peak:8.2f}{error(way(q, k, v), exact):10.1e}")
    return "\n".join(lines)


Steps = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def three_steps(model: torch.nn.Module, tokens: torch.Tensor) -> Steps:
    """Return the losses of three steps of AdamW, the gradients of the first step, and the weights after the last
    one.
    """
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4), []
    first: dict[str, torch.Tensor] = {}
    for _ in range(3):
        optimizer.zero_grad()
        step_loss = plain_model.loss(model(tokens[:, :-1]), tokens[:, 1:])
        step_loss.backward()
        first = first or {name: grad_of(p).clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(step_loss.item())
    return losses, first, {name: p.detach().clone() for name, p in model.named_parameters()}


def furthest(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to its tensor's largest element."""
    return max(((mine[name] - x).abs().max() / x.abs().max()).item() for name, x in theirs.items())


def ring_on_rank(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor], list[str]]:
    """Return out and gradients of this rank's shard of causal ring attention, and the kernels that it launched."""
    q, k, v, gradient = (zigzag_shard(x, world()) for x in (q, k, v, gradient))
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    with record_launches() as launches:
        out = ring_attention(q, k, v, world(), True, operator.FLASH_BLOCK)
        out.backward(gradient)
    return out.detach(), [grad_of(x) for x in (q, k, v)], [launch.name for launch in launches]


def unzigzag(shards: list[torch.Tensor]) -> torch.Tensor:
    """Return the full sequence of two zig-zag ranks: rank 0 has chunks 0 and 3, rank 1 has chunks 1 and 2."""
    (first, last), (second, third) = (x.chunk(2, 1) for x in shards)
    return torch.cat([first, second, third, last], 1)


@contextlib.contextmanager
def reference_kernels() -> Iterator[None]:
    """Have the kernels call the reference inside the context, whatever answers have passed."""
    with contextlib.ExitStack() as stack:
        for exercise in KERNEL_EXERCISES:
            stack.enter_context(reference(exercise))
        yield


def finished_kernels(changes: dict[str, dict[str, str]]) -> dict[str, triton.runtime.KernelInterface]:
    """Return forward kernels with some lines changed, which call the reference, whatever answers have passed.

    changes: by a kernel's name, parts of its source and their replacements, as `course_kit.gpu.ablations.undone` takes
    them.
    """
    with reference_kernels():
        return {name: undone(forward.flash_forward_kernel, replaced) for name, replaced in changes.items()}


# Traffic and tiles.


def attention_versions(gpu: GPU, s: int = 4096, heads: int = 16) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes that versions of a causal forward move (heads of 128, BF16), and the share of the peak that each
    can reach, by the roofline.
    """
    shape = formulas.AttentionShape(1, s, s, heads, heads, 128)
    traffic = {
        "standard, scores in memory": formulas.standard_traffic(shape),
        "keys outside": formulas.first_traffic(shape),
        "queries outside": formulas.flash_traffic(shape, 128, 64, True),
        "queries outside, k and v from L2": formulas.least_traffic(shape),
    }
    flops, roof = tiles.flops_forward(1, s, s, heads, 128, causal=True), roofline_of(gpu)
    return traffic, {name: roof.attainable(flops / size) / roof.peak_flops for name, size in traffic.items()}


@dataclass(frozen=True)
class Traffic:
    """Bytes of a forward of one head of 64 in BF16: by formula for each of `sizes`, and counted for some of them."""

    sizes: list[int]
    by_formula: dict[str, list[float]]
    counted: dict[str, dict[int, float]]
    least: list[float]  # with k and v from the L2 cache

    def table(self) -> str:
        """Return formulas and counts side by side, where both are known."""
        lines = [f"{'one head of 64, bfloat16':28s}{'tokens':>7s}{'formula':>11s}{'counted':>11s}  bytes"]
        for name, counts in self.counted.items():
            for s, size in counts.items():
                formula = self.by_formula[name][self.sizes.index(s)]
                lines.append(f"{name:28s}{s:7,}{formula:11,.0f}{size:11,}")
        return "\n".join(lines)


def forward_traffic(kernel: triton.runtime.KernelInterface, counted_at: Sequence[int] = (128, 256)) -> Traffic:
    """Return the traffic of the standard way and of both orders of loops, for 128 to 4,096 tokens.

    kernel: the finished forward kernel, whose launches are counted; the first order is counted where kernels are
    interpreted.
    """
    sizes = [128 * 2**i for i in range(6)]
    shapes = [formulas.AttentionShape(1, s, s, 1, 1, 64) for s in sizes]
    ways: dict[str, tuple[Callable[..., float], Callable[[int], float] | None]] = {
        "standard": (formulas.standard_traffic, standard_bytes),
        "keys outside, 64 x 64": (
            formulas.first_traffic,
            (lambda s: SECTOR_BYTES * count(first_launch(s)).sectors()) if triton.knobs.runtime.interpret else None,
        ),
        "queries outside, 128 x 64": (
            lambda shape: formulas.flash_traffic(shape, 128, 64, True),
            lambda s: SECTOR_BYTES * count(forward_launch(kernel, s)).sectors(),
        ),
    }
    return Traffic(
        sizes,
        {name: [formula(shape) for shape in shapes] for name, (formula, _) in ways.items()},
        {name: {s: counter(s) for s in counted_at} for name, (_, counter) in ways.items() if counter},
        [formulas.least_traffic(shape) for shape in shapes],
    )


def mask_shares(mask: Callable[..., torch.Tensor], tokens: int = 256, block: int = 32) -> np.ndarray:
    """Return the share of the pairs in each tile that a mask of FlexAttention sees: [tokens / block, tokens / block].

    Asserts that FlexAttention finds as many full and partial tiles. mask: of batch, head, query and key.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    index, side = torch.arange(tokens), tokens // block
    shares = mask(0, 0, index[:, None], index[None, :]).view(side, block, side, block).float().mean((1, 3))
    blocks = create_block_mask(mask, 1, 1, tokens, tokens, device="cpu", BLOCK_SIZE=block)
    assert blocks.full_kv_num_blocks is not None
    assert int(blocks.full_kv_num_blocks.sum()) == int((shares == 1).sum())
    assert int(blocks.kv_num_blocks.sum()) == int(((shares > 0) & (shares < 1)).sum())
    return shares.numpy()


def recorded_times(record: Mapping[str, Any]) -> str:
    """Return the milliseconds of a record of attention as a table: a row per size and pass, a column per kernel."""
    kernels = ("flash", "flex", "cuDNN", "ours", "math")
    lines = [f"{recorded_on(record)}; sequences x tokens, head size; BF16; ms"]
    lines.append(" " * 35 + "".join(f"{name:>8s}" for name in kernels))
    for row in record["rows"]:
        if row["pass"] != "peak":
            times = (f"{row['ms'][name]:8.2f}" if name in row["ms"] else f"{'–':>8s}" for name in kernels)
            lines.append(f"{row['size']:25s} {row['pass']:9s}" + "".join(times))
    return "\n".join(lines)


# The lab: four faults of the reference.

DIAGONAL = "tl.minimum(keys, first_query + 1) // BLOCK_K"
Fault = list[tuple[object, str, dict[str, str]]]  # module, kernel, changes in its source
FAULTS: dict[str, Fault] = {
    "r": [(forward, "flash_forward_kernel", {"v_tile, weighted * shrink[:, None])": "v_tile, weighted)"})],
    "m": [(forward, "flash_forward_kernel", {DIAGONAL: "tl.minimum(keys, first_query + BLOCK_K) // BLOCK_K"})],
    "d": [
        (backward, "query_gradient_kernel", {"(p_grad - delta[:, None])": "p_grad"}),
        (backward, "key_gradient_kernel", {"(p_grad - delta[None, :])": "p_grad"}),
    ],
    "g": [(backward, "key_gradient_kernel", {"(kv_head + 1) * group)": "kv_head * group + 1)"})],
}
LAB_ORDER = random.Random(13).sample(list(FAULTS), len(FAULTS))  # the letters of kernels 1 to 4


def planted(faults: Fault) -> contextlib.ExitStack:
    """Return a context in which the kernels have these faults, in tiles of 64 queries and 32 keys."""
    patches = contextlib.ExitStack()
    for module, name, changes in faults:
        kernel = undone(getattr(module, name), changes)
        tile = triton.Config({"BLOCK_Q": 64, "BLOCK_K": 32}, num_warps=4, num_stages=2)
        patches.enter_context(mock.patch.object(module, name, triton.autotune([tile], key=[])(kernel)))
    return patches


def error_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, exact: list[torch.Tensor]
) -> torch.Tensor:
    """Return errors of out, dq (two heads each), dk and dv by 16 tokens: [6, s / 16].

    Errors are relative to the largest element. exact: out and the gradients of q, k and v.
    """
    out, lse = forward.launch_forward(q, k, v, None, q.shape[1], True, 0.25)
    gradients = backward.launch_backward(gradient, q, k, v, out, lse, None, q.shape[1], True, 0.25)
    rows = []
    for mine, wanted in zip([out, *gradients], exact, strict=True):
        off = (mine.cpu().double() - wanted.cpu()).abs() / wanted.abs().max().cpu()  # [1, s, heads, d]
        rows += list(off[0].unflatten(0, (-1, 16)).amax((1, 3)).T)
    return torch.stack(rows)


def lab_errors() -> list[torch.Tensor]:
    """Return `error_rows` of the lab's four faulty kernels, in the order of LAB_ORDER."""
    generator = torch.Generator().manual_seed(13)
    q, k, v, gradient = (torch.randn(1, 192, a, 16, generator=generator).to(device()) for a in (2, 1, 1, 2))
    exact = exact_results(gradient, q, k, v, True, 0.25)
    errors = []
    with reference_kernels():
        for letter in LAB_ORDER:
            with planted(FAULTS[letter]):
                errors.append(error_rows(q, k, v, gradient, exact))
    return errors
