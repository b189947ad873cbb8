"""FP8 models on ranks, and what one process makes of the same: for the tests of notebook 14b."""

import dataclasses
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_lib.data_parallel.replicas import DataParallel
from course_lib.fp8.gather import Fp8Gather
from course_lib.fp8.program import apply_fp8, update_scales
from course_lib.fp8.recipes import RECIPES, Recipe, by_blocks, per_tensor
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.shards import gather_state_dict
from course_lib.zero.optimizer import ZeroOptimizer
from course_lib.zero.sharded_models import full_state_dict, fully_shard
from course_lib.zero.shards import nested_norm
from split_models import RECOMPUTE, init, whole_gradients

STEPS, BATCH, SEQ = 3, 4, 64  # 256 tokens: 128 for each of two ranks
CASTS = {
    "current": per_tensor(),
    "delayed": per_tensor(history=2, weight_history=2),
    "blocks": by_blocks(),
    "blocks, powers of two": by_blocks(power_of_two=True),
}
SGD = {"lr": 0.5, "momentum": 0.9}  # unlike AdamW, it does not forgive a wrong scale
WHOLE_BLOCKS = ModelConfig(layers=1, hidden=256, heads=2, kv_heads=2, ffn_hidden=256, vocab=97)  # of 128, on two ranks
ODD = ModelConfig(layers=2, hidden=36, heads=2, kv_heads=2, ffn_hidden=44, vocab=97)  # no multiples of 16


def recipe(name: str) -> Recipe:
    return dataclasses.replace(RECIPES["DeepSeek-V3"], casts=CASTS[name])


def config_for(name: str) -> ModelConfig:
    """Sizes at which no block of 128 is on two ranks."""
    return WHOLE_BLOCKS if name.startswith("blocks") else ODD


def plain_model(of: ModelConfig) -> Transformer:
    """In float32; its weights are larger than at the start of a training."""
    model = Transformer(of)
    for name, parameter in model.named_parameters():
        init(name, parameter, of)
    return model


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, [b, s] each."""
    inputs, targets = torch.randint(97, (2, BATCH, SEQ), generator=torch.Generator().manual_seed(step)).unbind()
    return inputs.clone(), targets.clone()


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """In the logits' dtype, which the course's own loss is not."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluated(model, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss as an evaluation finds it, which changes no history."""
    model.eval()
    loss = mean_loss(model(inputs), targets)
    model.train()
    return loss


def norm_of(parameters) -> torch.Tensor:
    """Of the gradients of all ranks, in float32."""
    none = torch.zeros(0)
    return nested_norm([(none if p.grad is None else p.grad.float(), placement_of(p).norm_groups) for p in parameters])


def weights_and_histories(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By name; a matrix of which delayed scaling has seen nothing since the last step has no amax to compare."""
    return {f"end {name}": tensor.detach().clone() for name, tensor in state.items() if not name.endswith(".amax")}


@functools.cache
def one_process(of: ModelConfig, how: str | None, dtype: torch.dtype, recompute: str = "none", steps: int = STEPS):
    """Loss, gradients and norm of each step, and the state after the last, by name. how: of CASTS; None: not FP8."""
    model, found = plain_model(of).to(dtype), {}
    if how is not None:
        apply_fp8(model, recipe(how))
    RECOMPUTE[recompute](model, None)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batches(step)
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        found |= {f"gradient {step} {name}": p.grad.clone() for name, p in model.named_parameters()}
        found[f"norm {step}"] = norm_of(model.parameters())
        optimizer.step()
        update_scales(model)
        found[f"evaluation {step}"] = evaluated(model, inputs, targets)
    return found | weights_and_histories(model.state_dict())


def split_fp8(of: ModelConfig, how: str, dtype: torch.dtype, group=None, batch_group=None) -> Transformer:
    """A model split by tensor parallelism, in FP8."""
    model = apply_tensor_parallel(plain_model(of), group, gather_logits=True).to(dtype)
    return apply_fp8(model, recipe(how), batch_group)


def in_tensor_parallel(of: ModelConfig, how: str, dtype: torch.dtype, recompute: str = "none") -> dict:
    """On a rank: the same as one_process of a split model."""
    model, found = RECOMPUTE[recompute](split_fp8(of, how, dtype), dist.group.WORLD), {}
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batches(step)
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        found |= {f"gradient {step} {name}": whole for name, whole in whole_gradients(model).items()}
        found[f"norm {step}"] = norm_of(model.parameters())
        optimizer.step()
        update_scales(model)
        found[f"evaluation {step}"] = evaluated(model, inputs, targets)
    return found | weights_and_histories(gather_state_dict(model))


def sharded_gradients(model) -> dict[str, torch.Tensor]:
    """Of a model by fully_shard: by name, put together from all ranks' pieces. Collective."""
    wholes = {}
    for part in (part for unit in [*model.units, model.root] for part in unit.flat_params):
        shard = torch.zeros_like(part.shard)
        for parameter, piece in zip(part.sharded_params, part.layout.local_views(shard), strict=True):
            if parameter.grad is not None:
                piece.copy_(parameter.grad)
        gathered = (whole.clone() for whole in part.layout.gather(shard))  # each in memory of its own
        wholes.update(zip((each[0][0] for each in part.slots), gathered, strict=True))
    return wholes


def sharing_the_batch(
    model: Transformer, way: str, group, optimizer=torch.optim.SGD, settings=SGD, steps: int = STEPS, **options
) -> dict[str, torch.Tensor]:
    """On a rank: the same of a model whose ranks in `group` have a part of the batch each; gradients and norms where
    they are in .grad. way: DataParallel, ZeRO-1, ZeRO-3, or "FP8 gather" (ZeRO-3 too); options: of fully_shard.
    """
    rank, n, found = group.rank(), group.size(), {}
    if way == "DataParallel":
        wrapped = sharding = DataParallel(model, group)
        stepper = optimizer(model.parameters(), **settings)
    elif way == "ZeRO-1":
        wrapped, sharding = model, ZeroOptimizer(model, optimizer, group, stage=1, **settings)
        stepper = sharding
    else:
        encode = Fp8Gather() if way == "FP8 gather" else None
        wrapped = sharding = fully_shard(model, group, encode=encode, **options)
        stepper = optimizer(wrapped.parameters(), **settings)
    for step in range(steps):
        stepper.zero_grad()
        inputs, targets = (part.chunk(n)[rank] for part in batches(step))
        loss = mean_loss(wrapped(inputs), targets)
        loss.backward()
        sharding.finish()
        found[f"loss {step}"] = loss.detach().clone()
        dist.all_reduce(found[f"loss {step}"], group=group)
        found[f"loss {step}"] /= n
        if way == "DataParallel":
            found |= {f"gradient {step} {name}": whole for name, whole in whole_gradients(model).items()}
        elif way != "ZeRO-1":
            found |= {f"gradient {step} {name}": whole for name, whole in sharded_gradients(wrapped).items()}
        if way != "ZeRO-1":
            found[f"norm {step}"] = norm_of(wrapped.parameters())
        stepper.step()
        evaluated(wrapped, inputs, targets)  # between step and update_scales: of no consequence
        update_scales(model)
        found[f"evaluation {step}"] = evaluated(wrapped, inputs, targets)
        dist.all_reduce(found[f"evaluation {step}"], group=group)
        found[f"evaluation {step}"] /= n
    state = gather_state_dict(model) if way in ("DataParallel", "ZeRO-1") else full_state_dict(wrapped)
    for name in (name for name in state if name.endswith("quantizers.gradient.history")):
        state[name] /= n  # of the mean over a part of the batch
    return found | weights_and_histories(state)


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over that of the exact tensor."""
    return ((found - exact).norm() / exact.norm()).item()


def not_the_same(found: dict, expected: dict, relative: float) -> list[str]:
    """What differs by more than `relative` of a tensor's largest element; norms are in float32: by more than 1e-6."""
    wrong = [f"{name} is not expected" for name in found.keys() - expected.keys()]
    for name in found.keys() & expected.keys():
        limit = max(relative, 1e-6) if name.startswith("norm") else relative
        error = ((found[name] - expected[name]).abs().max() / expected[name].abs().max()).item()
        wrong += [f"{name}: {error:.1e}"] * (not error <= limit)
    return wrong
