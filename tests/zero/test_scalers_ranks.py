"""Loss scales on two ranks: what skips a step does so on both, or is refused; sums in float16. CPU, gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from course_kit.ranks import RankError
from course_lib.data_parallel.replicas import DataParallel
from course_lib.five_d.layouts import Layout
from course_lib.five_d.model import ParallelModel
from course_lib.mixed_precision.masters import LossScaler, MasterWeights
from course_lib.zero.optimizer import ZeroOptimizer
from course_lib.zero.sharded_models import full_state_dict, fully_shard

ADAM = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1, "fused": True}
OWNERS = ("DataParallel", "stage 1", "stage 2", "offload", "stage 3")


class Spiked(nn.Module):
    """Its forward returns a loss, whose gradient has one inf, of one element, where `spike` is set."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.bias = nn.Linear(5, 7), nn.Linear(7, 3), nn.Parameter(torch.rand(7))

    def forward(self, x: torch.Tensor, spike: bool = False) -> torch.Tensor:
        found = self.second(torch.tanh(self.first(x)) + self.bias).square().mean()
        return found + self.bias[0] * float("inf") if spike else found


def step_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.rand(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(inputs, spike=(rank, step) == (1, 1))


def owned(name: str, **settings) -> tuple:
    """A model, its inner module, its optimizer, and what is called after backward."""
    net = Spiked()
    if name == "DataParallel":
        model = DataParallel(net)
        return model, net, torch.optim.AdamW(model.parameters(), **settings), model.finish
    if name == "stage 3":
        model = fully_shard(net)
        return model, net, torch.optim.AdamW(model.parameters(), **settings), model.finish
    stage, offload = 2 if name == "stage 2" else 1, name == "offload"
    zero = ZeroOptimizer(net, torch.optim.AdamW, stage=stage, offload=offload, **settings)
    return net, net, zero, zero.finish


def scaled_run(name: str, kind: type) -> tuple[list[float], dict[str, torch.Tensor]]:
    """On a rank: the scale after each step, and the weights after the last one."""
    fused = kind is not ShardedGradScaler  # torch's fused step does not take the shape of its found_inf
    model, net, optimizer, finish = owned(name, **ADAM | {"fused": fused})
    sizes = (2.0**8,) if kind is LossScaler else ("cpu", 2.0**8)
    options = {"interval": 2} if kind is LossScaler else {"growth_interval": 2}
    if kind is LossScaler and name == "stage 3":
        options["group"] = dist.group.WORLD
    scaler, factors = kind(*sizes, **options), []
    for step in range(4):
        scaler.scale(step_loss(model, dist.get_rank(), step)).backward()
        finish()
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.unscale_(scaler)
            optimizer.clip_grad_norm_(1e3)
        elif kind is LossScaler:
            scaler.unscale(optimizer.param_groups[0]["params"])
        else:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        factors.append(scaler.factor.item() if kind is LossScaler else scaler.get_scale())
    return factors, full_state_dict(model) if name == "stage 3" else net.state_dict()


@pytest.mark.parametrize(
    "name, kind",
    [(name, LossScaler) for name in OWNERS] + [("DataParallel", torch.amp.GradScaler), ("stage 3", ShardedGradScaler)],
)
def test_an_inf_of_one_rank_skips_the_step_on_all(two, name, kind):
    """Scales and weights are those of one process that skips the step."""
    model = Spiked()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in (0, 2, 3):
        (sum(step_loss(model, rank, step) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for factors, weights in two(scaled_run, name, kind):
        assert factors == [256, 128, 128, 256], factors
        for key, value in model.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)


def refused(name: str, kind: type, fused: bool, masters: bool = False) -> None:
    model, _, optimizer, finish = owned(name, lr=0.1, fused=fused)
    if masters:
        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1, fused=True)
    scaler = LossScaler() if kind is LossScaler else kind("cpu")
    scaler.scale(model(torch.ones(2, 5))).backward()
    finish()
    scaler.step(optimizer)


@pytest.mark.parametrize(
    "name, kind, fused, words",
    [
        ("stage 1", torch.amp.GradScaler, True, r"use mixed_precision.LossScaler and zero.unscale_\(scaler\)"),
        ("stage 2", torch.amp.GradScaler, False, "GradScaler does not find a ZeroOptimizer's gradients"),
        ("stage 3", torch.amp.GradScaler, True, "skips a step on one rank and not on the others"),
        ("stage 3", torch.amp.GradScaler, False, "skips a step on one rank and not on the others"),
        ("stage 1", LossScaler, True, r"call zero.unscale_\(scaler\) first"),
        ("stage 3", LossScaler, True, r"pass them as LossScaler\(group=...\)"),
    ],
)
def test_what_would_let_ranks_drift_apart_is_refused_in_one_line(two, name, kind, fused, words):
    with pytest.raises(RankError, match=words):
        two(refused, name, kind, fused)
    if (name, kind) == ("stage 3", LossScaler):
        with pytest.raises(RankError, match=words):
            two(refused, name, kind, fused, masters=True)


def test_a_parallel_model_has_no_loss_scale():
    with pytest.raises(ValueError, match="float16 needs a loss scale"):
        ParallelModel(Layout.parse("dp1"), None, None, None, None, torch.float16)


def half_sums() -> dict[str, list[torch.Tensor]]:
    """On a rank: its part of mean gradients of 40,000, whose sum over two ranks float16 does not hold."""
    found = {}
    for name in OWNERS:
        layer = nn.Linear(40, 1, bias=False, dtype=torch.float16)
        if name == "DataParallel":
            model = owner = DataParallel(layer)
        elif name == "stage 3":
            model = owner = fully_shard(layer)
        else:
            stage, offload = 2 if name == "stage 2" else 1, name == "offload"
            model, owner = layer, ZeroOptimizer(layer, torch.optim.SGD, stage=stage, offload=offload, lr=1.0)
        model(torch.full((1, 40), 40_000.0, dtype=torch.float16)).backward()
        owner.finish()
        kept = layer.weight.grad
        if isinstance(owner, ZeroOptimizer):
            (bucket,) = owner.gradients
            (kept,) = bucket.layout.local_views(bucket.gradient)
        found[name] = kept.flatten().tolist()
    return found


def test_sums_in_float16_overflow_only_where_their_mean_does(two):
    for found in two(half_sums):
        for name, gradient in found.items():
            assert gradient and {*gradient} == {40_000}, name


def test_master_weights_take_parameter_groups():
    """Those of 16 bits step as torch's optimizer of float32 does, with the same groups."""
    ours, theirs = ([nn.Parameter(torch.full((2, 2), 0.5)), nn.Parameter(torch.ones(2))] for _ in range(2))
    for parameter in ours:
        parameter.data = parameter.bfloat16()
    groups = [[{"params": [w], "weight_decay": 0.5}, {"params": [b], "weight_decay": 0.0}] for w, b in (ours, theirs)]
    optimizers = MasterWeights(groups[0], torch.optim.AdamW, lr=0.1), torch.optim.AdamW(groups[1], lr=0.1)
    for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for master, parameter in zip(optimizers[0].master_parameters, theirs, strict=True):
        assert torch.equal(master, parameter)
    assert theirs[0].max() < 0.5 and (theirs[1] == 1).all()
