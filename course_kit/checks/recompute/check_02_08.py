"""Check of exercise 02.8: `accumulate`, the gradient of the mean over all target tokens."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from course_kit.labs.recompute.gradients import full_batch, micro_batches, relative_difference, uneven
from course_kit.typed import grad_of, transformer_blocks
from course_lib.recompute import modes
from course_lib.recompute.modes import IGNORED
from course_lib.single_gpu.model import ModelConfig, Transformer


def check() -> None:
    """Assert gradients and losses of uneven batches, one micro-batch at a time, every argument, and no host read."""
    probe = Transformer(ModelConfig(2, 64, 4, 2, 96, 256))
    for lengths, size in (([24, 3, 11, 1, 24], 2), ([24] * 5, 1), ([24, 5, 0, 0, 7, 2], 2)):
        inputs, targets = uneven(len(lengths), 24, lengths)
        expected, mine = check_batch(probe, inputs, targets, lengths, size)
    before = [g.clone() for g in mine]
    modes.accumulate(probe, [(inputs, targets)])
    assert relative_difference([2 * g for g in before], [grad_of(p) for p in probe.parameters()]) < 1e-5, (
        "add to .grad, do not replace it"
    )
    nothing = modes.accumulate(probe, [uneven(2, 24, [0, 0])])
    assert nothing == 0, "no target at all: the loss is 0, not nan; divide by clamp(min=1)"
    half = modes.accumulate(probe, [(inputs, targets)], tokens=2 * (targets != IGNORED).sum())
    assert abs(half.item() - expected.item() / 2) < 1e-5, "divide by `tokens` where it is given"
    triple = modes.accumulate(probe, [(inputs, targets)], loss_of=lambda *of: 3 * modes.summed_loss(*of))
    assert abs(triple.item() - 3 * expected.item()) < 1e-5, "the loss is `loss_of`'s, where one is given"
    dtypes = []
    hook = cast(Any, transformer_blocks(probe)[0].mlp).up_proj.register_forward_hook(
        lambda module, args, out: dtypes.append(out.dtype)
    )
    mixed = modes.accumulate(probe, [(inputs, targets)], torch.bfloat16)
    hook.remove()
    assert dtypes == [torch.bfloat16], "run the model under autocast, in the precision `dtype`"
    assert mixed.dtype == torch.float32, "the loss is computed in float32: logits.float()"
    with FakeTensorMode(allow_non_fake_inputs=True):  # has shapes alone: reading a value fails
        fake = (Transformer(ModelConfig(1, 64, 4, 2, 96, 256)), [(torch.zeros(2, 8).long(), torch.zeros(2, 8).long())])
        try:
            modes.accumulate(*fake)
        except DataDependentOutputException:
            raise AssertionError("a value is read on the host: no .item(), float(), bool() or `if tensor`") from None
    assert modes.accumulate(probe, iter([(inputs, targets)])) > 0, (
        "given a generator it learns nothing: that can be walked once, so the first line of the function makes a list"
    )


def check_batch(
    probe: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, lengths: list[int], size: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Assert loss and gradients of a batch against all rows at once, and that one micro-batch is alive at a time.

    Returns the expected loss, and the gradients of the answer.
    """
    expected, full = full_batch(probe, inputs, targets)
    probe.zero_grad()
    calls: list[int] = []
    inputs_alive: list[weakref.ref] = []

    def note(module, args, out):  # of a layer whose input autograd keeps until backward
        calls.append(len(args[0]))
        assert not any(activation() is not None for activation in inputs_alive), (
            "activations of an earlier micro-batch are still there: backward at once, keep no loss with its graph"
        )
        inputs_alive.append(weakref.ref(args[0].untyped_storage()))

    hook = cast(Any, transformer_blocks(probe)[0].mlp).down_proj.register_forward_hook(note)
    got = modes.accumulate(probe, micro_batches(inputs, targets, size))
    hook.remove()
    mine = [grad_of(p) for p in probe.parameters()]
    assert max(calls) <= size, f"the model was called with {max(calls)} sequences at once; a micro-batch has {size}"
    assert all(torch.isfinite(g).all() for g in mine), "a gradient is not finite: a micro-batch without a target?"
    assert relative_difference(full, mine) < 1e-5, (
        f"{lengths} targets per row, {size} rows per micro-batch: gradient {relative_difference(full, mine):.1%} off. "
        "Weigh by tokens"
    )
    assert isinstance(got, torch.Tensor) and not got.requires_grad, "return the loss as a detached tensor"
    assert abs(got.item() - expected.item()) < 1e-5, f"the mean loss is {expected:.4f}, you return {got:.4f}"
    return expected, mine
