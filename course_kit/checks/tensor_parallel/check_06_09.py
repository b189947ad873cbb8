"""Check of exercise 06.9: a split model against one process, with its options, its tie and its refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_kit.checks.tensor_parallel.memory import retained_by
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
from course_kit.typed import grad_of, override, transformer_blocks
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import MLP, ModelConfig, Transformer, loss
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel import model as program
from course_lib.tensor_parallel import vocabulary
from course_lib.tensor_parallel.shards import TensorShard, gather_state_dict
from course_lib.zero.shards import clip_grad_norm_

HEAD_NORMS = ModelConfig(1, 48, 4, 4, 100, 97, qk_norm=True)
CANNOT = {  # on four ranks
    "6 heads": ModelConfig(1, 48, 6, 6, 100, 97),
    "ffn_hidden = 102": ModelConfig(1, 48, 4, 4, 102, 97),
}
PROJECTED = {"attention": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}


class Mixture(nn.Module):
    """A replacement of a block's MLP, as a mixture of experts would be: one matrix, and perhaps an MLP."""

    def __init__(self, always: MLP | None):
        super().__init__()
        self.router, self.always = nn.Linear(TINY.hidden, TINY.hidden, bias=False), always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, h]; returns the same shape."""
        return self.router(x) + (0 if self.always is None else self.always(x))


class RankResult(NamedTuple):
    """A rank's report on a split model."""

    training: Training  # gathered gradients and weights
    forward: Traffic
    backward: Traffic
    retained: int  # bytes of the model
    groupings: int  # calls of replicas_of


def model_trial(
    group: dist.ProcessGroup, config: ModelConfig, meta: bool, steps: int = 1, max_norm: float = 0.4
) -> RankResult:
    """Train a model that is split over the group."""
    with mock.patch.object(program, "replicas_of", wraps=program.replicas_of) as replicas_of:
        model, retained = retained_by(lambda: split_model(config, group, meta))
    losses, norms = [], []
    optimizer, (inputs, targets) = sgd(model.parameters()), batch_of(config)
    named = dict(model.named_parameters())
    gradients: dict[str, torch.Tensor] | None = None
    for _ in range(steps):
        optimizer.zero_grad()
        with count_traffic() as forward:
            step_loss = vocabulary.vocab_parallel_cross_entropy(model(inputs), targets, group, config.vocab)
        with count_traffic() as backward:
            step_loss.backward()
        if gradients is None:
            gradients = {name: full_gradient(p) for name, p in named.items() if p.grad is not None}
        losses.append(step_loss.item())
        norms.append(clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return RankResult(
        Training(losses, norms, gradients or {}, gather_state_dict(model)),
        forward,
        backward,
        retained,
        replicas_of.call_count,
    )


def full_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient of the full parameter, gathered if the parameter is a shard. Collective."""
    shard = placement_of(parameter).tensor_shard
    return shard.gather(grad_of(parameter)) if shard else grad_of(parameter).clone()


def wrong_options(group: dist.ProcessGroup) -> str | None:
    """Return the error in `project`, a tie, logits, chunks, norms of heads, the default group, blocks with mixtures,
    or a model that has no embedding or no head, or None.
    """
    (inputs, _), hidden = batch_of(), torch.randn(2, 17, TINY.hidden)
    tied = split_model(TINY, group)
    if wrong := wrong_project(tied):
        return wrong
    if cast(nn.Linear, tied.head).weight is not cast(nn.Embedding, tied.embedding).weight:
        return "the model is tied, but head and embedding have a weight each: give the head the embedding's"
    logits = Transformer(TINY)(inputs)
    if relative_error(tied(inputs), TensorShard.of(TINY.vocab, group, -1).cut(logits)) > 1e-5:
        return "the logits are not this rank's part of one process's"
    if relative_error(split_model(TINY, group, gather_logits=True)(inputs), logits) > 1e-5:
        return "gather_logits=True: not the logits of one process"
    blocks = transformer_blocks(split_model(TINY, group, chunks=3))
    by_rows = [layer for block in blocks for layer in (block.attention.o_proj, block.mlp.down_proj)]
    if any(getattr(layer, "chunks", 0) != 3 for layer in by_rows):
        return "chunks=3: o and down are row layers, and get the chunks, in every block"
    for missing, x in (("embedding", hidden), ("head", inputs)):
        full, split = Transformer(TINY), Transformer(TINY)
        for stage in (full, split):
            setattr(stage, missing, None)
        with stepping_over(f"a model whose {missing} is None"):
            program.apply_tensor_parallel(split, group)
        expected = full(x) if missing == "head" else TensorShard.of(TINY.vocab, group, -1).cut(full(x))
        if relative_error(split(x), expected) > 1e-5:
            return f"a model whose {missing} is None: not one process's output"
    return wrong_mixtures(group) or wrong_head_norms(group) or wrong_default()


@contextlib.contextmanager
def stepping_over(what: str) -> Iterator[None]:
    """Name the model in which an AttributeError was raised."""
    try:
        yield
    except AttributeError as error:
        raise AssertionError(f"{what}: {error}") from error


def wrong_project(model: nn.Module) -> str | None:
    """Return the block whose `project` does not return the outputs of its own layers, or None."""
    for number, block in enumerate(transformer_blocks(model)):
        for part, names in PROJECTED.items():
            owner, x = getattr(block, part), torch.randn(2, 3, TINY.hidden)
            outs = owner.project(x)
            expected = [F.linear(x, getattr(owner, name).weight) for name in names]
            errors = [relative_error(*pair) for pair in zip(outs, expected, strict=False)]
            if len(outs) != len(names) or max(errors) > 1e-5:
                return (
                    f"block {number}: {part}.project(x) is not what this block's {', '.join(names)} make of x. "
                    "A lambda in the loop takes the last block's layers; `project_layers` gets its own block's"
                )
    return None


def wrong_mixtures(group: dist.ProcessGroup) -> str | None:
    """Return what is wrong with blocks that hold an MLP under another name, or no MLP; or None."""
    (inputs, _), advice = batch_of(), "split every `MLP` in `block.modules()`, and nothing else in its place"
    what = "a block where block.mlp is a mixture, with an MLP inside or none"
    full, split = Transformer(TINY), Transformer(TINY)
    for model in (full, split):
        torch.manual_seed(9)
        for block, always in zip(model.blocks, (True, False), strict=True):
            override(block, mlp=Mixture(cast(MLP, block.mlp) if always else None))
    with stepping_over(f"{what}: {advice}"):
        program.apply_tensor_parallel(split, group)
    inside = cast(Mixture, transformer_blocks(split)[0].mlp).always
    assert inside is not None
    rows = inside.up_proj.weight.shape[0]
    if rows != TINY.ffn_hidden // group.size():
        return f"{what}: up of the one inside has {rows} rows of {TINY.ffn_hidden}: {advice}"
    if relative_error(split(inputs), TensorShard.of(TINY.vocab, group, -1).cut(full(inputs))) > 1e-5:
        return f"{what}: not one process's logits: {advice}"
    return None


def wrong_head_norms(group: dist.ProcessGroup) -> str | None:
    """Return what is wrong with the gradient of a norm of each head (Qwen3), or None."""
    full, split, (inputs, targets) = Transformer(HEAD_NORMS), split_model(HEAD_NORMS, group), batch_of(HEAD_NORMS)
    loss(full(inputs), targets).backward()
    vocabulary.vocab_parallel_cross_entropy(split(inputs), targets, group, HEAD_NORMS.vocab).backward()
    for name in ("q_norm", "k_norm"):
        got, expected = (getattr(transformer_blocks(model)[0].attention, name).weight.grad for model in (split, full))
        if relative_error(got, expected) > 1e-5:
            return f"a model with qk_norm: the gradient of {name} is not one process's; call share_head_norms"
    return None


def wrong_default() -> str | None:
    """Return what is wrong with a model that is split over the default group, or None."""
    model: nn.Module = program.apply_tensor_parallel(Transformer(TINY))
    rows = getattr(model, "blocks", [None])[0].mlp.up_proj.weight.shape[0] if model is not None else 0
    if rows != TINY.ffn_hidden // dist.get_world_size():
        return f"group=None: up has {rows} rows of {TINY.ffn_hidden} on each of all {dist.get_world_size()} ranks"
    return None


def refusal(group: dist.ProcessGroup, config: ModelConfig) -> tuple[str, bool] | None:
    """Return the message with which a model is refused, and whether it is unchanged; None if it is not refused."""
    model = Transformer(config)
    before = list(model.modules())
    try:
        program.apply_tensor_parallel(model, group)
    except ValueError as error:
        return str(error), list(model.modules()) == before
    return None


def refusals(group: dist.ProcessGroup) -> list[tuple[str, bool] | None]:
    """Return the refusals of all models that cannot be split."""
    return [refusal(group, config) for config in CANNOT.values()]


def check() -> None:
    """Judge apply_tensor_parallel on 2 and 4 ranks."""
    ranks = shared(4)
    with ranks.within(20):
        for rank, wrong in enumerate(ranks(in_groups, 2, wrong_options)):
            assert wrong is None, f"2 ranks, rank {rank}: {wrong}"
        for n, config, meta in ((2, MHA, False), (4, TINY, True)):
            for rank, result in enumerate(ranks(in_groups, n, model_trial, config, meta)):
                where = f"{n} ranks, {config.kv_heads} K/V heads, rank {rank}{', from the meta device' if meta else ''}"
                judge(where, n, config, result)
        for rank, answers in enumerate(ranks(in_groups, 4, refusals)):
            for what, answer in zip(CANNOT, answers, strict=True):
                where = f"rank {rank}: a model with {what}, which 4 does not divide"
                assert answer, f"{where}, is split: call check_model first, which raises a ValueError"
                assert answer[1], f"{where}, has changed before it is refused: call check_model first"


def judge(where: str, n: int, config: ModelConfig, result: RankResult) -> None:
    """Judge one model on one rank."""
    expected, got = one_process(config), result.training
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
    assert (result.forward.calls, result.backward.calls) == (7, 5 + 4 * (n > config.kv_heads)), (
        f"{where}: {result.forward.calls} collectives in forward, {result.backward.calls} in backward; 2 per layer, 1 "
        "for the embedding or the head, 2 for the loss, 2 per layer if K/V heads have copies (project replaced?)"
    )
    enough = 4 * param_count(config, tp=n) + 4 * config.hidden * n * (2 - config.tied)
    assert result.retained <= enough, (
        f"{where}: the model keeps {result.retained:,} bytes; norms and its share of the rest: {enough:,}"
    )
    assert result.groupings <= 1, (
        f"{where}: replicas_of is called {result.groupings} times: call it once, all blocks share its groups"
    )
