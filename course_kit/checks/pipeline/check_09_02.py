"""Check of exercise 09.2: `split_stages` makes stages that share the model's layers, under their names."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import nn

from course_kit.labs.pipeline.models import TINY, batch_of
from course_lib.pipeline import stages
from course_lib.single_gpu.model import Transformer
from course_lib.single_gpu.placement import placement_of


def layers_of(number: int, count: int) -> list[str]:
    """Return the names of a stage's layers where 6 of them, embedding and head divide evenly."""
    each = 8 // count
    return [str(thing - 1) for thing in range(number * each, (number + 1) * each) if 0 < thing < 7]


def hooks_elsewhere(local: list, model: Transformer, tokens: torch.Tensor) -> int:
    """Return how often hooks that are set on the last stage alone run when the first one, or the model, runs."""
    calls, last = [], local[-1]
    add = last.register_forward_pre_hook, last.register_forward_hook
    handles = [register(lambda *_: calls.append(1)) for register in add]
    with torch.no_grad():
        model(tokens)
        local[0](tokens)
    for handle in handles:
        handle.remove()
    return len(calls)


def check() -> None:
    """Assert names, sharing, outputs and the note on the tied weight, for five p and v; and that hooks are apart."""
    model = Transformer(TINY)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tokens = batch_of()[0]
    for p, v in ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2)):
        local = stages.split_stages(model, p, v)
        assert len(local) == p * v, f"p = {p}, v = {v}: there should be p v stages, and are {len(local)}"
        assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names, (
            "the model itself has changed: its copy shares its dictionary of submodules"
        )
        result = [name for stage in local for name, _ in stage.named_parameters(remove_duplicate=False)]
        assert sorted(result) == sorted(names), (
            f"p = {p}, v = {v}: the stages' names are not the model's: {sorted(result)[:3]} …"
        )
        for number, stage in enumerate(local):
            has, wanted = (
                [name for name, _ in cast(nn.ModuleList, stage.blocks).named_children()],
                layers_of(number, p * v),
            )
            assert has == wanted, f"p = {p}, v = {v}: stage {number} has layers {has}, and split_layers says {wanted}"
        with torch.no_grad():
            x = tokens
            for stage in local:
                x = stage(x)
            full = model(tokens)
        assert torch.equal(x, full), f"p = {p}, v = {v}: the stages, one after the other, are not the model"
        weights = {id(each) for stage in local for each in stage.parameters()}
        assert weights == {id(each) for each in model.parameters()}, "a stage has copies of weights: share the layers"
        note = placement_of(cast(nn.Linear, local[-1].head).weight).stages
        tied_stages = (0, p * v - 1) if p * v > 1 else None
        assert note == tied_stages, (
            f"p = {p}, v = {v}: the tied weight's `placement_of(weight).stages` is {note}, not {tied_stages}"
        )
    assert not hooks_elsewhere(local, model, tokens), (
        "a hook on the last stage runs with the first one or with the model too: they share a dictionary of hooks"
    )
    with torch.device("meta"):
        untied = stages.split_stages(Transformer(dataclasses.replace(TINY, tied=False)), 2)
    assert placement_of(cast(nn.Linear, untied[1].head).weight).stages is None, "an untied weight needs no note"
