"""The memory of a rank: by part, by stage, of gradients during backward, and with offload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from course_kit.labs.data_parallel import batch_of
from course_kit.labs.zero.models import MiB, storage_bytes
from course_kit.ranks import Ranks
from course_kit.typed import grad_of
from course_lib.data_parallel.replicas import DataParallel, find_diverged_params
from course_lib.single_gpu.memory import param_count, state_bytes
from course_lib.single_gpu.model import ModelConfig, Transformer, loss
from course_lib.single_gpu.profile import MemoryProfile
from course_lib.zero import ZeroOptimizer, fully_shard

STATES = ("parameters", "gradients", "optimizer states")
Measured = dict[tuple[int, int], tuple[dict[str, int], int, int]]  # results of memory_by_stage, by (stage, ranks)


def data_parallel_memory(config: ModelConfig) -> tuple[dict[str, int], list[str]]:
    """Return this rank's bytes by part after a step with AdamW, and the names of tensors that differ between ranks."""
    model = DataParallel(Transformer(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = batch_of(dist.get_rank(), config, seq=64)
    loss(model(inputs), targets).backward()
    model.finish()
    optimizer.step()
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors: dict[str, list[torch.Tensor]] = {
        "parameters": [*parameters],
        "gradients": [grad_of(p) for p in parameters],
        "optimizer states": states,
    }
    everything = nn.ParameterList(nn.Parameter(t, False) for part in tensors.values() for t in part)
    return {part: storage_bytes(each) for part, each in tensors.items()}, find_diverged_params(everything)


def gradient_bytes(stage: int, config: ModelConfig, bucket_mb: float = 0.5) -> tuple[list[int], int, int]:
    """Return three sizes of this rank, in bytes: of gradients in use, after each gradient of a backward; of all memory
    reserved for gradients; and of its local shards of the mean gradient (0 in stage 1, where the buffers contain them).
    """
    model = Transformer(config)
    zero = ZeroOptimizer(model, torch.optim.SGD, stage=stage, bucket_mb=bucket_mb, lr=0.1)
    free = free_buffers(zero)
    reserved = storage_bytes(
        [*free, *(b.gradient for b in zero.gradients), *(b.full_grads.buffer for b in zero.gradients)]
    )

    def in_use() -> int:
        shards = sum(b.gradient.nbytes for b in zero.gradients if b.reduced and stage == 2)
        buffers = [b.full_grads.buffer for b in zero.gradients if b.pool]
        taken = sum(buffer.nbytes for buffer in buffers if buffer is not None)
        stored = (
            sum(b.full_grads.views[p].nbytes for b in zero.gradients for p in b.full_grads.stored) if stage == 1 else 0
        )
        return shards + taken + stored + storage_bytes(p.grad for p in model.parameters())

    inputs, targets = batch_of(dist.get_rank(), config, batch=1, seq=8)
    levels = []
    handles = [p.register_post_accumulate_grad_hook(lambda p: levels.append(in_use())) for p in model.parameters()]
    loss(model(inputs), targets).backward()
    zero.finish()
    for handle in handles:
        handle.remove()
    return levels, reserved, storage_bytes(bucket.gradient for bucket in zero.gradients) if stage == 2 else 0


def gradient_levels(
    ranks: Ranks, config: ModelConfig, depths: Sequence[int]
) -> tuple[dict[int, tuple[list[int], int]], dict[int, dict[int, int]]]:
    """Return, in stages 1 and 2: the bytes of gradients over a backward with the bytes reserved, and the bytes for full
    gradients by number of layers.
    """
    levels, by_depth = {}, {}
    for stage in (1, 2):
        levels[stage] = ranks(gradient_bytes, stage, config)[0][:2]
        models = {depth: ModelConfig(depth, 128, 4, 2, 352, 256, tied=True) for depth in depths}
        of_models = {depth: ranks(gradient_bytes, stage, model)[0] for depth, model in models.items()}
        by_depth[stage] = {depth: reserved - shards for depth, (_, reserved, shards) in of_models.items()}
    return levels, by_depth


def free_buffers(zero: ZeroOptimizer) -> list[torch.Tensor]:
    """Return the free buffers of the gradients' pools."""
    pools = {bucket.pool for bucket in zero.gradients}
    return [buffer for pool in pools if pool is not None for buffer in pool.free]


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes of gradients copied to the host (down), and of shards copied back (up)."""

    def __init__(self, zero: ZeroOptimizer):
        super().__init__()
        self.gradients = {bucket.gradient.untyped_storage()._cdata for bucket in zero.gradients}
        self.shards = {shard.shard.untyped_storage()._cdata for shard in zero.shards}
        self.down = self.up = 0

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name == "aten::_to_copy" and args[0].untyped_storage()._cdata in self.gradients:
            self.down += args[0].nbytes
        if name == "aten::copy_" and args[1].untyped_storage()._cdata in self.shards:
            self.up += args[0].nbytes
        return function(*args, **(kwargs or {}))


def offloaded(config: ModelConfig, offload: bool) -> tuple[int, int, int, int]:
    """Return this rank's bytes of values, of states and master weights, and copied down and up in a step of stage 2.

    Parameters are BF16. On a CPU, host and device share one memory; the copies count nevertheless.
    """
    torch.set_num_threads(1)
    model = Transformer(config).to(torch.bfloat16)
    zero = ZeroOptimizer(model, torch.optim.AdamW, stage=2, bucket_mb=1, offload=offload, lr=1e-3, fused=True)
    inputs, targets = batch_of(dist.get_rank(), config, batch=1, seq=8)
    loss(model(inputs), targets).backward()
    zero.finish()
    with CopiedBytes(zero) as copied:
        zero.step()
    states = [s.shard for s in zero.shards] + [v for state in zero.optimizer.state.values() for v in state.values()]
    return storage_bytes(shard.values for shard in zero.shards), storage_bytes(states), copied.down, copied.up


def memory_by_stage(group: dist.ProcessGroup, stage: int, config: ModelConfig) -> tuple[dict[str, int], int, int]:
    """Return this rank's bytes by part after a step, the bytes of all other live memory, and the parameter count.

    Stages 0 to 2 have BF16 parameters with master weights, and stage 0 is ZeRO over a group of this rank alone. Stage 3
    has float32 shards, gathered in BF16. "buffers" are stage 2's.
    """
    torch.set_num_threads(1)
    full = Transformer(config)
    sizes: dict[str, int] = {}
    zero: ZeroOptimizer | None = None
    optimizer: torch.optim.Optimizer
    model: Any = full  # the Transformer, or its FullyShard
    if stage == 3:
        model = fully_shard(full, group, compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    else:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        over = alone if stage == 0 else group
        zero = ZeroOptimizer(full.bfloat16(), torch.optim.AdamW, over, max(stage, 1), bucket_mb=1, lr=1e-3, fused=True)
        optimizer = zero.optimizer
    inputs, targets = batch_of(dist.get_rank(group), config, batch=1, seq=8)
    with MemoryProfile(model, optimizer) as profile:
        if zero is not None:
            profile.claim([shard.shard for shard in zero.shards if shard.is_copy], "optimizer states")
            profile.claim([bucket.gradient for bucket in zero.gradients], "gradients")
            buffers = free_buffers(zero)
            profile.claim(buffers, "temporary")
            sizes["buffers"] = storage_bytes(buffers)
        loss(model(inputs), targets).backward()
        (model if zero is None else zero).finish()
        profile.claim([p.grad for p in model.parameters()], "gradients")
        if zero is None:
            optimizer.step()
        else:
            zero.step()
            zero.wait()
        profile.mark("between")
    level = profile.peak("between")
    sizes |= {part: level[part] for part in STATES}
    return sizes, level["temporary"] + level["activations"] - sizes.get("buffers", 0), param_count(config)


def expected_bytes(stage: int, n: int, params: int) -> dict[str, float]:
    """Return the bytes by part of memory_by_stage by the formulas of section 1."""
    return state_bytes(params, "fp32" if stage == 3 else "bf16", stage, n)


def memory_table(measured: Measured) -> str:
    """Return a table by stage and number of ranks: MiB of each part, and its relative difference from the formula."""
    head = f"{'stage':<7}{'ranks':<7}" + "".join(f"{part:>22}" for part in STATES)
    lines, worst = [f"{head}{'all':>15}{'buffers':>9}{'else':>7}"], 0.0
    for (stage, n), (sizes, rest, params) in measured.items():
        expected, cells = expected_bytes(stage, n, params), ""
        for part, size in expected.items():
            worst = max(worst, abs(sizes[part] / size - 1))
            cells += f"{sizes[part] / MiB:>13.2f} ({sizes[part] / size - 1:>+5.1%})"
        total = sum(sizes[part] for part in expected)
        cells += f"{total / MiB:>8.1f} of {sum(expected.values()) / MiB:<5.1f}"
        lines.append(f"{stage:<7}{n:<7}{cells}{sizes.get('buffers', 0) / MiB:>7.2f}{rest / MiB:>7.2f}")
    assert worst < 0.05, "the formulas do not hold"
    return "\n".join([*lines, f"MiB, and how far from the formula: at most {worst:.1%}"])
