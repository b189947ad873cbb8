"""Check of exercise 01.11: `evaluate` takes constant memory and leaves the model unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from course_kit.labs.single_gpu import text_tokens, this_device
from course_lib.single_gpu import training
from course_lib.single_gpu.data import TokenBatches
from course_lib.single_gpu.model import PRESETS, Transformer, loss
from course_lib.single_gpu.profile import MemoryProfile

MiB = 2**20


class HostReads(TorchDispatchMode):
    """Counts how often a tensor's value is read on the host: each time, a GPU must finish its work first."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def state(model: nn.Module) -> dict[str, object]:
    """Return the state that an evaluation must not change."""
    return {
        "the mode of each module": [module.training for module in model.modules()],
        "which parameters require a gradient": [p.requires_grad for p in model.parameters()],
        "the gradients": [None if p.grad is None else p.grad.sum().item() for p in model.parameters()],
        "PyTorch's grad mode": torch.is_grad_enabled(),
    }


def trial(
    model: nn.Module, count: int, batches: Iterator, grad_mode: bool = True
) -> tuple[torch.Tensor | None, int, int]:
    """Return the result of an evaluation, its reads on the host, and the bytes at its peak. Assert that the model, its
    gradients and PyTorch's grad mode are as before.
    """
    with torch.set_grad_enabled(grad_mode):
        before, result = state(model), None
        with MemoryProfile(model) as profile, HostReads() as reads, contextlib.suppress(EOFError):
            result = training.evaluate(model, batches, count)
        changed = [name for name, value in state(model).items() if value != before[name]]
    assert not changed, (
        f"{' and '.join(changed)}: not as before the call. An evaluation needs no backward; use no_grad as a context; "
        "what you change, put back as it was, also after an error"
    )
    return result, reads.count, sum(profile.peak().values())


def some_batches(seed: int = 0) -> TokenBatches:
    """Return batches of 2 x 64 tokens of the corpus."""
    return TokenBatches(text_tokens(9_999), batch=2, seq=64, seed=seed)


def ends_early() -> Iterator:
    """Give one batch, and then raise an error."""
    yield next(some_batches())
    raise EOFError


def odd_model() -> Transformer:
    """Return a small model with one gradient, one frozen parameter and one block in evaluation mode."""
    model = Transformer(PRESETS["debug"]).to(this_device())
    first, *_, last = model.parameters()
    first.grad = torch.ones_like(first)
    last.requires_grad_(False)
    model.blocks[0].eval()
    return model


def check_bf16(model: nn.Module) -> None:
    """Assert the mean over 5 batches of a model in BF16, whose losses are in float32."""
    device = next(model.parameters()).device
    with torch.no_grad():
        drawn = zip(range(5), some_batches(seed=2), strict=False)
        losses = [loss(model(inputs.to(device)), targets.to(device)).item() for _, (inputs, targets) in drawn]
    result = training.evaluate(model, some_batches(seed=2), 5)
    assert result.dtype == torch.float32 and abs(result.item() - sum(losses) / 5) < 1e-4, (
        f"a model in BF16: the mean loss is {sum(losses) / 5:.5f}, in float32; you return {result.item():.5f} in "
        f"{result.dtype}: add up losses as they are, in float32"
    )


def check() -> None:
    """Assert the mean over 1 and 3 batches, no reads, no graph, the same memory for both, and that all stays as it was,
    with gradients switched off and after an error too; and the mean of a model in BF16.
    """
    tiny, tops = odd_model(), []
    first = next(tiny.parameters())
    with torch.no_grad():
        again = zip(range(3), some_batches(seed=1), strict=False)
        losses = [
            loss(tiny(inputs.to(first.device)), targets.to(first.device)).item() for _, (inputs, targets) in again
        ]
    for count in (1, 3):
        batches = some_batches(seed=1)
        result, reads, top = trial(tiny, count, batches)
        tops.append(top - first.nbytes - sum(p.nbytes for p in tiny.parameters()))
        assert batches.position == 2 * count, f"{count} batches of 2 should be drawn, you drew {batches.position // 2}"
        assert isinstance(result, torch.Tensor) and not reads, (
            "return a tensor, and read no value on the way: .item() in the loop makes a GPU wait for every batch"
        )
        expected = sum(losses[:count]) / count
        assert abs(result.item() - expected) < 1e-4, (
            f"the mean over {count} batches is {expected:.4f}, got {result:.4f}"
        )
        assert not result.requires_grad, "the result still holds a graph"
    assert tops[1] < 1.05 * tops[0], (
        f"1 batch needs {tops[0] / MiB:.1f} MiB beside the parameters, 3 batches {tops[1] / MiB:.1f}: what of a batch "
        "is still alive when the next one comes? Its graph, or its logits?"
    )
    check_bf16(Transformer(PRESETS["debug"]).to(this_device()).bfloat16())
    trial(tiny, 1, some_batches(), grad_mode=False)
    trial(tiny, 2, ends_early())
