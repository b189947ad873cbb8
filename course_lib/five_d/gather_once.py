"""ZeRO stage 3 under a pipeline: weights are gathered once per step, for all micro-batches.

A stage runs m micro-batches per step. If its weights were gathered for each of them, as FullyShard does, they would be
sent 2 m times. Gathered once, weights and gradients are sent once each, for any m; a rank has the unsharded weights of
its stages during a step, and its local shards of weights and states between steps. The gradients of micro-batches add
up in float32. Once the last backward of a step has made all gradients of a unit, they are sent and the unit's weights
are freed. (The Ultra-Scale Playbook, chapter 8.)
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from course_lib.zero.full_sharding import FullyShard
from course_lib.zero.sharded_parameters import FSDPUnit, ShardedParameters


class GatherOncePerStep(FullyShard):
    """A `wrapper` of fully_shard for a ModuleDict of stages: gather(); the stages' passes, in any order; finish().

    From gather() on, the units in `unreduced` have their unsharded parameters, and gradients of the step that have not
    been sent. They are sent from the last unit to the first, on all ranks: a unit's when all of them are final, or by
    finish(), as for the units in `late`. Gradients that backward makes inside no_sync() are not final.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.final = False
        self.late: set[FSDPUnit] = set()
        self.missing = {unit: self.trained(unit) for unit in [*self.units, self.root]}  # without their final gradient
        weak = weakref.proxy(self)
        for unit in self.missing:
            for flat in unit.flat_params:
                for weight in flat.unsharded_params if flat.trained else ():
                    hook = lambda weight, unit=unit, flat=flat: weak.add_gradient(weight, unit, flat)  # noqa: E731
                    weight.register_post_accumulate_grad_hook(hook)

    # exercise 10.10
    def gather(self) -> None:
        """Start all all-gathers, in the order of forward; before a step, on all ranks. The stages have unsharded
        parameters afterwards, whose values may still be in flight; the root's values have arrived. `unreduced` has all
        units then, in the order of forward.
        """
        for flat in (flat for unit in [self.root, *self.units] for flat in unit.flat_params):
            flat.buffer.gather()
            flat.register(flat.unsharded_params)
        self.unreduced = list(self.units)
        self.pre_forward(self.root)  # no module waits for its weights later: they are in no unit, or in two

    # exercise 10.10
    def pre_forward(self, unit: FSDPUnit) -> None:
        """Wait for the unit's all-gathers; leave its modules alone: a split pass has put proxy parameters there."""
        for flat in unit.flat_params:
            flat.buffer.wait()

    def on_output_grad(self, unit: FSDPUnit) -> None:
        """Return at once: all units are gathered."""

    @staticmethod
    def trained(unit: FSDPUnit) -> set[nn.Parameter]:
        """Return the unit's unsharded parameters that get gradients."""
        return {weight for flat in unit.flat_params if flat.trained for weight in flat.unsharded_params}

    def reduce_at_finish(self, groups: Collection[dist.ProcessGroup]) -> None:
        """Leave to finish() the units that are sharded over these groups: groups of several stages, whose backwards run
        at different times, and would wait for each other.
        """
        self.late = {unit for unit in self.units if any(flat.layout.group in groups for flat in unit.flat_params)}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients. The first backward of a stage outside is its last one of the step."""
        self.final = False
        yield
        self.final = True

    def add_gradient(self, weight: nn.Parameter, unit: FSDPUnit, flat: ShardedParameters) -> None:
        """Add a gradient that backward has made to the step's, and send the units that are complete."""
        flat.store([weight])
        if not self.final:
            return
        self.missing[unit].discard(weight)
        early = [] if self.missing[unit] else [unit for unit in self.unreduced if unit not in self.late]
        while early and not self.missing[early[-1]]:
            self.unreduced.remove(early[-1])
            self.send([early.pop()])

    def send(self, units: list[FSDPUnit]) -> None:
        """Send the units' gradients, as FullyShard does; the next step begins without any."""
        super().send(units)
        self.missing.update((unit, self.trained(unit)) for unit in units)

    def wait(self) -> None:
        """Free all unsharded parameters, also after forwards without a backward."""
        self.unreduced = []
        super().wait()

    def send_all(self) -> None:
        """Send the remaining units, at the end of a step. The root is unsharded during the whole step."""
        gathered = any(flat.buffer.gathered for flat in self.root.flat_params)
        self.send([*reversed(self.unreduced), *[self.root] * gathered])
        self.unreduced, self.final = [], False
