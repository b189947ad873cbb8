"""Check of exercise 02.4: `apply_recompute`, three modes and a policy."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from course_kit.labs.recompute.gradients import gradients_of
from course_kit.labs.recompute.measures import plain_core, with_core
from course_kit.typed import transformer_blocks
from course_lib.recompute import modes
from course_lib.recompute.modes import aten, retained_bytes
from course_lib.single_gpu.memory import activation_bytes
from course_lib.single_gpu.model import ModelConfig, Transformer, causal_attention, loss

CONFIG = ModelConfig(3, 96, 6, 2, 100, 300, dropout=0.1)


def check() -> None:
    """Assert gradients, names, bytes kept and what is wrapped, in each mode, with a flash core and a plain one."""
    tokens = torch.randint(300, (2, 3, 41), generator=torch.Generator().manual_seed(0))
    for core in (causal_attention, plain_core):
        check_modes(with_core(Transformer(CONFIG), core).train(), core, tokens)


def check_modes(probe: nn.Module, core: Callable, tokens: torch.Tensor) -> None:
    """Assert all of it for a model whose blocks have this attention core."""
    saved, grads, flash = {}, {}, core is not plain_core
    for mode in ("none", "selective", "selective", "full", "none"):
        assert modes.apply_recompute(probe, mode) is probe, "return the model that was changed"
        names = list(probe.state_dict())
        assert names == list(Transformer(CONFIG).state_dict()), f"{mode}: names of parameters must not change"
        if mode != "selective":
            assert transformer_blocks(probe)[0].attention.core is core, f"{mode} must take off what selective put on"
        _, grads[mode] = gradients_of(probe, *tokens)
        for name in grads[mode]:
            assert torch.equal(grads[mode][name], grads["none"][name]), f"{mode}: the gradient of {name} changes"
        probe.eval()
        saved[mode] = retained_bytes(probe, lambda: loss(probe(tokens[0].clone()), tokens[1].clone())) // 1000
        probe.train()
        counted = activation_bytes(CONFIG, 3, 41, 4, mode, flash, fused_norm=False) / 1000
        assert abs(saved[mode] - counted) < 2, (
            f"{mode}, flash {flash}: {saved[mode]} kB kept, {counted:.0f} expected; is the right thing wrapped, "
            "with the policy keep_fused_attention for the core?"
        )
    core_now = transformer_blocks(probe)[0].attention.core
    assert core_now is core and "forward" not in vars(transformer_blocks(probe)[0]), (
        "none must take off what selective put on"
    )
    for mode in ("full", "full"):
        modes.apply_recompute(probe, mode)
    assert checkpoints_around(probe, tokens) < 2, "full, asked for twice, is wrapped twice: take off the first one"
    check_policy(probe.eval(), tokens)


def checkpoints_around(probe: nn.Module, tokens: torch.Tensor) -> int:
    """Return in how many checkpoints, at most, the first block runs."""
    around = []

    def note_checkpoints(*_):
        callers = [frame.f_code for frame, _ in traceback.walk_stack(None)]
        inside = [code for code in callers if code.co_name == "checkpoint" and "torch" in code.co_filename]
        around.append(len(inside))

    hook = transformer_blocks(probe)[0].attention_norm.register_forward_hook(note_checkpoints)
    gradients_of(probe, *tokens)
    hook.remove()
    return max(around)


def check_policy(probe: nn.Module, tokens: torch.Tensor) -> None:
    """Assert that a policy is asked about all operations of a block, and obeyed."""
    asked = set()

    def keep_all(ctx, operation, *args, **kwargs):
        asked.add(operation)
        return CheckpointPolicy.MUST_SAVE

    modes.apply_recompute(probe, "selective", keep_all)
    with_policy = retained_bytes(probe, lambda: probe(tokens[0]))
    assert aten.mm.default in asked, "a policy must be asked about every operation of a block: wrap its forward"
    without = retained_bytes(modes.apply_recompute(probe, "none"), lambda: probe(tokens[0]))
    assert with_policy >= without, "a policy that keeps all must keep all: hand it to Recomputed"
