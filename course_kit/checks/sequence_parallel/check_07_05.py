"""Check of exercise 07.5: the shapes that a rank sees, from the sizes, beside the running model's."""

from __future__ import annotations

import functools
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from course_kit.labs.sequence_parallel.models import batch_of, split_model
from course_kit.labs.tensor_parallel.models import TINY, in_groups
from course_kit.ranks import shared
from course_kit.typed import transformer_blocks
from course_lib.single_gpu.model import ModelConfig

Shape = tuple[int, int, int]
POSITIONS = ("after the embedding", "after a norm", "into the product of q", "q", "into o", "after o", "gate", "logits")
RANKS, BATCH, SEQ = 4, 2, 16


def expected_shapes(config: ModelConfig, sequence_parallel: bool) -> dict[str, Shape]:
    """Return the shapes at POSITIONS on rank 0."""
    tokens = SEQ // RANKS if sequence_parallel else SEQ  # outside of g and g*
    vocab = -(-config.vocab // RANKS)
    between, gathered = (BATCH, tokens, config.hidden), (BATCH, SEQ, config.hidden)
    heads, ffn = (BATCH, SEQ, config.hidden // RANKS), (BATCH, SEQ, config.ffn_hidden // RANKS)
    return dict(
        zip(POSITIONS, (between, between, gathered, heads, heads, between, ffn, (BATCH, SEQ, vocab)), strict=True)
    )


def seen_shapes(group: dist.ProcessGroup, sequence_parallel: bool, config: ModelConfig = TINY) -> dict[str, Shape]:
    """Return the shapes at POSITIONS on this rank, from the running model."""
    model, (inputs, _) = split_model(config, group, sequence_parallel), batch_of(config, BATCH, SEQ)
    block, seen = transformer_blocks(model)[0], {}

    def note(position):
        def hook(module, args, out):
            seen[position] = tuple(out.shape)

        return hook

    for module, position in (
        (cast(nn.Module, model.embedding), "after the embedding"),
        (block.attention_norm, "after a norm"),
        (block.attention.o_proj, "after o"),
    ):
        cast(nn.Module, module).register_forward_hook(note(position))
    plain = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        out = plain(x, weight, bias)
        for local, given, made in (
            (block.attention.q_proj.weight, "into the product of q", "q"),
            (block.attention.o_proj.weight, "into o", None),
            (block.mlp.gate_proj.weight, None, "gate"),
        ):
            if weight.data_ptr() == local.data_ptr():
                seen.update({given: tuple(x.shape), made: tuple(out.shape)})
        return out

    torch.nn.functional.linear = linear
    try:
        seen["logits"] = tuple(model(inputs).shape)
    finally:
        torch.nn.functional.linear = plain
    return {position: seen[position] for position in POSITIONS}


def seen_both(group: dist.ProcessGroup) -> list[dict[str, Shape]]:
    """On a rank: seen_shapes with tensor parallelism alone, and with sequence parallelism."""
    return [seen_shapes(group, sequence_parallel) for sequence_parallel in (False, True)]


@functools.cache
def shapes_by_kind() -> list[dict[str, Shape]]:
    """seen_both on rank 0 of 4."""
    return shared(4)(in_groups, 4, seen_both)[0]


def check(shapes: dict[str, tuple[Shape, Shape]]) -> None:
    """Judge the prediction by the sizes; print what the running model has."""
    assert set(shapes) == set(POSITIONS), f"still missing: {', '.join(p for p in POSITIONS if p not in shapes)}"
    assert all(len(pair) == 2 for pair in shapes.values()), "a pair for each place: TP, and TP + SP"
    expected = [expected_shapes(TINY, sequence_parallel) for sequence_parallel in (False, True)]
    for position in POSITIONS:
        for number, word in enumerate(("TP", "TP + SP")):
            assert tuple(shapes[position][number]) == expected[number][position], (
                f"{position}, {word}: {shapes[position][number]} is not what the running model has there"
            )
    with shared(4).within(20):
        seen = shapes_by_kind()
    print(f"{'':<24}{'TP':>16}{'TP + SP':>16}")
    for position in POSITIONS:
        print(f"{position:<24}{str(seen[0][position]):>16}{str(seen[1][position]):>16}")
