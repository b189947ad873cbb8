"""Check of exercise 10.5: local shapes, groups of gradients and hooks of a split model on the meta device."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

from course_kit.labs.five_d.models import MOE, SHALLOW, TINY
from course_kit.ranks import shared
from course_kit.typed import transformer_blocks
from course_lib.five_d import meshes, model
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.single_gpu.placement import placement_of


class RankResult(NamedTuple):
    """A rank's report on a split model."""

    weights: dict[str, tuple[tuple[int, ...], list[int] | None]]  # shape, and the ranks that sum the gradient
    on_meta: bool
    core: str  # of attention, and under cp its order
    hooks: int  # before the model's forward
    called: list[str]  # what `extra` was called on


def split_trial(text: str, moe: dict | None, config: ModelConfig, transforms: int) -> RankResult:
    """On a rank: build a split model and report on it."""
    layout, called = Layout.parse(text), []
    mesh = meshes.build_mesh(layout)
    extra = [lambda each: called.append(type(each).__name__)] * transforms
    split = model.split_model(config, layout, mesh, extra, moe)
    block, weights = transformer_blocks(split)[1], {}
    for name, weight in split.named_parameters():
        group = placement_of(weight).reduce_group
        weights[name] = tuple(weight.shape), None if group is None else dist.get_process_group_ranks(group)
    core = getattr(block.attention.core, "func", block.attention.core).__name__
    core += f", {getattr(block.attention.core, 'keywords', {}).get('order', 'zigzag')}" * (layout.cp > 1)
    on_meta = all(weight.is_meta for weight in split.parameters())
    return RankResult(weights, on_meta, core, len(split._forward_pre_hooks), called)


def report_of(text: str, moe: dict | None, config: ModelConfig = SHALLOW, transforms: int = 1) -> RankResult:
    """Return the report of rank 0 of eight."""
    with shared(8).within(40):
        return shared(8)(split_trial, text, moe, config, transforms)[0]


def check() -> None:
    """Assert the report on the model in three layouts."""
    result = report_of("dp2,cp2,tp2,ulysses,contiguous", MOE)
    group = result.weights["blocks.1.mlp.router.weight"][1]
    assert group == [0, 2, 4, 6], f"ep 1: the router's gradient is summed over dp and cp even so, not over {group}"
    assert result.core == "ulysses_attention, contiguous", (
        f"the layout asks for ulysses and contiguous, and attention's core is {result.core}: that would mask the wrong "
        "keys"
    )
    result = report_of("dp2,ep2,cp2,tp2,sp", MOE)
    weights = result.weights
    assert result.on_meta, "the model should stay on the meta device: nothing has values yet"
    assert result.called == ["Transformer"], "extra transforms should be called once, on the model"
    shape, _ = weights["blocks.1.attention.q_proj.weight"]
    assert shape == (16, 32), f"q_proj has {shape}: tensor parallelism halves its 32 rows"
    shape, group = weights["blocks.1.mlp.experts.up_proj.weight"]
    assert shape == (2, 24, 32), f"the experts have {shape}: ep 2 leaves 2 of 4, tp 2 halves their width 48"
    assert group == [0, 2], f"an expert's gradient is summed over {group}: dp 2 is all ep, so over cp alone, [0, 2]"
    _, group = weights["blocks.1.attention_norm.weight"]
    assert group == list(range(8)), f"a norm's gradient under sp is summed over all that see other tokens: {group}"
    assert weights["blocks.1.mlp.router.weight"][1] == list(range(8)), (
        "the router sees a rank's own tokens, as a norm does"
    )
    assert result.core == "ring_attention, zigzag", (
        f"attention's core is {result.core}: context parallelism should have replaced it"
    )
    assert result.hooks >= 1, "a model with a part of the sequence needs positions: its transforms set a hook"
    result = report_of("dp8", None, TINY, transforms=2)
    assert result.called == ["Transformer"] * 2, "two extra transforms: each of them is called on the model"
    assert len(result.weights) == len(list(Transformer(TINY).parameters())), "the model has the layers of `config`"
    assert result.core == "causal_attention" and result.hooks == 0, "dp alone changes nothing in the model"
