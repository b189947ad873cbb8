"""Check of exercise 10.7: memory, states, dtypes and steps of a model from `parallelize`."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import nn

from course_kit.labs.five_d.models import ADAMW, MOE, SHALLOW, TINY, Steps, after_steps, differences
from course_kit.ranks import shared
from course_lib.five_d import model
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import Mesh, build_mesh
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import ModelConfig
from course_lib.single_gpu.placement import placement_of
from course_lib.single_gpu.profile import MemoryProfile

CASES = (
    ("cp2,tp2,sp,zero2,mb8", None, SHALLOW, 1),
    ("cp2,pp2,mb4", None, TINY, 1),
    ("dp2,pp2,zero3,keep,mb2", None, TINY, 1),
    ("dp4,ep2,zero1,mb2", MOE, SHALLOW, 2),
)


class Narrow(NamedTuple):
    """Dtypes and optimizer of a model in bfloat16 with SGD."""

    used: set[torch.dtype]  # of the weights that the stages compute with
    dtypes: set[torch.dtype]  # of gradients' sums, and of what the optimizer updates
    optimizer: tuple[str, float]  # its class and lr
    decays: tuple[float, ...]  # weight_decay of the parameter groups, the largest first
    transformed: int  # calls of an extra transform
    follows_seed: bool  # another seed makes other weights
    stated: torch.dtype  # of the ParallelModel


class RankResult(NamedTuple):
    """A rank's report on its model."""

    peak: int  # bytes, while a deep model is built; 0 of a shallow one
    local_bytes: int  # bytes of its parameters
    states: int  # elements of the optimizer's states
    most: float  # the limit on them
    stage: int | None  # of ZeRO
    summed: int  # over how many ranks a weight's gradient is summed, at most
    narrow: Narrow
    steps: Steps


def narrowed(layout: Layout, mesh: Mesh, config: ModelConfig, moe: dict | None) -> Narrow:
    """On a rank: build the model in bfloat16 with SGD, and report on it."""
    settings: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "optimizer_cls": torch.optim.SGD,
        "lr": 0.25,
        "weight_decay": 0.5,
    }
    called: list = []
    plain = model.parallelize(config, layout, mesh, moe=moe, seed=5, **settings)
    parallel = model.parallelize(config, layout, mesh, [called.append], moe=moe, **settings)
    pairs = zip(plain.stages.parameters(), parallel.stages.parameters(), strict=True)
    follows_seed = any(not torch.equal(one, other) for one, other in pairs)
    if layout.zero_stage == 3:
        parts = [part for unit in getattr(parallel.sharding, "units", ()) for part in unit.flat_params]
        used, summed = {part.buffer.values.dtype for part in parts}, {part.reduce_dtype for part in parts}
    else:
        for hook in filter(None, [parallel.runner.before_step]):
            hook()
        used = {weight.dtype for weight in parallel.stages.parameters()}  # as a step has them
        for hook in filter(None, [parallel.runner.after_step]):
            hook()
        summed = {each.gradient.dtype for each in getattr(parallel.sharding, "gradients", ())}
    inner = getattr(parallel.optimizer, "optimizer", parallel.optimizer)
    updated = {weight.dtype for group in inner.param_groups for weight in group["params"]}
    decays = sorted({group["weight_decay"] for group in inner.param_groups}, reverse=True)
    made = type(inner).__name__, inner.param_groups[0]["lr"]
    return Narrow(used, summed | updated, made, tuple(decays), len(called), follows_seed, parallel.dtype)


def parallelize_trial(text: str, moe: dict | None, config: ModelConfig, steps: int) -> RankResult:
    """On a rank: build the model, train it for some steps, and build it again in 16 bits."""
    layout = Layout.parse(text)
    mesh = build_mesh(layout)
    with MemoryProfile(nn.Linear(1, 1)) if config.layers > 2 else contextlib.nullcontext() as profile:
        parallel = model.parallelize(config, layout, mesh, moe=moe, **ADAMW)
    weights = [weight.numel() for weight in parallel.stages.parameters()]
    summed = max((placement_of(weight).reduce_group or mesh.replicas).size() for weight in parallel.stages.parameters())
    result = after_steps(parallel, steps)
    inner = getattr(parallel.optimizer, "optimizer", parallel.optimizer)  # the inner one of a ZeroOptimizer
    states = sum(each.numel() for state in inner.state.values() for each in state.values() if each.dim())
    share = mesh.experts.size() if layout.zero_stage in (1, 2) else 1  # experts are on the fewest ranks
    most = 2 * sum(weights) / share + 16 * len(weights)  # Adam has two, and shards are padded
    stage = getattr(parallel.sharding, "stage", None)
    peak = sum(profile.peak().values()) if profile else 0
    narrow = narrowed(layout, mesh, config if layout.zero_stage else SHALLOW, moe)
    return RankResult(peak, 4 * sum(weights), states, most, stage, summed, narrow, result)


def check() -> None:
    """Assert four layouts on four ranks."""
    for text, moe, config, steps in CASES:
        with shared(4).within(40):
            of_ranks = shared(4)(parallelize_trial, text, moe, config, steps)
        full, zero = param_count(config) * 4, Layout.parse(text).zero_stage
        for rank, report in enumerate(of_ranks):
            at = f"{text}, rank {rank}"
            share = 4 if zero == 3 else 2  # of the two layouts where memory is measured
            limit = 2 * full / share + 12 * config.vocab * config.hidden  # twice its parts, and three full matrices
            assert config is SHALLOW or report.peak <= limit, (
                f"{at}: {report.peak:,} bytes at the peak, shards have {report.local_bytes:,}, the model {full:,}"
            )
            assert report.states <= report.most, (
                f"{at}: {report.states:,} elements in the optimizer's states; with the states sharded, "
                f"{report.most:,.0f} at most"
            )
            assert text != "cp2,pp2,mb4" or report.summed == 4, (
                f"{at}: cp 2 x the two stages that have the embedding add up its gradient, not {report.summed} ranks"
            )
            assert zero not in (1, 2) or report.stage == zero, f"{at}: gradients are sharded as in stage {report.stage}"
            used, dtypes, (name, lr), decays, transformed, follows_seed, stated = report.narrow
            assert transformed == 1, f"{at}: an extra transform is called {transformed} times, not once on its stage"
            assert follows_seed, f"{at}: seed = 5 gives the weights of seed 0"
            assert (name, lr, decays[0]) == ("SGD", 0.25, 0.5), (
                f"{at}: for optimizer_cls=torch.optim.SGD, lr=0.25, weight_decay=0.5 it makes {name}, with lr "
                f"{lr} and weight_decay {decays[0]}: are optimizer_cls and **settings passed on?"
            )
            assert decays == (0.5, 0.0), f"{at}: norms decay as matrices do: does it get decay_groups(runner.stages)?"
            assert used == {torch.bfloat16} and dtypes == {torch.float32}, (
                f"{at}, dtype bfloat16: the stages compute with {used}, and should with bfloat16; gradients' sums and "
                f"the optimizer's weights are {dtypes}, and should be float32"
            )
            assert stated == torch.bfloat16, f"{at}, dtype bfloat16: the ParallelModel has {stated}: pass `dtype` on"
        numbers, weights = differences([report.steps for report in of_ranks], text, moe, steps, config)
        assert numbers < 1e-5, f"{text}: losses or norms are {numbers:.1e} away from one process's"
        assert weights < 1e-5, f"{text}: weights after step {steps} are {weights:.1e} away from one process's"
