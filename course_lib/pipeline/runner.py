"""Pipeline parallelism: each rank has stages of the model, and a runner carries out any schedule.

    stages = split_stages(model, p, v)                       # model: on the meta device, or the same on all ranks
    runner = PipelineRunner(stages, one_f_one_b(p, m), group)
    part = runner.step(inputs, targets)                      # gradients are in .grad; the parts' sum is the loss
    clip_grad_norm_(runner, 1.0)

Weights with several owner ranks (tied embeddings, DualPipe's second copy of every stage) begin with the same values and
get the sum of their gradients. With data parallelism: PipelineRunner(..., dp_group=group), then
dp = DataParallel(runner.stages, group) or a ZeroOptimizer, runner.step(..., no_sync=dp.no_sync), dp.finish(), and
clip_grad_norm_(runner, 1.0, zero) where that has the gradients.

Huang et al. 2018 (GPipe); Narayanan et al. 2021 (Megatron-LM), §2.2; Qi et al. 2023 (zero bubble).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.pipeline.actions import validate
from course_lib.pipeline.schedules import Action, Schedule
from course_lib.pipeline.split_backward import SplitPass
from course_lib.pipeline.stages import OutputFn, StagePass
from course_lib.pipeline.tied_weights import final_backwards, sync_tied_weights
from course_lib.pipeline.transfers import P2PBuffers, StageInput, infer_stage_shapes, plan_send_recv
from course_lib.recompute.modes import IGNORED, summed_loss


def split_batch(tensor: torch.Tensor | None, m: int) -> list:
    """Return m equal micro-batches of a batch [b, ...], or m times None. Raises ValueError if m does not divide b."""
    if tensor is None:
        return [None] * m
    if len(tensor) % m:
        raise ValueError(f"a batch of {len(tensor)} sequences does not divide into {m} equal micro-batches")
    return list(tensor.split(len(tensor) // m))


def check_runner(
    stages: Sequence[nn.Module] | Mapping[int, nn.Module], schedule: Schedule, group: dist.ProcessGroup
) -> dict[str, nn.Module]:
    """Return this rank's stages by number, as strings.

    Raises ValueError if stages, schedule and group do not fit, and for a debug level of PyTorch that would hang.
    """
    if group.size() > 1 and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        reason = "each collective waits for all of its ranks, which start it at different times"
        raise ValueError(f"TORCH_DISTRIBUTED_DEBUG=DETAIL hangs a pipeline, as {reason}: use INFO")
    if len(schedule) != group.size():
        raise ValueError(f"the schedule is for {len(schedule)} ranks, the group has {group.size()}")
    validate(schedule)
    local = sorted({action.stage for action in schedule[group.rank()]})
    given = dict(stages) if isinstance(stages, Mapping) else dict(enumerate(stages))
    if absent := [stage for stage in local if stage not in given]:
        raise ValueError(f"rank {group.rank()} of the pipeline has no stage {absent[0]}: it has {sorted(given)}")
    for stage in local:
        if any(parameter.is_meta for parameter in given[stage].parameters()):
            raise ValueError(f"stage {stage} is on the meta device: materialize the stages that this rank has")
    return {str(stage): given[stage] for stage in local}


def check_step(runner: PipelineRunner, inputs: torch.Tensor | None, targets: torch.Tensor | None) -> None:
    """Raise ValueError for a missing batch, RuntimeError if weights have been replaced since the constructor."""
    if inputs is None and "0" in runner.stages or targets is None and str(runner.last) in runner.stages:
        raise ValueError("the rank with the first stage needs inputs, the one with the last stage targets")
    if runner.tied_weights.owner_ranks.keys() != {*runner.stages.parameters()}:
        raise RuntimeError("weights have been replaced (assign=True, materialize): create the PipelineRunner afterward")


def stage_args(positions: torch.Tensor | None, m: int, targets: list | None = None) -> list[tuple]:
    """Return the stages' arguments beside x, by micro-batch: (its positions,), or () without positions; for a head
    that takes targets, given by micro-batch, (positions or None, targets).
    """
    by_rows = positions is not None and positions.dim() > 1
    of_each = split_batch(positions, m) if by_rows else [positions] * m
    if targets is not None:
        return list(zip(of_each, targets, strict=True))
    return [()] * m if positions is None else [(each,) for each in of_each]


@contextlib.contextmanager
def shared_autocast(device: torch.device, dtype: torch.dtype) -> Iterator[torch.autocast]:
    """Yield an autocast context that may be entered often and keeps its casts of the weights until the end of this one.

    Otherwise each micro-batch in flight would keep casts of its own: as many bytes as all weights of the model.
    """
    torch.autocast_increment_nesting()
    try:
        yield torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


@dataclasses.dataclass
class Step:
    """The data of one call of `PipelineRunner.step`; lists are by micro-batch."""

    inputs: list  # tensors; None on ranks without a batch
    targets: list
    args: list[tuple]  # the stages' arguments beside x
    tokens: int | torch.Tensor | None  # by which the losses are divided; None on ranks without the last stage
    autocast: torch.autocast
    p2p: P2PBuffers
    loss: torch.Tensor  # this rank's part, so far
    # By (stage, micro-batch): a StagePass, or a SplitPass if the schedule has an I for it.
    passes: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)


class PipelineRunner:
    """Runs a schedule on this rank's stages. Its constructor is collective over the default group.

    stages: all stages or this rank's, as a list or by number; group: the pipeline's ranks, in order;
    loss_of(output of the last stage, targets): the sum of the losses; dp_group: see the module; before_step,
    after_step: called at the beginning and at the end of each step. `stages` is a ModuleDict of this rank's stages.
    If the last one has a module whose `takes_targets` is true, it is called with positions (or None) and targets, and
    returns the sum of the losses: loss_of is not used. Raises ValueError if stages, schedule and group do not fit.
    """

    document_positions: torch.Tensor | None = None  # see at_positions

    def __init__(
        self,
        stages: Sequence[nn.Module] | Mapping[int, nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup | None = None,
        loss_of: Callable[..., torch.Tensor] = summed_loss,
        dp_group: dist.ProcessGroup | None = None,
        *,
        before_step: Callable[[], None] | None = None,
        after_step: Callable[[], None] | None = None,
    ):
        self.group: dist.ProcessGroup = group or dist.distributed_c10d._get_default_group()
        self.loss_of = loss_of
        self.before_step, self.after_step = before_step, after_step
        self.stages = nn.ModuleDict(check_runner(stages, schedule, self.group))
        self.tied_weights = sync_tied_weights(self.stages, schedule, self.group, dp_group)
        self.use(schedule)

    def use(self, schedule: Schedule) -> None:
        """Run this schedule from now on: the same stages on the same ranks, more or fewer micro-batches."""
        self.schedule, self.actions = schedule, schedule[self.group.rank()]
        self.shapes: dict[tuple[torch.Size | None, torch.dtype], list[StageInput | None]] = {}
        self.plan = plan_send_recv(schedule, self.group.rank())
        self.last = max(action.stage for actions in schedule for action in actions)
        self.m = 1 + max(action.micro_batch for actions in schedule for action in actions)
        self.split = {action[1:] for action in self.actions if action.kind == "I"}
        self.final = final_backwards(self.stages, self.actions)
        self.takes_targets = any(getattr(module, "takes_targets", False) for module in self.stages.modules())

    @contextlib.contextmanager
    def at_positions(self, positions: torch.Tensor | None) -> Iterator[None]:
        """Inside, a step uses these positions [b, s], of each token in its document, instead of its argument."""
        self.document_positions = positions
        try:
            yield
        finally:
            self.document_positions = None

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

        Returns this rank's part of that loss: the sum over the group is the loss. Ranks without the first stage may
        pass None as inputs (if all batches have one shape), those without the last None as targets. dtype: of the
        matmuls (autocast). tokens: see `accumulate`. no_sync: makes the context for all but a weight's last backward.
        positions: [s] or [b, s], if the ranks split the sequence. Raises ValueError if m does not divide b or a batch
        is missing, RuntimeError if the weights differ from the constructor's, or under torch.no_grad().
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("a step makes gradients: call it outside of torch.no_grad()")
        check_step(self, inputs, targets)
        if tokens is None and targets is not None:
            tokens = (targets != IGNORED).sum().clamp(min=1)
        if self.document_positions is not None:
            positions = self.document_positions
        with self.begin(inputs, targets, positions, dtype, tokens) as step:
            self.tied_weights.set_grads_aside()
            self.run_schedule(step, no_sync)
        self.tied_weights.all_reduce_grads()
        return step.loss

    @contextlib.contextmanager
    def begin(
        self,
        inputs: torch.Tensor | None,
        targets: torch.Tensor | None,
        positions: torch.Tensor | None,
        dtype: torch.dtype,
        tokens: int | torch.Tensor | None,
    ) -> Iterator[Step]:
        """Yield the data of a step, between before_step and after_step. Arguments: see `step`."""
        split_inputs, split_targets = split_batch(inputs, self.m), split_batch(targets, self.m)
        args = stage_args(positions, self.m, split_targets if self.takes_targets else None)
        device = next(self.stages.parameters()).device
        if self.before_step is not None:
            self.before_step()
        try:
            with shared_autocast(device, dtype) as autocast:
                with autocast:
                    batch = None if inputs is None else inputs.shape
                    shapes = self.stage_shapes(batch, split_inputs[0], args[0], dtype)
                p2p, loss = P2PBuffers(self.plan, self.group, shapes, device), torch.zeros((), device=device)
                yield Step(split_inputs, split_targets, args, tokens, autocast, p2p, loss)
        finally:
            if self.after_step is not None:
                self.after_step()

    # notebook 09, cell carry-out
    def run_schedule(self, step: Step, no_sync: Callable | None) -> None:
        """Carry out all actions of this rank in order, each after the transfers that the plan starts before it."""
        for index, action in enumerate(self.actions):
            step.p2p.start(index)
            with contextlib.nullcontext() if no_sync is None or index in self.final else no_sync():
                self.run(action, step)
        step.p2p.start(len(self.actions))
        step.p2p.wait_for_sends(0)

    def stage_shapes(
        self, batch: torch.Size | None, inputs: torch.Tensor | None, args: tuple, dtype: torch.dtype
    ) -> list[StageInput | None]:
        """Return the shape and dtype of each stage's input, inferred once for each shape of a batch: then collective.

        batch: the shape of the batch, None on ranks that have none; inputs, args: of its first micro-batch.
        """
        known = next((shape for shape, kind in self.shapes if kind == dtype), None)
        key = known if batch is None else batch, dtype
        if key not in self.shapes:
            device = next(self.stages.parameters()).device
            self.shapes[key] = infer_stage_shapes(self.stages, self.schedule, inputs, args, self.group, device)
        return self.shapes[key]

    def output_fn(self, step: Step, stage: int, micro_batch: int) -> OutputFn:
        """Return the function that a pass applies to the stage's output: the loss in the last stage, else identity."""

        def loss_of(out: torch.Tensor) -> torch.Tensor:
            assert step.tokens is not None, "check_step: the rank with the last stage has targets"
            with torch.autocast(out.device.type, enabled=False):
                summed = out if self.takes_targets else self.loss_of(out, step.targets[micro_batch])
                return summed / step.tokens

        return loss_of if stage == self.last else lambda out: out

    # exercise 09.9
    def run(self, action: Action, step: Step) -> None:
        """Carry out one action: take its tensor from `step.p2p`, and post there the tensor that it makes for others.

        F makes a pass in `step.passes`, inside `step.autocast`, with `self.output_fn` and `step.args` of the
        micro-batch, adds to `step.loss` in the last stage, and drops the pass's `out`; B, or I and then W, run its
        backward. After B or W the pass is no longer kept.
        """
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = step.inputs[micro_batch] if stage == 0 else step.p2p.wait_recv("F", *key)
            make = SplitPass if key in self.split else StagePass
            with step.autocast:
                done = step.passes[key] = make(
                    self.stages[str(stage)], x, self.output_fn(step, *key), *step.args[micro_batch]
                )
            if last:
                step.loss += done.out
            else:
                step.p2p.post_send("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            step.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(step.loss) if last else step.p2p.wait_recv("B", *key)
            done = step.passes[key] if kind == "I" else step.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                step.p2p.post_send("B", stage - 1, micro_batch, gradient)


# exercise 09.17
def pipeline_ratio(hidden: int, layers: float, bandwidth: float, peak: float, number_bytes: float = 2) -> float:
    """Return the time to send a hidden state over the time of the next stage's forward; up to 1 it can be hidden.

    hidden: h; layers: of the stage; bandwidth: bytes per second of the link; peak: FLOP/s;
    number_bytes: bytes per element that is sent. Tokens cancel. The Ultra-Scale Playbook, appendix A3 (16 h² weights
    per layer), corrected: bytes, not elements.
    """
    return number_bytes * peak / (32 * hidden * layers * bandwidth)
