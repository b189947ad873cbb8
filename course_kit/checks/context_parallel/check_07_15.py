"""Check of exercise 07.15: training with context parallelism against one process; positions, cores, refusals."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist

from course_kit.checks.context_parallel.trials import NotedBlock
from course_kit.checks.sequence_parallel.cases import results_of
from course_kit.checks.sequence_parallel.diary import Diary
from course_kit.labs.sequence_parallel.models import ONE_LAYER, Training, batch_of, one_process
from course_kit.labs.tensor_parallel.models import TINY, in_groups, relative_error, sgd
from course_kit.ranks import shared
from course_kit.typed import grad_of, override, transformer_blocks
from course_lib.collectives.traffic import count_traffic
from course_lib.context_parallel import model as context
from course_lib.context_parallel.blocks import AttentionBlock
from course_lib.data_parallel.replicas import DataParallel, parallel_accumulate
from course_lib.sequence_parallel.model import forward_inputs
from course_lib.sequence_parallel.shards import ORDERS, local_positions, shard_sequence
from course_lib.single_gpu.model import ModelConfig, Transformer

LAYOUTS = (  # ranks, method, order, model, steps
    (2, "ring", "zigzag", ONE_LAYER, 2),
    (4, "ring", "contiguous", ONE_LAYER, 1),
    (2, "all_gather", "zigzag", TINY, 1),
    (4, "ulysses", "zigzag", ONE_LAYER, 1),
)


class RankResult(NamedTuple):
    """One rank's results of some training steps, with gradients averaged over the group."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]  # of the first step
    weights: dict[str, torch.Tensor]  # after the last one
    positions_used: bool  # those that the caller gives are used, and others matter
    sent: list[str]  # collectives of a forward
    attended: int  # calls of the block that was given


def context_trial(group: dist.ProcessGroup, method: str, order: str, config: ModelConfig, steps: int) -> RankResult:
    """Train a model with context parallelism."""
    model = context.apply_context_parallel(Transformer(config), group, method, order)
    dp = DataParallel(model, group)
    optimizer, losses = sgd(model.parameters()), []
    gradients: dict[str, torch.Tensor] = {}
    inputs, targets = (shard_sequence(each, group, order) for each in batch_of(config))
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(parallel_accumulate(dp, [(inputs, targets)]).item())
        gradients = gradients or {name: grad_of(p).clone() for name, p in model.named_parameters()}
        optimizer.step()
    with torch.no_grad():
        given = inputs, local_positions(inputs.shape[1], group, order)
        plain, named = model(inputs), model(given[0], positions=given[1])
        same = torch.equal(model(*given), plain) and torch.equal(named, plain)
        other = torch.equal(model(given[0], positions=given[1] * 2), named)
        block = NotedBlock(Diary())
        noted = context.apply_context_parallel(Transformer(config), group, method, order, cast(AttentionBlock, block))
        with count_traffic() as traffic:
            noted(inputs)
    sent = sorted({r.collective for r in traffic.records})
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return RankResult(losses, gradients, weights, same and not other, sent, len(block.diary.events))


def context_refusals(group: dist.ProcessGroup) -> tuple[list[str], bool]:
    """On 4 ranks: the impossible requests that are accepted, and whether a refused model is unchanged."""
    model, message = Transformer(ONE_LAYER), []
    split = context.apply_context_parallel(Transformer(ONE_LAYER), group)
    cores = [block.attention.core for block in transformer_blocks(split)]
    six = Transformer(ModelConfig(1, 48, 6, 6, 100, 97))
    stage = context.apply_context_parallel(Transformer(ONE_LAYER), group)
    override(stage, embedding=None)
    for wish, attempt in (
        ("method 'star'", lambda: context.apply_context_parallel(model, group, "star")),
        ("order 'zag'", lambda: context.apply_context_parallel(model, group, order="zag")),
        ("Ulysses of 6 heads", lambda: context.apply_context_parallel(six, group, "ulysses")),
        ("a model that is context parallel already", lambda: context.apply_context_parallel(split, group)),
        ("12 tokens in 8 chunks", lambda: shard_sequence(torch.zeros(1, 12), group)),
        ("hidden states without positions", lambda: stage(torch.zeros(1, 2, TINY.hidden))),
    ):
        try:
            attempt()
            message.append(wish)
        except ValueError:
            pass
    return message, cores == [block.attention.core for block in transformer_blocks(split)]


def named_tokens(group: dist.ProcessGroup) -> str | None:
    """On a rank: the error of fill_positions for a call model(x=tokens), or None."""
    model, tokens = Transformer(ONE_LAYER), torch.zeros(1, 4, dtype=torch.long)
    try:
        args, kwargs = context.fill_positions(model, (), {"x": tokens}, group, "zigzag")
    except (IndexError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    x, positions = forward_inputs(args, kwargs)
    return None if x is tokens and positions is not None else "x or its positions are missing"


def device_of_positions(group: dist.ProcessGroup) -> str:
    """On a rank: the device of the positions that fill_positions adds to tokens on the meta device."""
    tokens = torch.zeros(1, 4, dtype=torch.long, device="meta")
    args, kwargs = context.fill_positions(Transformer(ONE_LAYER), (tokens,), {}, group, "zigzag")
    positions = forward_inputs(args, kwargs)[1]
    return "nowhere: there are none" if positions is None else positions.device.type


def wrong_cores(group: dist.ProcessGroup) -> str | None:
    """On a rank: what is wrong with the cores, for each method and order, or None."""
    for method, order in itertools.product(context.METHODS, ORDERS):
        model = context.apply_context_parallel(Transformer(TINY), group, method, order)
        for number, block in enumerate(transformer_blocks(model)):
            core = block.attention.core
            settings = {"order": "zigzag", "group": None} | getattr(core, "keywords", {})
            where = f"{method}, {order}: core {number}"
            if getattr(core, "func", None) is not context.METHODS[method]:
                return f"{where} is not a functools.partial of METHODS[method]"
            if settings["order"] != order:
                return f"{where} gets the order {settings['order']!r}: it would mask the wrong keys"
            if settings["group"] is not group:
                return f"{where} does not get the group"
    return None


def check() -> None:
    """Judge fill_positions and apply_context_parallel on 2 and 4 ranks."""
    ranks, cases = shared(4), [(n, context_trial, *how) for n, *how in LAYOUTS]
    with ranks.within(20):
        for (n, method, order, config, steps), outcome in zip(LAYOUTS, results_of(cases[:1], cases[1:]), strict=True):
            expected = one_process(config, steps)
            for rank, result in enumerate(outcome):
                judge(f"{n} ranks, {method}, {order}, rank {rank}", method, expected, result)
        for rank, wrong in enumerate(ranks(in_groups, 4, wrong_cores)):
            assert wrong is None, f"rank {rank}: {wrong}"
        for rank, wrong in enumerate(ranks(in_groups, 4, named_tokens)):
            assert wrong is None, f"rank {rank}: model(x=tokens): {wrong}. forward_inputs finds x by place and by name"
        for rank, device in enumerate(ranks(in_groups, 4, device_of_positions)):
            assert device == "meta", f"rank {rank}: x is on meta, its positions on {device}: give the device of x"
        for rank, (granted, same) in enumerate(ranks(in_groups, 4, context_refusals)):
            assert not granted, f"rank {rank}: should be refused: {', '.join(granted)}"
            assert same, f"rank {rank}: a refused model has changed"


def judge(where: str, method: str, expected: Training, result: RankResult) -> None:
    """Judge the training on one rank."""
    assert result.sent == {"ring": ["recv", "send"], "ulysses": ["all_to_all"]}.get(method, [method]), (
        f"{where}: attention sends by {result.sent}: is each block's core the chosen method?"
    )
    assert result.attended, f"{where}: the `attention` that was given is never called: hand it on to the method"
    first, right = result.losses[0], expected.losses[0]
    assert math.isclose(first, right, rel_tol=1e-6), (
        f"{where}: the first loss is {first:.6f}, not {right:.6f}: positions, order, group?"
    )
    for name, gradient in expected.gradients.items():
        assert relative_error(result.gradients[name], gradient) < 1e-5, (
            f"{where}: {name}'s gradient is wrong: positions, order?"
        )
        assert relative_error(result.weights[name], expected.weights[name]) < 1e-5, (
            f"{where}: {name} differs in the end"
        )
    assert np.allclose(result.losses, expected.losses, rtol=1e-5), (
        f"{where}: losses {result.losses}, one process's are {expected.losses}"
    )
    assert result.positions_used, f"{where}: positions that the caller gives are to be used as they are"
