"""Exact references for notebook 13 and its checks, and the notebook's measurements and lab."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import triton

from course_kit.checks import reference
from course_kit.gpu.ablations import undone
from course_kit.gpu.launches import record_launches
from course_kit.labs.kernels import device
from course_kit.typed import grad_of, world
from course_lib.context_parallel.attention import ring_attention
from course_lib.flash_attention import backward, forward, operator
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
    assert not nan, f"{case}: {nan} of {result.numel()} elements are NaN (-inf - -inf, 0 / 0, never written?){hint}"
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
