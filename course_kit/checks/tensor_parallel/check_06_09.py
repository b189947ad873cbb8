"""Check of exercise 06.9: a split model against one process, with its options, its tie and its refusals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.tensor_parallel.memory import kept_by
from course_kit.labs.tensor_parallel.models import (
    MHA,
    TINY,
    Training,
    batch_of,
    in_groups,
    one_process,
    relative_error,
    sgd,
    split_model,
)
from course_kit.ranks import shared
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import ModelConfig, Transformer, loss
from course_lib.tensor_parallel import model as program
from course_lib.tensor_parallel import vocabulary
from course_lib.tensor_parallel.shards import TensorShard, whole_state_dict
from course_lib.zero.shards import clip_grad_norm_

HEAD_NORMS = ModelConfig(1, 48, 4, 4, 100, 97, qk_norm=True)
CANNOT = ModelConfig(1, 48, 6, 6, 100, 97), ModelConfig(1, 48, 4, 4, 102, 97)  # on four ranks


class Told(NamedTuple):
    """What a rank tells of a split model."""

    training: Training  # gradients and weights made whole
    forward: Traffic
    backward: Traffic
    kept: int  # bytes of the model


def model_trial(
    group: dist.ProcessGroup, config: ModelConfig, meta: bool, steps: int = 1, max_norm: float = 0.4
) -> Told:
    """Train a model that is split over the group."""
    model, kept = kept_by(lambda: split_model(config, group, meta))
    losses, norms = [], []
    optimizer, (inputs, targets) = sgd(model.parameters()), batch_of(config)
    named, gradients = dict(model.named_parameters()), None
    for _ in range(steps):
        optimizer.zero_grad()
        with count_traffic() as forward:
            step_loss = vocabulary.vocab_parallel_cross_entropy(model(inputs), targets, group, config.vocab)
        with count_traffic() as backward:
            step_loss.backward()
        if gradients is None:
            gradients = {
                name: p.tensor_shard.gather(p.grad) if hasattr(p, "tensor_shard") else p.grad.clone()
                for name, p in named.items()
                if p.grad is not None
            }
        losses.append(step_loss.item())
        norms.append(clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return Told(Training(losses, norms, gradients, whole_state_dict(model)), forward, backward, kept)


def wrong_options(group: dist.ProcessGroup) -> str | None:
    """Say what is wrong with a tie, gathered logits, chunks, norms of heads, the default group, or a model that has no
    embedding or no head; None where nothing is.
    """
    (inputs, _), hidden = batch_of(), torch.randn(2, 17, TINY.hidden)
    tied = split_model(TINY, group)
    if tied.head.weight is not tied.embedding.weight:
        return "the model is tied, but head and embedding have a weight each: give the head the embedding's"
    if relative_error(split_model(TINY, group, gather_logits=True)(inputs), Transformer(TINY)(inputs)) > 1e-5:
        return "gather_logits=True: not the logits of one process"
    block = split_model(TINY, group, chunks=3).blocks[0]
    if any(getattr(layer, "chunks", 0) != 3 for layer in (block.attention.o_proj, block.mlp.down_proj)):
        return "chunks=3: o and down are row layers, and get the chunks"
    for missing, x in (("embedding", hidden), ("head", inputs)):
        whole, split = Transformer(TINY), Transformer(TINY)
        for stage in (whole, split):
            setattr(stage, missing, None)
        try:
            program.apply_tensor_parallel(split, group)
        except AttributeError as error:
            return f"a model whose {missing} is None: {error}"
        expected = whole(x) if missing == "head" else TensorShard.of(TINY.vocab, group, -1).cut(whole(x))
        if relative_error(split(x), expected) > 1e-5:
            return f"a model whose {missing} is None: not one process's output"
    return wrong_head_norms(group) or wrong_default()


def wrong_head_norms(group: dist.ProcessGroup) -> str | None:
    """Say what is wrong with the gradient of a norm of each head (Qwen3); None where nothing is."""
    whole, split, (inputs, targets) = Transformer(HEAD_NORMS), split_model(HEAD_NORMS, group), batch_of(HEAD_NORMS)
    loss(whole(inputs), targets).backward()
    vocabulary.vocab_parallel_cross_entropy(split(inputs), targets, group, HEAD_NORMS.vocab).backward()
    for name in ("q_norm", "k_norm"):
        got, expected = (getattr(model.blocks[0].attention, name).weight.grad for model in (split, whole))
        if relative_error(got, expected) > 1e-5:
            return f"a model with qk_norm: the gradient of {name} is not one process's; call share_head_norms"
    return None


def wrong_default() -> str | None:
    """Say what is wrong with a model that is split over the default group; None where nothing is."""
    model: nn.Module = program.apply_tensor_parallel(Transformer(TINY))
    rows = getattr(model, "blocks", [None])[0].mlp.up_proj.weight.shape[0] if model is not None else 0
    if rows != TINY.ffn_hidden // dist.get_world_size():
        return f"group=None: up has {rows} rows of {TINY.ffn_hidden} on each of all {dist.get_world_size()} ranks"
    return None


def refusal(group: dist.ProcessGroup, config: ModelConfig) -> tuple[str, bool] | None:
    """The message with which a model is refused, and whether it is as before; None where it is not refused."""
    model = Transformer(config)
    before = list(model.modules())
    try:
        program.apply_tensor_parallel(model, group)
    except ValueError as error:
        return str(error), list(model.modules()) == before
    return None


def refusals(group: dist.ProcessGroup) -> list[tuple[str, bool] | None]:
    """The refusals of all models that can't be split."""
    return [refusal(group, config) for config in CANNOT]


def check() -> None:
    """Judge apply_tensor_parallel on 2 and 4 ranks."""
    ranks = shared(4)
    with ranks.within(20):
        for rank, wrong in enumerate(ranks(in_groups, 2, wrong_options)):
            assert wrong is None, f"2 ranks, rank {rank}: {wrong}"
        for n, config, meta in ((2, MHA, False), (4, TINY, True)):
            for rank, told in enumerate(ranks(in_groups, n, model_trial, config, meta)):
                where = f"{n} ranks, {config.kv_heads} K/V heads, rank {rank}{', from the meta device' if meta else ''}"
                judge(where, n, config, told)
        for rank, answers in enumerate(ranks(in_groups, 4, refusals)):
            for config, answer in zip(CANNOT, answers, strict=True):
                assert answer and answer[1], (
                    f"rank {rank}: {config} can't be split over 4: ValueError, and nothing changed"
                )


def judge(where: str, n: int, config: ModelConfig, told: Told) -> None:
    """Judge one model on one rank."""
    expected, got = one_process(config), told.training
    assert np.allclose(got.losses, expected.losses, rtol=1e-5), (
        f"{where}: losses {got.losses}, one process's are {expected.losses}"
    )
    assert set(got.weights) == set(expected.weights), f"{where}: the parameters' names have changed"
    for name, gradient in expected.gradients.items():
        assert name in got.gradients, f"{where}: {name} has no gradient: its layer was not used"
        assert relative_error(got.gradients[name], gradient) < 1e-5, (
            f"{where}: the gradient of {name} is not one process's"
        )
    assert np.allclose(got.norms, expected.norms, rtol=1e-5), (
        f"{where}: gradient norms {got.norms}, not {expected.norms}"
    )
    for name, weight in expected.weights.items():
        assert relative_error(got.weights[name], weight) < 1e-5, f"{where}: {name} is not one process's after a step"
    assert (told.forward.calls, told.backward.calls) == (7, 5 + 4 * (n > config.kv_heads)), (
        f"{where}: {told.forward.calls} collectives in forward, {told.backward.calls} in backward; 2 a layer, one for "
        "the embedding or the head, 2 for the loss, 2 a layer where K/V heads have copies (project replaced?)"
    )
    enough = 4 * param_count(config, tp=n) + 4 * config.hidden * n * (2 - config.tied)
    assert told.kept <= enough, (
        f"{where}: the model keeps {told.kept:,} bytes; norms and its share of the rest: {enough:,}"
    )
