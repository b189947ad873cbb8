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

HOOKS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
)


def layers_of(number: int, count: int) -> list[str]:
    """Return the names of a stage's layers where 6 of them, embedding and head divide evenly."""
    each = 8 // count
    return [str(thing - 1) for thing in range(number * each, (number + 1) * each) if 0 < thing < 7]


def hooks_of(*modules: nn.Module) -> list[dict[str, int]]:
    """Return how many hooks of each kind each module has."""
    return [{name: len(value) for name, value in vars(each).items() if name.endswith("hooks")} for each in modules]


def check_hooks(model: Transformer, tokens: torch.Tensor) -> None:
    """Assert that a stage has the model's hooks, and that a hook on the last stage is on it alone."""
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    first, last = stages.split_stages(model, 2)
    with torch.no_grad():
        last(first(tokens))
    handle.remove()
    assert len(calls) == 2, (
        f"a hook that the model has runs {len(calls)} times in two stages: each stage has the model's hooks "
        "(in dictionaries of its own)"
    )
    for register in HOOKS:
        before = hooks_of(model, first)
        handle = getattr(last, register)(lambda *_: None)
        for has, had, name in zip(hooks_of(model, first), before, ("the model", "the first stage"), strict=True):
            assert has == had, (
                f"{register} on the last stage: {name} has the hook too, they share a dictionary of hooks"
            )
        handle.remove()


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
    check_hooks(model, tokens)
    with torch.device("meta"):
        untied = stages.split_stages(Transformer(dataclasses.replace(TINY, tied=False)), 2)
    assert placement_of(cast(nn.Linear, untied[1].head).weight).stages is None, "an untied weight needs no note"
