"""A small MoE model, its training in one process, and the same training on groups of four ranks."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from course_kit.labs.tensor_parallel.models import sgd
from course_kit.ranks import shared
from course_kit.typed import grad_of, transformer_blocks, world
from course_lib.collectives.traffic import count_traffic
from course_lib.data_parallel.replicas import DataParallel, find_diverged_params, parallel_accumulate
from course_lib.expert_parallel import mixture as mixtures
from course_lib.expert_parallel import model as parallel
from course_lib.expert_parallel import router
from course_lib.expert_parallel.experts import Experts
from course_lib.expert_parallel.mixture import MoE
from course_lib.expert_parallel.model import ExpertGroups
from course_lib.sequence_parallel.model import apply_sequence_parallel
from course_lib.single_gpu.model import ModelConfig, Transformer, init_parameter, loss
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.by_hand import cut
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.shards import gather_state_dict, materialize
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from course_lib.zero.shards import clip_grad_norm_

TINY = ModelConfig(2, 48, 4, 2, 40, 97, tied=True)  # four heads, two K/V heads, an odd vocabulary
EXPERTS, WIDTH = 8, 24  # of a mixture
ROUTING = {"aux_loss_coeff": 0.05, "z_loss_coeff": 0.01}
RATE = 0.3  # of learning


class Layout(NamedTuple):
    """A training on four ranks."""

    sizes: tuple[int, int, int, int]  # copies, nodes, ranks per node, tensor-parallel ranks
    tp: str = "none"  # none, matrices (experts too), sequence (all), tokens (experts not split)
    routing: tuple[tuple[str, object], ...] = ()
    rate: float = 0.0  # of the biases
    steps: int = 3


LAYOUTS = (
    Layout((1, 2, 2, 1), "none", (("nodes", 2), ("node_limit", 1)), 0.0, 1),
    Layout((1, 1, 2, 2), "matrices", (), 0.0, 1),
    Layout((1, 1, 2, 2), "sequence", (), 0.0, 1),
    Layout((2, 1, 2, 1), "none", (("score", "sigmoid"),), 0.05, 2),
)


def batch_of(config: ModelConfig = TINY, batch: int = 4, seq: int = 12) -> torch.Tensor:
    """Return inputs and targets, each [b, s], the same on all ranks."""
    return torch.randint(config.vocab, (2, batch, seq), generator=torch.Generator().manual_seed(100))


def mixture(config: ModelConfig = TINY, **routing) -> Transformer:
    """Return an MoE model on the meta device."""
    with torch.device("meta"):
        model = mixtures.apply_moe(Transformer(config), EXPERTS, 2, WIDTH, **dict(ROUTING, **routing))
    return cast(Transformer, model)


def filled(model: Transformer) -> Transformer:
    """Return the model with initial values, larger for the experts so that they matter."""

    def init(name: str, tensor: torch.Tensor) -> None:
        init_parameter(name, tensor, model.config)
        if ".experts." in name:
            with torch.no_grad():
                tensor.mul_(5)

    return cast(Transformer, materialize(model, init))


class Training(NamedTuple):
    """Losses by step, gradients of the first step, and weights after the last step."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def process_trial(routing: tuple, rate: float, steps: int) -> Training:
    """Train in one process, with all experts."""
    model, losses = filled(mixture(**dict(routing))), []
    gradients: dict[str, torch.Tensor] = {}
    optimizer, (inputs, targets) = sgd(model.parameters(), RATE), batch_of()
    for _ in range(steps):
        optimizer.zero_grad()
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        gradients = gradients or {name: grad_of(p).clone() for name, p in model.named_parameters()}
        losses.append(step_loss.item())
        optimizer.step()
        router.update_bias(model, router.take_counts(model), rate)
    return Training(losses, gradients, {name: tensor.clone() for name, tensor in model.state_dict().items()})


@functools.cache
def one_process(routing: tuple = (), rate: float = 0.0, steps: int = 3) -> Training:
    """Return the training of one process. It runs on a rank, which has already imported the optimizer's modules."""
    return shared(4)(process_trial, routing, rate, steps)[0]


def spread(groups: ExpertGroups, tp: str, **routing) -> Transformer:
    """Return the MoE model on these groups. tp: see Layout. Collective."""
    model, all_ranks = mixture(**routing), world()
    if tp != "none":
        apply_tensor_parallel(model, groups.tp)
    if tp in ("sequence", "tokens"):
        apply_sequence_parallel(model, groups.tp, reduce_group=all_ranks)
    batch_group = all_ranks if tp in ("sequence", "tokens") else groups.dp
    if tp == "tokens":  # experts are spread over all ranks
        parallel.apply_expert_parallel(model, all_ranks, batch_group=batch_group)
        return filled(model)
    split = groups.tp if tp != "none" else None
    parallel.apply_expert_parallel(model, groups.exchange, groups.copies, batch_group, split)
    experts = cast(MoE, transformer_blocks(model)[0].mlp).experts
    check_shapes(experts, math.prod(each.size() for each in groups.exchange), groups.tp.size())
    return filled(model)


def check_shapes(experts: Experts, ep: int, tp: int) -> None:
    """On a rank: raise AssertionError unless its local experts have the shapes of 1/ep and 1/tp."""
    wide, tall = [EXPERTS // ep, WIDTH // tp, TINY.hidden], [EXPERTS // ep, TINY.hidden, WIDTH // tp]
    for name, wanted in (("gate_proj", wide), ("up_proj", wide), ("down_proj", tall)):
        shape = list(getattr(experts, name).weight.shape)
        assert shape == wanted, f"ep {ep}, tp {tp}: this rank's shard of {name} is {shape}, not {wanted}"


class RankResult(NamedTuple):
    """One rank's results of a training on four ranks."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]  # of the first step, gathered
    weights: dict[str, torch.Tensor]  # after the last step, gathered
    norm: float  # of all gradients, by the groups' sums
    ways: list[str]  # collectives in forward
    hops: int  # groups that exchange in forward
    drifted: list[str]  # parameters that differ between ranks that should hold the same


def full_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient of the full parameter, gathered if the parameter is a shard. Collective."""
    shard = placement_of(parameter).tensor_shard
    return shard.gather(grad_of(parameter)) if shard else grad_of(parameter).clone()


def parallel_trial(
    sizes: tuple, tp: str = "none", routing: tuple = (), rate: float = 0.0, steps: int = 3
) -> RankResult:
    """On each of four ranks: run the training of one_process on the ranks of a Layout, with data parallelism."""
    _, nodes, inside, tp_size = sizes
    groups = ExpertGroups.make(nodes * inside, nodes, tp_size)
    model = spread(groups, tp, **dict(routing))
    try:
        dp = DataParallel(model, groups.dp)
    except ValueError as error:
        raise AssertionError(f"DataParallel: {error}: is the reduce_group of the experts right?") from None
    optimizer, losses, norm = sgd(model.parameters(), RATE), [], 0.0
    gradients: dict[str, torch.Tensor] = {}
    inputs, targets = (cut(each, groups.dp, 0) for each in batch_of())

    def summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if tp == "none":
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return vocab_parallel_cross_entropy(logits, targets, groups.tp, model.config.vocab, "sum")

    with count_traffic() as traffic, torch.no_grad():
        model.eval()(inputs)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(parallel_accumulate(dp, [(inputs, targets)], loss_of=summed).item())
        if not gradients:
            gradients = {name: full_gradient(p) for name, p in model.named_parameters()}
            norm = clip_grad_norm_(model.parameters(), 1e9).item()
        optimizer.step()
        router.update_bias(model, router.take_counts(model), rate)
    experts = nn.ModuleList([cast(MoE, block.mlp).experts for block in transformer_blocks(model)])
    routers = nn.ModuleList(router.routers_of(model))
    drifted = find_diverged_params(experts, groups.copies) + find_diverged_params(routers, groups.dp)
    ways = sorted({record.collective for record in traffic.records})
    hops = len({record.group for record in traffic.select("all_to_all").records})
    return RankResult(losses, gradients, gather_state_dict(model), norm, ways, hops, drifted)
