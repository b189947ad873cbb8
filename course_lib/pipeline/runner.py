"""Pipeline parallelism: each rank has some stages of the model, and a runner carries out any schedule.

    stages = split_stages(model, p, v)                       # model: on the meta device, or the same on all ranks
    runner = PipelineRunner(stages, one_f_one_b(p, m), group)
    part = runner.step(inputs, targets)                      # gradients are in .grad; the parts' sum is the loss
    clip_grad_norm_(runner, 1.0)

Weights that several ranks hold (tied embeddings, DualPipe's second copy of every stage) begin with the same values
and get the sum of their gradients. With data parallelism: PipelineRunner(..., dp_group=group), then
dp = DataParallel(runner.stages, group) or a ZeroOptimizer, runner.step(..., no_sync=dp.no_sync), dp.finish(), and
clip_grad_norm_(runner, 1.0, zero) where that has the gradients.

Huang et al. 2018 (GPipe); Narayanan et al. 2021 (Megatron-LM), §2.2; Qi et al. 2023 (zero bubble).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from course_lib.pipeline.actions import validate
from course_lib.pipeline.schedules import Action, Schedule
from course_lib.pipeline.split_backward import SplitPass
from course_lib.pipeline.stages import StagePass
from course_lib.pipeline.tied_weights import final_backwards, sync_tied_weights
from course_lib.pipeline.transfers import P2PBuffers, plan_send_recv
from course_lib.recompute.modes import IGNORED, summed_loss


def micro_batches_of(tensor: torch.Tensor | None, m: int) -> list:
    """A batch [b, ...] in m equal parts; m times None for None. Raises ValueError where m does not divide b."""
    if tensor is None:
        return [None] * m
    if len(tensor) % m:
        raise ValueError(f"a batch of {len(tensor)} sequences can't be cut into {m} equal micro-batches")
    return list(tensor.split(len(tensor) // m))


@torch.no_grad()
def infer_stage_shapes(
    stages: nn.ModuleDict, schedule: Schedule, inputs: torch.Tensor | None, more: tuple, group, device
) -> list:
    """(shape, dtype) of what enters each stage, the same on all ranks: each stage runs on noise, the first on `inputs`,
    and the rank that has it tells the others. more: a stage's other arguments. Collective.
    """
    holder = {each.stage: rank for rank, actions in reversed(list(enumerate(schedule))) for each in actions}
    found = [None] * len(holder)
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        for stage in range(len(holder) - 1):
            told = [None]
            if holder[stage] == group.rank():
                shape, dtype = found[stage] or (None, None)
                x = inputs if stage == 0 else torch.randn(shape, dtype=dtype, device=device)
                out = stages[str(stage)](x, *more)
                told = [(out.shape, out.dtype)]
            dist.broadcast_object_list(told, group=group, group_src=holder[stage])
            found[stage + 1] = told[0]
    return found


def check_runner(stages, schedule: Schedule, group: dist.ProcessGroup) -> dict[str, nn.Module]:
    """This rank's own stages, by number as a word. Raises ValueError where stages, schedule and group do not fit, and
    where PyTorch's checks would hang.
    """
    if group.size() > 1 and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        reason = "each collective waits for all of its ranks, which start it at different times"
        raise ValueError(f"TORCH_DISTRIBUTED_DEBUG=DETAIL hangs a pipeline, as {reason}: use INFO")
    if len(schedule) != group.size():
        raise ValueError(f"the schedule is for {len(schedule)} ranks, the group has {group.size()}")
    validate(schedule)
    own = sorted({action.stage for action in schedule[group.rank()]})
    has = dict(stages) if isinstance(stages, dict) else dict(enumerate(stages))
    if absent := [stage for stage in own if stage not in has]:
        raise ValueError(f"rank {group.rank()} of the pipeline has no stage {absent[0]}: it has {sorted(has)}")
    for stage in own:
        if any(each.is_meta for each in has[stage].parameters()):
            raise ValueError(f"stage {stage} is on the meta device: materialize the stages that this rank has")
    return {str(stage): has[stage] for stage in own}


def check_step(runner, inputs, targets) -> None:
    """Raise where a step can't begin: ValueError for a batch that is missing, RuntimeError for the runner's state."""
    if not torch.is_grad_enabled():
        raise RuntimeError("a step makes gradients: call it outside of torch.no_grad()")
    if inputs is None and "0" in runner.stages or targets is None and str(runner.last) in runner.stages:
        raise ValueError("the rank with the first stage needs inputs, the one with the last stage targets")
    if runner.tied_weights.owner_ranks.keys() != {*runner.stages.parameters()}:
        raise RuntimeError("weights have been replaced (assign=True, materialize): make the PipelineRunner afterwards")


def arguments_of(positions: torch.Tensor | None, m: int) -> list[tuple]:
    """Of each micro-batch, the stages' arguments beside x: its positions, where there are some."""
    if positions is None:
        return [()] * m
    return [(part,) for part in (micro_batches_of(positions, m) if positions.dim() > 1 else [positions] * m)]


@contextlib.contextmanager
def casting_once(device: torch.device, dtype: torch.dtype):
    """An autocast context, to be entered often; what it has cast of the weights is kept until the end of this one.

    Otherwise each micro-batch in flight would keep casts of its own: as many bytes as the whole model's weights.
    """
    torch.autocast_increment_nesting()
    try:
        yield torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


class PipelineRunner:
    """Runs a schedule on this rank's stages. Its constructor is collective over the default group.

    stages: all or this rank's own, a list or by number; group: the pipeline's ranks, in order; loss_of(what the last
    stage returns, targets): the sum of the losses; dp_group: see the module; before_step, after_step: called at the
    beginning and at the end of each step. `stages` is a ModuleDict of its own ones.
    Raises ValueError where stages, schedule and group do not fit.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module] | dict[int, nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup | None = None,
        loss_of: Callable[..., torch.Tensor] = summed_loss,
        dp_group: dist.ProcessGroup | None = None,
        *,
        before_step: Callable[[], None] | None = None,
        after_step: Callable[[], None] | None = None,
    ):
        self.group, self.loss_of = group or dist.group.WORLD, loss_of
        self.before_step, self.after_step = before_step, after_step
        self.stages = nn.ModuleDict(check_runner(stages, schedule, self.group))
        self.tied_weights = sync_tied_weights(self.stages, schedule, self.group, dp_group)
        self.use(schedule)

    def use(self, schedule: Schedule) -> None:
        """Run this schedule from now on: the same stages on the same ranks, more or fewer micro-batches."""
        self.schedule, self.actions, self.shapes = schedule, schedule[self.group.rank()], {}
        self.plan = plan_send_recv(schedule, self.group.rank())
        self.last, self.m = (1 + max(a[i] for actions in schedule for a in actions) - (i == 1) for i in (1, 2))
        self.split = {action[1:] for action in self.actions if action.kind == "I"}
        self.final = final_backwards(self.stages, self.actions)

    def step(
        self,
        inputs: torch.Tensor | None,
        targets: torch.Tensor | None,
        dtype: torch.dtype = torch.float32,
        tokens: int | torch.Tensor | None = None,
        no_sync: Callable | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add to .grad the gradient of the mean loss over all target tokens of a batch, inputs and targets each [b, s].

        Returns this rank's part of that loss: their sum over the group is the loss. Ranks without the first stage may
        pass None as inputs (if all batches have one shape), those without the last None as targets. dtype: of the
        matrix products (autocast). tokens: see `accumulate`. no_sync: makes the context for all but a weight's last
        backward. positions: [s] or [b, s], where ranks have parts of the sequence. Raises ValueError where m does not
        divide b or a batch is missing, RuntimeError where weights are not the constructor's, and without gradients.
        """
        check_step(self, inputs, targets)
        self.inputs, self.targets = (micro_batches_of(each, self.m) for each in (inputs, targets))
        self.more = arguments_of(positions, self.m)
        self.tokens = (targets != IGNORED).sum().clamp(min=1) if tokens is None and targets is not None else tokens
        device = next(self.stages.parameters()).device
        self.passes, self.loss = {}, torch.zeros((), device=device)
        self.tied_weights.set_aside()
        if self.before_step is not None:
            self.before_step()
        try:
            with casting_once(device, dtype) as self.autocast:
                self.p2p = P2PBuffers(self.plan, self.group, self.shapes_of(inputs, dtype), device)
                self.run_schedule(no_sync)
        finally:
            if self.after_step is not None:
                self.after_step()
        self.tied_weights.sum_gradients()
        return self.loss

    # notebook 09, cell carry-out
    def run_schedule(self, no_sync: Callable | None) -> None:
        """All actions of this rank in order, each after the mail that the plan starts before it."""
        for place, action in enumerate(self.actions):
            self.p2p.start(place)
            with contextlib.nullcontext() if no_sync is None or place in self.final else no_sync():
                self.run(action)
        self.p2p.start(len(self.actions))
        self.p2p.wait_for_sends(0)

    def shapes_of(self, inputs: torch.Tensor | None, dtype: torch.dtype) -> list:
        """(shape, dtype) of what enters each stage: negotiated once for each shape of a batch. Collective then."""
        known = next((shape for shape, kind in self.shapes if kind == dtype), None)
        key = known if inputs is None else inputs.shape, dtype
        if key not in self.shapes:
            with self.autocast:
                self.shapes[key] = infer_stage_shapes(
                    self.stages, self.schedule, self.inputs[0], self.more[0], self.group, self.loss.device
                )
        return self.shapes[key]

    def finish(self, stage: int, micro_batch: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """What a pass makes of the stage's output: the loss in the last stage, else nothing."""

        def loss_of(out: torch.Tensor) -> torch.Tensor:
            with torch.autocast(out.device.type, enabled=False):
                return self.loss_of(out, self.targets[micro_batch]) / self.tokens

        return loss_of if stage == self.last else lambda out: out

    # exercise 09.9
    def run(self, action: Action) -> None:
        """Carry out one action: take what it needs from `self.p2p`, and put there what it makes for others.

        F makes a pass in `self.passes`, inside `self.autocast`, with `self.finish` and `self.more` of the micro-batch,
        adds to `self.loss` in the last stage, and drops the pass's `out`; B, or I and then W, run its backward. After B
        or W the pass is no longer kept.
        """
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.p2p.wait_recv("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.p2p.post_send("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.p2p.wait_recv("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.p2p.post_send("B", stage - 1, micro_batch, gradient)


# exercise 09.17
def pipeline_ratio(hidden: int, layers: float, bandwidth: float, peak: float, number_bytes: float = 2) -> float:
    """Return the time to send a hidden state over that of the next stage's forward; up to 1 it can be hidden.

    hidden: h; layers: of the stage; bandwidth: bytes a second of the link; peak: floating-point operations a second;
    number_bytes: of each number that is sent. Tokens cancel. The Ultra-Scale Playbook, appendix A3 (16 h² weights a
    layer), corrected: bytes, not numbers.
    """
    return number_bytes * peak / (32 * hidden * layers * bandwidth)
