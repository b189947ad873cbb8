"""ZeRO stage 3: parameters, gradients and optimizer states sharded over N ranks, (2 Psi + 2 Psi + k Psi) / N bytes.

    forward    gather 1 | gather 2    | gather 3    |                    the next unit's all-gather beside this one's
                        | unit 1 free | unit 2 free | unit 3 (kept)      computation; the last one is kept
    backward            | gather 1    |                                  gathered again, in the order of backward
               unit 3   | unit 2      | unit 1                           each freed when its gradients are sent
                        | reduce 3    | reduce 2    | reduce 1

With L units a rank takes part in 2 L - 1 all-gathers and L reduce-scatters, and sends (N-1)/N x (3 Psi less the last
unit) elements. (Rajbhandari et al. 2020, ZeRO, §5.3, §7.2.2; The Ultra-Scale Playbook, 2025, chapter 3.)
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from course_lib.data_parallel.gradient_owner import LocalGradient, UpdatedTensor, module_gradients
from course_lib.zero.sharded_parameters import FSDPUnit, ShardedParameters


def in_backward() -> bool:
    """Return True if a backward calls this function: in a recomputed forward, for instance."""
    return torch._C._current_graph_task_id() != -1


def scaled_by_one_rank() -> bool:
    """Return True if a torch.amp.GradScaler makes this step: unlike ShardedGradScaler, it does not ask other ranks.

    A GradScaler marks fused optimizers only, and calls `step()` of any other without arguments, so nothing but the call
    stack tells. The hook before a step is its only caller.
    """
    frame: FrameType | None = sys._getframe()
    code = torch.amp.GradScaler.step.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None and type(frame.f_locals["self"]) in (torch.amp.GradScaler, torch.cuda.amp.GradScaler)


class FullyShard(nn.Module):
    """The wrapper that `fully_shard` returns: `loss(model(x)).backward(); model.finish(); optimizer.step()`.

    It gathers units before they are used, frees them afterwards, and reduces their gradients. All ranks run the same
    units in the same order. group: the ranks that a batch is divided among; root: the unit of the parameters that
    belong to no unit or to two, unsharded from forward to finish(). state_dict() has this rank's local shards; see
    full_state_dict.
    """

    supports_no_sync = True

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        units: list[FSDPUnit],
        root: FSDPUnit,
        compute_dtype: torch.dtype | None,
    ):
        super().__init__()
        self.module, self.group, self.units, self.root, self.compute_dtype = module, group, units, root, compute_dtype
        self.forward_order: list[FSDPUnit] = []  # the units of the last forward
        self.unreduced: list[FSDPUnit] = []  # units whose backward has begun and whose gradients are still here
        self.reducing: list[FSDPUnit] = []  # units whose reduce-scatter is in flight
        for unit, successor in zip(units, units[1:], strict=False):
            unit.successor = successor
        # Hooks of the module and of autograd graphs keep this wrapper alive: a backward may run after the caller has
        # dropped it. The hook on all optimizers must not.
        module.register_forward_pre_hook(lambda *_: self.gather_root())
        for unit in units:
            for each in unit.modules:
                each.register_forward_pre_hook(lambda *_, unit=unit: self.pre_forward(unit))
                each.register_forward_hook(lambda _, __, out, unit=unit: self.post_forward(unit, out))
        weak = weakref.WeakMethod(self.pre_step)

        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (method := weak()) is not None:
                method(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(hook).remove)

    @property
    def flat_params(self) -> list[ShardedParameters]:
        """The flat parameters of all units."""
        return [flat for unit in [*self.units, self.root] for flat in unit.flat_params]

    @property
    def unfinished(self) -> bool:
        """True if there are gradients since the last finish()."""
        return bool(self.unreduced or self.reducing or self.root.has_gradients)

    def forward(self, *args, **kwargs) -> Any:
        """Return the module's output; floating-point arguments are cast to compute_dtype."""
        root = [] if self.unfinished else [self.root]  # the root stays gathered between micro-batches
        self.send_all()  # gradients of an earlier micro-batch
        for unit in [*self.units, *root]:  # after a forward without backward: the shards may have changed since
            unit.free()
        for unit in [self.root, *(self.forward_order or self.units)[:1]]:
            unit.gather()
        self.forward_order = []
        if self.compute_dtype is not None:
            args, kwargs = tree_map(self.cast, (args, kwargs))
        out = self.module(*args, **kwargs)
        for unit in self.forward_order[-1:]:
            unit.successor = None
        needed = [self.root, *self.forward_order[-1:]] if torch.is_grad_enabled() else []
        for unit in [*self.units, self.root]:
            if unit not in needed:
                unit.free()
        return out

    def cast(self, value: Any) -> Any:
        """Return a floating-point tensor in compute_dtype, and any other value unchanged."""
        return value.to(self.compute_dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    def gather_root(self) -> None:
        """Gather the root's parameters."""
        self.root.gather()
        self.root.wait()

    def pre_forward(self, unit: FSDPUnit) -> None:
        """Gather the unit, free the one before it, and prefetch the one that ran next in the last forward."""
        unit.gather()
        if unit not in self.forward_order[-1:] and not in_backward():
            if self.forward_order:
                self.forward_order[-1].free()
                self.forward_order[-1].successor = unit
            self.forward_order.append(unit)
            if unit.successor:
                unit.successor.gather()
        unit.wait()

    def post_forward(self, unit: FSDPUnit, out: Any) -> None:
        """Hook the unit's outputs, whose gradients tell that the unit's backward begins."""
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self.on_output_grad(unit))

    def on_output_grad(self, unit: FSDPUnit) -> None:
        """Start the unit's backward. The root may have been freed, by a forward without grad."""
        self.gather_root()
        self.pre_backward(unit)

    # exercise 05.11
    def pre_backward(self, unit: FSDPUnit) -> None:
        """Gather the unit; send the gradients of the unit before it in backward; prefetch the next one.

        Does nothing for a unit in `self.unreduced`; afterwards that list has this unit alone. A unit that is sent is
        freed before the next one is gathered, and nothing is waited for before both have started.
        """
        if unit in self.unreduced:
            return
        unit.gather()
        self.send(self.unreduced)
        self.unreduced = [unit]
        position = self.forward_order.index(unit) if unit in self.forward_order else 0
        if position > 0:
            self.forward_order[position - 1].gather()
        unit.wait()

    def send(self, units: list[FSDPUnit]) -> None:
        """Free these units and start their reduce-scatters. At most one unit's are in flight at the end."""
        for unit in units:
            unit.free()
            unit.launch()
            self.reducing.append(unit)
        while len(self.reducing) > 1:
            self.reducing.pop(0).collect()

    def send_all(self) -> None:
        """Start the remaining reduce-scatters at the end of a backward, the root's too."""
        if self.unreduced or self.root.has_gradients:
            # A gradient may arrive after its unit's reduce-scatter has started: then the unit is reduced again.
            late = [unit for unit in self.units if unit not in self.unreduced and unit.has_gradients]
            self.send([*self.unreduced, *late])
            self.root.launch()
            self.reducing.append(self.root)
        self.unreduced = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Reduce gradients over the ranks that share the parameters only. Replicas, if there are any, sum them in the
        next backward outside, or in finish().
        """
        for flat in self.flat_params:
            flat.all_reduces = False
        try:
            yield
            self.send_all()
        finally:
            for flat in self.flat_params:
                flat.all_reduces = True

    def finish(self) -> None:
        """Wait for the gradients, after a step's last backward, on all ranks: `.grad` of each parameter is this rank's
        shard of the mean.
        """
        self.send_all()
        for unit in self.reducing:
            unit.collect()
        self.reducing = []
        for flat in self.flat_params:
            flat.all_reduce_grads()
        for flat in self.flat_params:
            flat.wait_all_reduce()
            flat.used.clear()
        self.wait()

    def wait(self) -> None:
        """Free all unsharded parameters: the modules have their local shards, as between steps."""
        for unit in [*self.units, self.root]:
            unit.free()

    def pre_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if an optimizer of these parameters steps before finish(), or for a GradScaler."""
        local = {shard for flat in self.flat_params for shard in flat.sharded_params}
        if local.isdisjoint(p for group in optimizer.param_groups for p in group["params"]):
            return
        if self.unfinished:
            raise RuntimeError("optimizer.step() before finish(): call finish() after a step's last backward")
        if scaled_by_one_rank():
            raise RuntimeError(
                "torch.amp.GradScaler skips a step on one rank and not on the others: use "
                "mixed_precision.LossScaler(group=...), or BF16 without a scaler"
            )

    def all_gather_params(self) -> None:
        """Return at once: the optimizer updates the local shards themselves, which the next forward gathers."""

    def updated_tensors(self) -> Iterable[UpdatedTensor]:
        """Yield the local shards. Between steps: see wait()."""
        for shard in self.module.parameters():
            yield UpdatedTensor(shard, [shard])

    def local_gradients(self) -> list[LocalGradient]:
        """Return this rank's shards of the mean gradient, after `finish()`."""
        return module_gradients(self.module)

    def full_weights(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each local shard with its unsharded values. Collective; one flat buffer at a time."""
        for flat in self.flat_params:
            yield from zip(flat.sharded_params, flat.layout.gather(flat.shard), strict=True)

    def extra_memory(self) -> dict[str, list[torch.Tensor]]:
        """Return the unsharded parameters, whose memory exists while they are gathered."""
        return {"parameters": [parameter for flat in self.flat_params for parameter in flat.unsharded_params]}


# exercise 05.14
def gather_ratio(tokens: int, dp: int, bandwidth: float, peak: float, param_bytes: float = 2) -> float:
    """Return the time of a unit's all-gather divided by the time of its forward; up to 1 prefetch can hide it.

    tokens: in a GPU's micro-batch; bandwidth: bytes per second of a GPU (bus bandwidth); peak: floating-point
    operations per second. The Ultra-Scale Playbook, appendix A3, with bytes in place of elements.
    """
    return param_bytes / (2 * tokens) * (dp - 1) / dp * peak / bandwidth
