"""Check of exercise 07.4: training with sequence parallelism against one process; reduce_group; refusals."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from course_kit.labs.sequence_parallel.drift import differing
from course_kit.labs.sequence_parallel.models import (
    ONE_LAYER,
    Training,
    batch_of,
    full_gradients,
    one_process,
    split_model,
)
from course_kit.labs.tensor_parallel.models import TINY, in_groups, relative_error, sgd
from course_kit.ranks import shared
from course_kit.typed import grad_of, override, world
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.data_parallel.replicas import DataParallel
from course_lib.sequence_parallel import model as sequence
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.tensor_parallel.by_hand import cut
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.shards import gather_state_dict
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy


class RankResult(NamedTuple):
    """One rank's results of some training steps."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]  # of the first step, gathered
    weights: dict[str, torch.Tensor]  # after the last one, gathered
    forward: Traffic  # of the last step
    differ: list[str]  # parameters that all ranks should have the same


def sequence_trial(group: dist.ProcessGroup, config: ModelConfig, meta: bool, steps: int) -> RankResult:
    """Train a model with sequence parallelism."""
    model, losses = split_model(config, group, meta=meta), []
    gradients: dict[str, torch.Tensor] = {}
    optimizer, (inputs, targets) = sgd(model.parameters()), batch_of(config)
    for _ in range(steps):
        optimizer.zero_grad()
        with count_traffic() as forward:
            step_loss = vocab_parallel_cross_entropy(model(inputs), targets, group, config.vocab)
        step_loss.backward()
        gradients = gradients or full_gradients(model)
        losses.append(step_loss.item())
        optimizer.step()
    return RankResult(losses, gradients, gather_state_dict(model), forward, differing(model, group))


def later_trial(group: dist.ProcessGroup, config: ModelConfig = TINY) -> tuple[dict[str, torch.Tensor], int]:
    """On 4 ranks, tp 2 and dp 2, with reduce_group: the norms' gradients after finish(), and all-reduces over tp."""
    model = split_model(config, group, reduce_group=world())
    dp = DataParallel(model, dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0])
    inputs, targets = (cut(each, cast(dist.ProcessGroup, dp.group), 0) for each in batch_of(config))
    step_loss = vocab_parallel_cross_entropy(dp(inputs), targets, group, config.vocab)
    with count_traffic() as backward:
        step_loss.backward()
        dp.finish()
    of_tp = backward.select("all_reduce", tuple(dist.get_process_group_ranks(group)))
    return {name: grad_of(p).clone() for name, p in model.named_parameters() if "norm" in name}, of_tp.calls


def wrong_norms(group: dist.ProcessGroup) -> str | None:
    """On a rank: what is wrong with the weights of norms or with a SequenceParallelNorm in BF16, or None."""
    model = apply_tensor_parallel(Transformer(ONE_LAYER), group)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    sequence.apply_sequence_parallel(model, group)
    if before != {name: id(parameter) for name, parameter in model.named_parameters()}:
        return "a parameter is not the same object as before: an optimizer that has it would update the old one"
    plain = nn.RMSNorm(8, eps=1e-3).bfloat16()
    norm = sequence.SequenceParallelNorm(plain, group)
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    out, right = norm(x), plain(x)
    if out.dtype != x.dtype:
        return f"a norm in BF16 returns {out.dtype}: the residual stream would change its dtype"
    return None if torch.equal(out, right) else "a norm in BF16 does not return what its nn.RMSNorm returns"


def refusals(group: dist.ProcessGroup) -> list[str | None]:
    """Return the errors of models that cannot be split, and of a sequence that does not divide; None if there is
    none.
    """
    split = split_model(ONE_LAYER, group)
    messages: list[str | None] = []
    in_chunks = apply_tensor_parallel(Transformer(ONE_LAYER), group, chunks=2)
    odd = torch.zeros(1, 7, dtype=torch.long)
    stage = split_model(ONE_LAYER, group)
    override(stage, embedding=None)
    for attempt in (
        lambda: sequence.apply_sequence_parallel(Transformer(ONE_LAYER), group),
        lambda: sequence.apply_sequence_parallel(in_chunks, group),
        lambda: sequence.apply_sequence_parallel(split, group),
        lambda: split(odd),
        lambda: stage(torch.zeros(1, 4, TINY.hidden)),
    ):
        try:
            attempt()
            messages.append(None)
        except ValueError as error:
            messages.append(str(error))
    return messages


def check() -> None:
    """Judge SequenceParallelNorm and apply_sequence_parallel."""
    ranks = shared(4)
    with ranks.within(20):
        for n, config, meta, steps in (2, ONE_LAYER, False, 2), (4, TINY, True, 1):
            expected = one_process(config, steps)
            for rank, result in enumerate(ranks(in_groups, n, sequence_trial, config, meta, steps)):
                where = f"{n} ranks, rank {rank}{', from the meta device' if meta else ''}"
                judge(where, config, expected, result)
        for rank, (norms, sums) in enumerate(ranks(in_groups, 2, later_trial)):
            where = f"rank {rank}, with reduce_group"
            for name, gradient in norms.items():
                assert relative_error(gradient, expected.gradients[name]) < 1e-5, (
                    f"{where}: {name}'s gradient is not one process's: set it on the weight, no more"
                )
            assert sums == 0, f"{where}: {sums} all-reduces in backward; leave the norms as they are"
        for rank, wrong in enumerate(ranks(in_groups, 2, wrong_norms)):
            assert wrong is None, f"rank {rank}: {wrong}"
        for rank, message in enumerate(ranks(in_groups, 2, refusals)):
            assert None not in message, f"rank {rank}: something is not refused: {message}"


def judge(where: str, config: ModelConfig, expected: Training, result: RankResult) -> None:
    """Judge the training on one rank."""
    first, right = result.losses[0], expected.losses[0]
    assert math.isclose(first, right, rel_tol=1e-5), (
        f"{where}: the first loss is {first:.6f}, not {right:.6f}: forward is wrong; eps?"
    )
    assert set(result.weights) == set(expected.weights), f"{where}: the parameters' names have changed"
    for name, gradient in expected.gradients.items():
        advice = ": the sum of all ranks' parts, once" if name.endswith("norm.weight") else ""
        assert relative_error(result.gradients[name], gradient) < 1e-5, (
            f"{where}: {name}'s gradient is not one process's{advice}"
        )
    for name, weight in expected.weights.items():
        assert relative_error(result.weights[name], weight) < 1e-5, f"{where}: in the end {name} is not one process's"
    assert np.allclose(result.losses, expected.losses, rtol=1e-5), (
        f"{where}: losses {result.losses}, one process's are {expected.losses}"
    )
    assert not result.differ, f"{where}: differ between ranks: {result.differ}"
    forward = sorted(r.collective for r in result.forward.records if r.bytes > 1000)
    counts = {name: forward.count(name) for name in forward}
    assert counts == dict.fromkeys(("all_gather", "reduce_scatter"), 2 * config.layers + 1), (
        f"{where}: forward sends {counts}: one of each for each half layer, and one of each at the ends"
    )
