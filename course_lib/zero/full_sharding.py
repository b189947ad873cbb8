"""ZeRO stage 3: parameters, gradients and optimizer states shared out over N ranks, (2 Psi + 2 Psi + k Psi) / N bytes.

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
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from course_lib.zero.sharded_parameters import FSDPUnit, ShardedParameters


def in_backward() -> bool:
    """Whether a backward calls this: in a recomputed forward, for instance."""
    return torch._C._current_graph_task_id() != -1


def scaled_by_one_rank() -> bool:
    """Return whether a torch.amp.GradScaler makes this step: unlike ShardedGradScaler, it does not ask other ranks.

    It leaves a mark on fused optimizers only, so this function looks at its callers.
    """
    frame, code = sys._getframe(), torch.amp.GradScaler.step.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None and type(frame.f_locals["self"]) in (torch.amp.GradScaler, torch.cuda.amp.GradScaler)


class UnitRunner(nn.Module):
    """Gathers units before they are used, frees them afterwards, and sends their gradients.

    group: the ranks that a batch is divided among; root: the unit of the parameters that belong to no unit, or to two,
    whole from forward to finish(). FullyShard adds pre_backward(unit): what to do when a unit's backward is about to
    begin.
    """

    def __init__(
        self, module: nn.Module, group, units: list[FSDPUnit], root: FSDPUnit, compute_dtype: torch.dtype | None
    ):
        super().__init__()
        self.module, self.group, self.units, self.root, self.compute_dtype = module, group, units, root, compute_dtype
        self.forward_order: list[FSDPUnit] = []  # by the last forward, in order
        self.unreduced: list[FSDPUnit] = []  # their backward has begun, and their gradients are still here
        self.sent: list[FSDPUnit] = []  # their gradients are on their way
        for unit, successor in zip(units, units[1:], strict=False):
            unit.successor = successor
        # Hooks of the module and of autograd graphs keep this wrapper alive: a backward may run after the caller has
        # dropped it. The hook on all optimizers must not.
        module.register_forward_pre_hook(lambda *_: self.gather_root())
        for unit in units:
            for each in unit.modules:
                each.register_forward_pre_hook(lambda *_, unit=unit: self.pre_forward(unit))
                each.register_forward_hook(lambda _, __, out, unit=unit: self.post_forward(unit, out))
        weak = weakref.ref(self)
        handle = register_optimizer_step_pre_hook(lambda optimizer, *_: weak().before_step(optimizer))
        weakref.finalize(self, handle.remove)

    def forward(self, *args, **kwargs):
        """What the module returns; floating-point arguments are cast to compute_dtype."""
        whole = [] if self.unfinished else [self.root]  # the root stays between micro-batches
        self.send_all()  # of an earlier micro-batch
        for unit in [*self.units, *whole]:  # of a forward without a backward: the pieces may have changed since
            unit.free()
        for unit in [self.root, *(self.forward_order or self.units)[:1]]:
            unit.gather()
        self.forward_order = []
        if self.compute_dtype is not None:
            args, kwargs = tree_map(self.cast, (args, kwargs))
        out = self.module(*args, **kwargs)
        for unit in self.forward_order[-1:]:
            unit.successor = None
        kept = [self.root, *self.forward_order[-1:]] if torch.is_grad_enabled() else []
        for unit in [*self.units, self.root]:
            if unit not in kept:
                unit.free()
        return out

    def cast(self, value):
        """A floating-point tensor in compute_dtype, anything else as it is."""
        floating = torch.is_tensor(value) and value.is_floating_point()
        return value.to(self.compute_dtype) if floating else value

    @property
    def unfinished(self) -> bool:
        """Whether there are gradients since the last finish()."""
        return bool(self.unreduced or self.sent or self.root.has_gradients)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError where an optimizer of these parameters steps before finish(), or for a GradScaler."""
        own = {piece for unit in [*self.units, self.root] for part in unit.flat_params for piece in part.sharded_params}
        if own.isdisjoint(p for group in optimizer.param_groups for p in group["params"]):
            return
        if self.unfinished:
            raise RuntimeError("optimizer.step() before finish(): call finish() after a step's last backward")
        if scaled_by_one_rank():
            raise RuntimeError(
                "torch.amp.GradScaler skips a step on one rank and not on the others: use "
                "mixed_precision.LossScaler(group=...), or BF16 without a scaler"
            )

    def pre_forward(self, unit: FSDPUnit) -> None:
        """Have the unit whole, free the one before it, and have the one that ran next the last time on its way."""
        unit.gather()
        if unit not in self.forward_order[-1:] and not in_backward():
            if self.forward_order:
                self.forward_order[-1].free()
                self.forward_order[-1].successor = unit
            self.forward_order.append(unit)
            if unit.successor:
                unit.successor.gather()
        unit.wait()

    def post_forward(self, unit: FSDPUnit, out) -> None:
        """Be told when the unit's backward begins."""
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self.on_output_grad(unit))

    def on_output_grad(self, unit: FSDPUnit) -> None:
        """The gradient of a unit's output is there. The root may be gone: a forward without grad frees it."""
        self.gather_root()
        self.pre_backward(unit)

    def gather_root(self) -> None:
        """Gather the root's parameters."""
        self.root.gather()
        self.root.wait()

    def send(self, units: list[FSDPUnit]) -> None:
        """Free these units and start their reduce-scatter. At most one unit is on its way at the end."""
        for unit in units:
            unit.free()
            unit.launch()
            self.sent.append(unit)
        while len(self.sent) > 1:
            self.sent.pop(0).collect()

    def send_all(self) -> None:
        """At the end of a backward: send what is left, the root's gradients too."""
        if self.unreduced or self.root.has_gradients:
            late = [unit for unit in self.units if unit not in self.unreduced and unit.has_gradients]
            self.send([*self.unreduced, *late])  # late: made after the unit's gradients had been sent
            self.root.launch()
            self.sent.append(self.root)
        self.unreduced = []

    @contextmanager
    def no_sync(self):
        """Inside, gradients are summed over the ranks that share the parameters out. Replicas, where there are any, get
        the sum with the next backward outside, or by finish().
        """
        for part in self.flat_params:
            part.replicates = False
        try:
            yield
            self.send_all()
        finally:
            for part in self.flat_params:
                part.replicates = True

    @property
    def flat_params(self) -> list[ShardedParameters]:
        """Of all units."""
        return [part for unit in [*self.units, self.root] for part in unit.flat_params]

    def finish(self) -> None:
        """After a step's last backward, on all ranks: `.grad` of each parameter is this rank's piece of the mean."""
        self.send_all()
        for unit in self.sent:
            unit.collect()
        self.sent = []
        for part in self.flat_params:
            part.replicate()
        for part in self.flat_params:
            part.settle()
            part.used.clear()
        for unit in [*self.units, self.root]:
            unit.free()


class FullyShard(UnitRunner):
    """What `fully_shard` returns: `loss(model(x)).backward(); model.finish(); optimizer.step()`.

    All ranks run the same units in the same order. state_dict() has this rank's pieces; the whole: full_state_dict.
    """

    # exercise 05.11
    def pre_backward(self, unit: FSDPUnit) -> None:
        """Have the unit whole; send the gradients of the one before it in backward; have the next one on its way.

        Does nothing for a unit in `self.unreduced`; afterwards that is this unit alone. What is sent is freed before the
        next one is gathered, and nothing is waited for before both have started.
        """
        if unit in self.unreduced:
            return
        unit.gather()
        self.send(self.unreduced)
        self.unreduced = [unit]
        place = self.forward_order.index(unit) if unit in self.forward_order else 0
        if place > 0:
            self.forward_order[place - 1].gather()
        unit.wait()


# exercise 05.14
def gather_ratio(tokens: int, dp: int, bandwidth: float, peak: float, param_bytes: float = 2) -> float:
    """Return the time of a unit's all-gather over that of its forward; up to 1 prefetch can hide it.

    tokens: of a GPU's micro-batch; bandwidth: bytes per second of a GPU (bus bandwidth); peak: floating-point
    operations per second. The Ultra-Scale Playbook, appendix A3, with bytes in place of elements.
    """
    return param_bytes / (2 * tokens) * (dp - 1) / dp * peak / bandwidth
