"""ZeRO stage 3 under a pipeline: weights are gathered once a step, and kept for all micro-batches.

A stage runs m micro-batches a step. Gathered for each of them, as FullyShard does, its weights would be sent 2 m times.
Kept, they are sent once and their gradients once, whatever m is; a rank has the whole of its stages while a step lasts,
and its piece of weights and states between steps. Micro-batches' gradients add up in float32. A unit's are sent, and
its weights freed, as soon as the step's last backward has made them. (The Ultra-Scale Playbook, chapter 8.)
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager

from torch import nn

from course_lib.zero.full_sharding import FullyShard
from course_lib.zero.sharded_parameters import FSDPUnit, ShardedParameters


class GatherOncePerStep(FullyShard):
    """What fully_shard makes of a ModuleDict of stages: gather(); the stages' passes, in any order; finish().

    From gather() on, the units in `open` have their full parameters, and gradients of the step that have not been sent.
    These are sent from the last unit to the first, on all ranks: a unit's when all of them are final, or by finish(),
    as for the units in `late`. Gradients that backward makes inside no_sync() are not final.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.final, self.late = False, set()
        self.missing = {unit: self.trained(unit) for unit in [*self.units, self.root]}  # whose gradient is not final
        weak = weakref.ref(self)
        for unit in self.missing:
            for part in unit.flat_params:
                for weight in part.unsharded_params if part.trained else ():
                    hook = lambda weight, unit=unit, part=part: weak().take(weight, unit, part)  # noqa: E731
                    weight.register_post_accumulate_grad_hook(hook)

    # exercise 10.10
    def gather(self) -> None:
        """Start all all-gathers, in the order of forward; before a step, on all ranks. The stages have full parameters
        from here on, whose values may still be on their way; those of the root are there. All units are open then, in
        the order of forward.
        """
        for part in (part for unit in [self.root, *self.units] for part in unit.flat_params):
            part.buffer.gather()
            part.register(part.unsharded_params)
        self.unreduced = list(self.units)
        self.pre_forward(self.root)  # its weights are in no unit, or in two: nobody waits for them later

    # exercise 10.10
    def pre_forward(self, unit: FSDPUnit) -> None:
        """Wait until the unit's values are there; leave its parameters alone: a split pass has stand-ins there."""
        for part in unit.flat_params:
            part.buffer.wait()

    def on_output_grad(self, unit: FSDPUnit) -> None:
        """Everything is there."""

    @staticmethod
    def trained(unit: FSDPUnit) -> set[nn.Parameter]:
        """The unit's whole parameters that get gradients."""
        return {weight for part in unit.flat_params if part.trained for weight in part.unsharded_params}

    def send_late(self, groups) -> None:
        """Leave to finish() what is shared out over these groups: of several stages, whose backwards come at different
        times, and would wait for each other.
        """
        self.late = {unit for unit in self.units if any(part.layout.group in groups for part in unit.flat_params)}

    @contextmanager
    def no_sync(self):
        """Inside, backward adds gradients up. The first backward of a stage outside is its last one of the step."""
        self.final = False
        yield
        self.final = True

    def take(self, weight: nn.Parameter, unit: FSDPUnit, part: ShardedParameters) -> None:
        """Add a gradient that backward has made to the step's, and send what is complete."""
        part.store([weight])
        if not self.final:
            return
        self.missing[unit].discard(weight)
        early = [] if self.missing[unit] else [unit for unit in self.unreduced if unit not in self.late]
        while early and not self.missing[early[-1]]:
            self.unreduced.remove(early[-1])
            self.send([early.pop()])

    def send(self, units: list[FSDPUnit]) -> None:
        """As FullyShard's; the next step begins with nothing."""
        super().send(units)
        self.missing.update((unit, self.trained(unit)) for unit in units)

    def send_all(self) -> None:
        """What has not been sent, at the end of a step. The root is whole for as long as the step lasts."""
        under_way = any(part.buffer.gathered for part in self.root.flat_params)
        self.send([*reversed(self.unreduced), *[self.root] * under_way])
        self.unreduced, self.final = [], False
