"""The break-it lab of exercise 07.3: g and g* without the gradients of the norms, and three more ways to train."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_kit.labs.sequence_parallel.models import batch_of, full_gradients, one_process
from course_kit.labs.tensor_parallel.models import TINY, in_groups, sgd
from course_kit.ranks import shared
from course_kit.typed import override, transformer_blocks, world
from course_lib.sequence_parallel import model as sequence
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.regions import gather_from_group
from course_lib.tensor_parallel.shards import TensorShard
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy

FAULTS = ("norms averaged", "g", "right", "norms left out")  # of runs 0 to 3 in the notebook


def swap_gates(model: nn.Module) -> nn.Module:
    """Replace f and f* by g and g* in all layers of a tensor-parallel model, and change nothing else."""
    for module in model.modules():
        if hasattr(module, "matmul"):
            override(module, matmul=sequence.GatheredMatmul)
        elif hasattr(module, "output_reduce"):
            override(module, output_reduce=sequence.reduce_scatter_sequence)
    return model


def differing(model: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Return the names of the parameters that differ between ranks and should not. Collective."""
    sums = {
        n: p.detach().double().sum().item() for n, p in model.named_parameters() if not placement_of(p).tensor_shard
    }
    of_all: list = [None] * group.size()
    dist.all_gather_object(of_all, sums, group)
    return [name for name in sums if len({sums_of_rank[name] for sums_of_rank in of_all}) > 1]


def drift_trial(steps: int, config: ModelConfig = TINY) -> tuple[list[float], list[str], torch.Tensor]:
    """On a rank: losses, the names that differ after the last step, and the first norm's weights at each step."""
    group = world()
    model = swap_gates(apply_tensor_parallel(Transformer(config), group))
    optimizer, (inputs, targets), losses, norms = sgd(model.parameters(), 0.1), batch_of(config), [], []
    for _ in range(steps):
        optimizer.zero_grad()
        step_loss = vocab_parallel_cross_entropy(model(inputs), targets, group, config.vocab)
        step_loss.backward()
        losses.append(step_loss.item())
        norms.append(transformer_blocks(model)[0].attention_norm.weight.detach().clone())
        optimizer.step()
    return losses, differing(model, group), torch.stack(norms)


class CutMatmul:
    """Gathers as GatheredMatmul does, but returns the gradient of the local tokens in backward, not the sum."""

    @staticmethod
    def apply(part: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shard = TensorShard.of(part.shape[1] * group.size(), group, 1)
        x = gather_from_group(part, shard)
        return tuple(F.linear(x, weight) for weight in weights)


def faulty_model(fault: str, group: dist.ProcessGroup, config: ModelConfig) -> nn.Module:
    """Return a split model with one fault, or none."""
    model = swap_gates(apply_tensor_parallel(Transformer(config), group))

    def sum_gradient(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=group)
        return total / group.size() if fault == "norms averaged" else total

    for module in model.modules():
        if isinstance(module, nn.RMSNorm) and fault != "norms left out":
            module.weight.register_hook(sum_gradient)
        elif hasattr(module, "matmul") and fault == "g":
            override(module, matmul=CutMatmul)
    return model


def lab_trial(
    group: dist.ProcessGroup, fault: str, config: ModelConfig = TINY, steps: int = 3
) -> tuple[list[str], dict[str, float]]:
    """On a rank: the names that differ after some steps, and the norm of each gradient in the first step."""
    model = faulty_model(fault, group, config)
    optimizer, (inputs, targets) = sgd(model.parameters(), 0.1), batch_of(config)
    for number in range(steps):
        optimizer.zero_grad()
        vocab_parallel_cross_entropy(model(inputs), targets, group, config.vocab).backward()
        if number == 0:
            norms = {name: gradient.norm().item() for name, gradient in full_gradients(model).items()}
        optimizer.step()
    return differing(model, group), norms


def all_faults(group: dist.ProcessGroup) -> list[tuple[list[str], dict[str, float]]]:
    """On a rank: run lab_trial with each fault."""
    return [lab_trial(group, fault) for fault in FAULTS]


@functools.cache
def evidence(size: int) -> list[tuple[list[str], dict[str, float]]]:
    """Run each fault on `size` ranks; return the names that differ, and by parameter the norm of its gradient over the
    norm in one process.
    """
    expected = one_process(TINY).gradients
    return [
        (names, {name: norm / expected[name].norm().item() for name, norm in norms.items()})
        for names, norms in shared(4)(in_groups, size, all_faults)[0]
    ]
