"""Check of exercise 02.6: `keep_matmuls`, a policy that computes no matmul again."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from course_kit.labs.recompute.gradients import gradients_of
from course_lib.recompute import modes
from course_lib.recompute.modes import FUSED_ATTENTION, apply_recompute, aten, retained_bytes
from course_lib.single_gpu.model import ModelConfig, Transformer, loss

CONFIG = ModelConfig(4, 96, 6, 2, 100, 300)


def matmuls_saved(config: ModelConfig, e: int = 4) -> int:
    """Return the bytes per token that one layer keeps: its input, the outputs of seven matmuls and the core.

    e: bytes of an element.
    """
    h, kv = config.hidden, config.kv_heads * config.head_dim
    qkv_and_core, out, mlp = 2 * h + 2 * kv, h, 2 * config.ffn_hidden + h
    return e * (h + qkv_and_core + out + mlp) + 4 * config.heads


def check() -> None:
    """Assert the bytes kept, that no matmul runs twice, each answer of the policy, and the bits of the gradients."""
    probe, tokens = Transformer(CONFIG), torch.randint(300, (2, 3, 40), generator=torch.Generator().manual_seed(0))
    _, plain = gradients_of(probe, *tokens)
    with FlopCounterMode(display=False) as counter:
        loss(probe(tokens[0]), tokens[1]).backward()
    apply_recompute(probe, "selective", modes.keep_matmuls)
    layers = retained_bytes(probe, lambda: probe(tokens[0])) - retained_bytes(
        apply_recompute(probe, "full"), lambda: probe(tokens[0])
    )
    apply_recompute(probe, "selective", modes.keep_matmuls)
    expected = 4 * 120 * (matmuls_saved(CONFIG) - 4 * 96)
    assert layers == expected, (
        f"4 layers keep {layers:,} bytes beside their inputs, {expected:,} expected: which operations?"
    )
    with FlopCounterMode(display=False) as again:
        loss(probe(tokens[0]), tokens[1]).backward()
    assert again.get_total_flops() == counter.get_total_flops(), "a matmul is computed again"
    check_answers()
    _, grads = gradients_of(probe, *tokens)
    assert all(torch.equal(plain[name], grads[name]) for name in plain), "the gradients must stay the same bits"


def check_answers() -> None:
    """Assert what the policy says of a mm, a bmm, an addmm and fused attention."""
    answers = [modes.keep_matmuls(None, call) for call in (aten.mm.default, aten.bmm.default)]
    assert all(isinstance(answer, CheckpointPolicy) for answer in answers), (
        "return CheckpointPolicy.MUST_SAVE or CheckpointPolicy.PREFER_RECOMPUTE"
    )
    assert answers[0] == CheckpointPolicy.MUST_SAVE, "MUST_SAVE, not PREFER_SAVE: a compiler may overrule a preference"
    assert answers[1] in (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE), (
        "a bmm has no weight in it: a plain core makes its scores so, and they are large"
    )
    fused = [call for call in FUSED_ATTENTION if modes.keep_matmuls(None, call) == CheckpointPolicy.MUST_SAVE]
    assert len(fused) == 4, "keep the outputs of fused attention too"
    assert modes.keep_matmuls(None, aten.addmm.default) == CheckpointPolicy.MUST_SAVE, (
        "a linear layer with a bias is an addmm"
    )
