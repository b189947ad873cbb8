"""What ZeroOptimizer does with a step's gradients, and the hooks that bring them: `GradientRounds`, `watch`.

A backward that sends is a round: each gradient goes to its bucket when it is there, and a full bucket is sent. After
the last round of a step each rank has its pieces of the mean gradient, which are clipped by the norm of all.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from course_lib.mixed_precision.masters import LossScaler
from course_lib.single_gpu.placement import placement_of
from course_lib.zero.optimizer_shards import GradientShard, OptimizerShard, ShardReducer
from course_lib.zero.sharded_parameters import find_blocks
from course_lib.zero.shards import nested_norm, norm_group


class GradientRounds:
    """What ZeroOptimizer does with the gradients of a step: sends, sums, clips and forgets them."""

    module: nn.Module | None
    group: dist.ProcessGroup
    stage: int
    synchronizes: bool  # False inside no_sync()
    unscaled = False  # whether unscale_() has divided this step's gradients
    gradients: list[GradientShard]
    shards: list[OptimizerShard]
    reducer: ShardReducer

    @contextmanager
    def no_sync(self):
        """Inside, backward adds up this rank's own gradients and sends nothing. Raises RuntimeError in stage 2."""
        if self.stage == 2:
            raise RuntimeError(
                "no_sync() keeps whole gradients, as stage 1 does; stage 2 sends those of every backward"
            )
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def finish(self) -> None:
        """After a step's last backward, on all ranks: wait until each has its pieces of the mean gradient.

        clip_grad_norm_() and step() call it. A rank without a batch takes part with zeros. Raises RuntimeError inside
        no_sync().
        """
        if not self.synchronizes:
            raise RuntimeError("finish() inside no_sync(): the last backward of a step and what follows stand outside")
        if not all(bucket.reduced and not bucket.full_grads.stored for bucket in self.gradients):
            self.reducer.finish()

    def unscale_(self, scaler: LossScaler) -> None:
        """Divide the mean gradient by the scale of a LossScaler, before it is clipped, and look for inf and nan on all
        ranks. Raises ValueError where gradients are summed in float16: `grad_dtype=torch.float32` changes that.
        """
        self.finish()
        scaler.unscale([SimpleNamespace(grad=bucket.gradient) for bucket in self.gradients])
        if scaler.group is None:
            dist.all_reduce(scaler.found_inf, dist.ReduceOp.MAX, self.group)
        self.unscaled = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks for it before a step. Raises RuntimeError: it would find no gradients."""
        raise RuntimeError(
            "torch.amp.GradScaler does not find a ZeroOptimizer's gradients: use mixed_precision.LossScaler and "
            "zero.unscale_(scaler), or BF16 without a scaler"
        )

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the mean gradient so that the norm of all of it is at most `max_norm`; returns the norm it had."""
        self.finish()
        outer = [placement_of(bucket.parameters[0]).norm_groups for bucket in self.gradients]
        own = [norm_group(self.group, b.group, others) for b, others in zip(self.gradients, outer, strict=True)]
        parts = [(b.gradient, (first, *others)) for b, first, others in zip(self.gradients, own, outer, strict=True)]
        norm = nested_norm(parts)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([bucket.gradient for bucket in self.gradients], factor)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        if self.reducer.unfinished:
            self.reducer.finish()
        self.unscaled = False
        for bucket in self.gradients:
            bucket.clear()


def watch(zero: GradientRounds) -> None:
    """Set the hooks: on gradients, and before whatever reads the module's parameters."""
    weak, handles = weakref.ref(zero), []  # hooks must not keep the optimizer alive
    for parameter in zero.reducer.bucket_of:
        hook = lambda p: weak().reducer.add(p, weak().synchronizes)  # noqa: E731
        handles.append(parameter.register_post_accumulate_grad_hook(hook))
    shard_of = {parameter: shard for shard in zero.shards for parameter in shard.parameters}
    places = []  # a block may use its layers' parameters without calling the layers: wait for all of them
    if zero.module is not None:
        places += [(block, block.parameters()) for unit in find_blocks(zero.module) for block in unit]
        places += [(module, module.parameters(recurse=False)) for module in zero.module.modules()]
    for module, parameters in places:
        for shard in {shard_of[p] for p in parameters if p in shard_of}:
            handles.append(module.register_forward_pre_hook(lambda *_, shard=shard: shard.wait()))
    if zero.module is not None:
        handles.append(zero.module.register_state_dict_pre_hook(lambda *_: weak().wait()))
        handles.append(zero.module.register_load_state_dict_pre_hook(lambda *_: weak().wait()))
        handles.append(zero.module.register_load_state_dict_post_hook(lambda *_: weak().copy_from_params()))
    weakref.finalize(zero, release, handles, zero.shards).atexit = False


def release(handles: list, shards: list[OptimizerShard]) -> None:
    """Leave a model without hooks and with whole values."""
    for handle in handles:
        handle.remove()
    for shard in shards:
        shard.wait()
